"""Code against hidden tests.

Example:
    grader = CodeGrader(await open_bubblewrap())
    tests = call_tests([("add(1, 2)", "3"), ("add(2, 2)", "4")])
    grade = await grader.grade(response, tests)
    assert grade.reward == 1.0, grade.feedback()
"""

from __future__ import annotations

from agentrl_rewards.code.blocks import last_code_block, whole_response
from agentrl_rewards.code.cases import (
    CallCase,
    FunctionTests,
    HiddenTests,
    ProgramTests,
    StdinCase,
    assert_tests,
    call_tests,
    read_tests,
)
from agentrl_rewards.code.grader import CodeGrade, CodeGrader
from agentrl_rewards.code.module_tests import ModuleTests
from agentrl_rewards.code.protocol import CaseGrade, CaseOutcome

__all__ = [
    "CallCase",
    "CaseGrade",
    "CaseOutcome",
    "CodeGrade",
    "CodeGrader",
    "FunctionTests",
    "HiddenTests",
    "ModuleTests",
    "ProgramTests",
    "StdinCase",
    "assert_tests",
    "call_tests",
    "last_code_block",
    "read_tests",
    "whole_response",
]
