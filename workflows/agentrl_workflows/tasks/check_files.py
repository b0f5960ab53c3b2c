"""Turns a `check(candidate)` of HumanEval that does more than compare calls with constants into a hidden test file.

Invariant: nothing is executed here. Every assertion is kept; random inputs are the same in each run.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Final

from agentrl.errors import ConfigError
from agentrl.types import JsonValue
from agentrl_rewards.code.cases import read_tests
from agentrl_rewards.code.runner import SOLUTION
from agentrl_workflows.tasks.assertions import Renamed

_CHECKS: Final = (ast.Assert, ast.For, ast.While, ast.If, ast.Try, ast.With)
_SEED: Final = "import random\nrandom.seed(0)"


def check_file(source: str, entry: str, prompt: str) -> dict[str, JsonValue]:
    r"""Return hidden tests, in the form that `read_tests` reads, with one test function for each assertion and loop.

    Each begins with the statements before it that check nothing, such as imports. Functions of the prompt that the checks
    call, other than the one to write, are those of the prompt, whatever a submission makes of them.

    Args:
        source: Python with one function `check(candidate)`.
        entry: the function that takes the place of `candidate`.
        prompt: the start of the program, with the functions that it gives.

    Raises:
        ConfigError: there is no such function, or it holds what the grader does not support.

    Example:
        >>> source = "def check(candidate):\n    for n in range(3):\n        assert candidate(n) == n + 1"
        >>> tests = check_file(source, "inc", "")
        >>> print(tests["test_file"])
        from solution import inc
        def test_1():
            import random
            random.seed(0)
            for n in range(3):
                assert inc(n) == n + 1
    """
    try:
        body, given = ast.parse(source).body, ast.parse(prompt + "\n    pass\n" if prompt else "").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"expected Python with a function check(candidate): {error}") from None
    checks = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == "check"]
    if len(checks) != 1 or len(checks[0].args.args) != 1:
        raise ConfigError("expected one function check(candidate)")
    renamed = Renamed(checks[0].args.args[0].arg, entry)
    helpers = [node for node in given if not (isinstance(node, ast.FunctionDef) and node.name == entry)]
    kept = [ast.unparse(node) for node in helpers if isinstance(node, (ast.FunctionDef, ast.Import, ast.ImportFrom))]
    functions = _functions([renamed.visit(node) for node in checks[0].body])
    tests: dict[str, JsonValue] = {"test_file": "\n".join([f"from {SOLUTION} import {entry}", *kept, *functions])}
    read_tests(tests)
    return tests


def _functions(statements: Sequence[ast.stmt]) -> list[str]:
    before: list[str] = [_SEED]
    functions: list[str] = []
    for node in statements:
        text = ast.unparse(node)
        if not isinstance(node, _CHECKS):
            before.append(text)
            continue
        lines = "\n".join([*before, text]).splitlines()
        functions.append("\n".join([f"def test_{len(functions) + 1}():", *(f"    {line}" for line in lines)]))
    if not functions:
        raise ConfigError("expected at least one assertion in check(candidate)")
    return functions
