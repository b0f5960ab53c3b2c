"""Hidden tests from the data of tasks."""

from __future__ import annotations

import pytest

from agentrl.errors import ConfigError
from agentrl.types import JsonValue
from agentrl_rewards.code import CallCase, FunctionTests, ProgramTests, StdinCase, assert_tests, call_tests, read_tests


def test_calls_are_read() -> None:
    tests = call_tests([("Solution.add(1, b=[2, -3])", "(1, {2: None})")], tolerance=0.5)
    case = CallCase(arguments=(1,), keywords={"b": [2, -3]}, expected=(1, {2: None}))
    assert tests == FunctionTests(entry="Solution.add", cases=(case,), tolerance=0.5)


def test_assertions_are_read() -> None:
    lines = [
        "assert f(1) == [2]",
        "assert f(2) is None",
        "assert f(3)",
        "assert not f(4)  # even",
        "assert (f(5) == 6), 'why'",
    ]
    tests = assert_tests(lines)
    assert [case.expected for case in tests.cases] == [[2], None, True, False, 6]


def test_data_of_all_kinds_is_read() -> None:
    assert read_tests({"calls": [["f(1)", "2"]]}) == call_tests([("f(1)", "2")])
    assert read_tests({"asserts": ["assert f(1) == 2"], "tolerance": 0}) == call_tests([("f(1)", "2")], tolerance=0)
    assert read_tests({"calls": [["set(f(1))", "{2}"]], "comparison": "python"}) == FunctionTests(
        entry="f", cases=(CallCase(arguments=(1,), expected={2}, views=("set",)),), comparison="python"
    )
    runs = ProgramTests(cases=(StdinCase(stdin="1\n", expected="2\n"),), tolerance=0.1)
    assert read_tests({"runs": [["1\n", "2\n"]], "tolerance": 0.1}) == runs


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("f(1) == 2", "expected a mapping"),
        ({}, "expected one of calls, runs, asserts and test_file"),
        ({"calls": [["f(1)", "2"]], "runs": [["", ""]]}, "expected one of"),
        ({"calls": []}, "at least one case"),
        ({"runs": []}, "at least one case"),
        ({"calls": "f(1)"}, "expected a list"),
        ({"calls": [["f(1)"]]}, "expected pairs"),
        ({"runs": [["1", 2]]}, "expected texts"),
        ({"calls": [["f(1", "2"]]}, "expected a Python expression"),
        ({"calls": [["1", "2"]]}, "expected a call"),
        ({"calls": [["f(1)", "g(1)"]]}, "expected literal values"),
        ({"calls": [["f(x)", "1"]]}, "expected literal values"),
        ({"calls": [["f(1)", "2"], ["g(1)", "2"]]}, "calls of one function"),
        ({"calls": [["f()(1)", "2"]]}, "the entry must be a name"),
        ({"calls": [["f(1)", "..."]]}, "expected plain data"),
        ({"calls": [["f(" + "(" * 2000, "1"]]}, "expected a Python expression"),
        ({"asserts": ["f(1) == 2"]}, "expected an assertion"),
        ({"asserts": ["assert f(1) < 2"]}, "expected an assertion"),
        ({"asserts": ["assert 1 +"]}, "expected an assertion"),
        ({"asserts": [""]}, "expected an assertion"),
        ({"asserts": ["assert open('x').read() == ''"]}, "the entry must be a name"),
        ({"runs": [["", ""]], "tolerance": "0.1"}, "tolerance must be a number"),
        ({"runs": [["", ""]], "comparison": "loose"}, "comparison exact or python, got 'loose'"),
        ({"runs": [["", ""]], "tolerance": -1}, "tolerance must be a number of at least 0"),
        ({"runs": [["", ""]], "tolerance": float("nan")}, "tolerance must be a number of at least 0"),
    ],
)
def test_data_that_is_no_tests_is_refused(data: JsonValue, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_tests(data)
