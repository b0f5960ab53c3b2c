"""Files of programming problems become tasks with hidden tests, and their solutions pass them."""

from __future__ import annotations

import base64
import json
import logging
import pickle  # noqa: TID251 - what the sandbox must read, or refuse
import re
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import ConfigError
from agentrl.types import Task
from agentrl_rewards.code import CodeGrader, FunctionTests, ProgramTests, read_tests
from agentrl_sandbox.base import BoxSandbox
from agentrl_workflows.tasks.assertions import asserted_calls, checked_calls
from agentrl_workflows.tasks.code_files import humaneval_tasks, livecodebench_tasks, mbpp_tasks
from agentrl_workflows.tasks.private_tests import convert_private_tests
from agentrl_workflows.tasks.repository_files import swe_tasks
from tests.support.sandboxes import usable_host

MBPP: dict[str, Any] = {
    "task_id": 11,
    "text": "Write a function that doubles every number of a list.",
    "code": "def double_all(numbers):\r\n    return [2 * each for each in numbers]",
    "test_list": ["assert double_all([1, 2]) == [2, 4]", "assert double_all([]) == []", "assert double_all([-3]) == [-6]"],
    "test_setup_code": "",
    "challenge_test_list": ["assert double_all([0.5]) == [1.0]"],
}
HUMANEVAL: dict[str, Any] = {
    "task_id": "HumanEval/900",
    "prompt": 'from typing import List\n\n\ndef mean(values: List[float]) -> float:\n    """Return the mean."""\n',
    "entry_point": "mean",
    "canonical_solution": "    return sum(values) / len(values)\n",
    "test": "METADATA = {'author': 'me'}\n\n\ndef check(candidate):\n"
    "    import math\n    assert math.fabs(candidate([1.0, 2.0]) - 3.0 / 2.0) < 1e-6\n"
    "    assert candidate([4.0]) == 4.0, 'one value'\n    assert True\n",
}
STDIN: dict[str, Any] = {
    "question_title": "Sum",
    "question_content": "Add the two integers of the line.",
    "platform": "atcoder",
    "question_id": "xyz_a",
    "starter_code": "",
    "difficulty": "easy",
    "public_test_cases": json.dumps([{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]),
    "private_test_cases": json.dumps([{"input": "5 -7\n", "output": "-2\n", "testtype": "stdin"}]),
    "metadata": "{}",
}
FUNCTIONAL: dict[str, Any] = {
    **STDIN,
    "question_id": 42,
    "starter_code": "class Solution:\n    def addTo(self, values: List[int], more: int) -> List[int]:\n        ",
    "public_test_cases": json.dumps([{"input": "[1, 2]\n3", "output": "[4, 5]", "testtype": "functional"}]),
    "private_test_cases": json.dumps([{"input": "[]\n1", "output": "[]", "testtype": "functional"}]),
    "metadata": json.dumps({"func_name": "addTo"}),
}
SWE: dict[str, Any] = {
    "instance_id": "me__tool-7",
    "repo": "me/tool",
    "base_commit": "0" * 40,
    "problem_statement": "The tool prints nothing.",
    "hints_text": "",
    "patch": "diff --git a/tool.py b/tool.py\n",
    "test_patch": "diff --git a/test_tool.py b/test_tool.py\n",
    "FAIL_TO_PASS": '["test_tool.py::test_it_prints"]',
    "PASS_TO_PASS": ["test_tool.py::test_help"],
    "version": "1.0",
}


def write(folder: Path, *records: Mapping[str, object]) -> str:
    (folder / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(folder / "data.jsonl")


@pytest.mark.starts
async def test_the_solutions_of_the_files_pass_their_hidden_tests_and_no_code_does_not(
    tmp_path: Path, sandbox: BoxSandbox
) -> None:
    grader = CodeGrader(sandbox)
    for task in (*mbpp_tasks(write(tmp_path, MBPP)), *humaneval_tasks(write(tmp_path, HUMANEVAL))):
        tests = read_tests(task["tests"])
        assert await grader(task["reference"], tests) == 1.0
        assert await grader("", tests) == 0.0
    [program] = livecodebench_tasks(write(tmp_path, STDIN))
    assert await grader("```python\nprint(sum(map(int, input().split())))\n```", read_tests(program["tests"])) == 1.0
    [method] = livecodebench_tasks(write(tmp_path, FUNCTIONAL))
    body = "class Solution:\n    def addTo(self, values, more):\n        return [each + more for each in values]"
    assert await grader(f"```python\n{body}\n```", read_tests(method["tests"])) == 1.0


@pytest.mark.starts
def test_mbpp_shows_the_first_assertion_and_hides_the_others(tmp_path: Path) -> None:
    [task] = mbpp_tasks(write(tmp_path, MBPP))
    assert task.id == "mbpp-11"
    assert "Example: `assert double_all([1, 2]) == [2, 4]`" in task["question"]
    assert task["tests"]["calls"] == [["double_all([])", "[]"], ["double_all([-3])", "[-6]"], ["double_all([0.5])", "[1.0]"]]
    assert "[-3]" not in task["question"]
    assert task["examples"]["calls"] == [["double_all([1, 2])", "[2, 4]"]]


@pytest.mark.starts
def test_sanitized_mbpp_has_a_prompt_and_imports(tmp_path: Path) -> None:
    record = {name: value for name, value in MBPP.items() if name in ("task_id", "code", "test_list")}
    record |= {"prompt": "Double every number.", "test_imports": ["import math"], "source_file": "a.ipynb"}
    [task] = mbpp_tasks(write(tmp_path, record))
    assert task["question"].startswith("Double every number.")


@pytest.mark.starts
def test_humaneval_keeps_its_tolerance_and_leaves_out_what_checks_nothing(tmp_path: Path) -> None:
    [task] = humaneval_tasks(write(tmp_path, HUMANEVAL))
    assert task.id == "humaneval-HumanEval/900"
    assert task["tests"] == {
        "calls": [["mean([1.0, 2.0])", "1.5"], ["mean([4.0])", "4.0"]],
        "comparison": "python",
        "tolerance": 1e-6,
    }
    assert task["question"].startswith("Complete the function `mean`:\n\n```python\nfrom typing import List")


@pytest.mark.starts
def test_livecodebench_has_runs_of_a_program_or_calls_of_a_method(tmp_path: Path) -> None:
    program, method = livecodebench_tasks(write(tmp_path, STDIN, FUNCTIONAL))
    assert read_tests(program["tests"]) == read_tests(
        {"runs": [["1 2\n", "3\n"], ["5 -7\n", "-2\n"]], "comparison": "python"}
    )
    assert isinstance(read_tests(program["tests"]), ProgramTests)
    tests = read_tests(method["tests"])
    assert isinstance(tests, FunctionTests)
    assert (tests.entry, tests.cases[0].arguments, tests.cases[0].expected) == ("Solution.addTo", ([1, 2], 3), [4, 5])
    assert "class Solution:" in method["question"]
    assert "standard input" in program["question"]


@pytest.mark.starts
def test_compressed_pickle_is_refused_and_public_tests_can_be_used_alone(tmp_path: Path) -> None:
    compressed = base64.b64encode(zlib.compress(b"\x80\x04\x95 and more")).decode()
    path = write(tmp_path, {**STDIN, "private_test_cases": compressed})
    with pytest.raises(ConfigError, match=r"data\.jsonl:1: .*agentrl never unpickles.*private_tests: false"):
        livecodebench_tasks(path)
    with pytest.raises(ConfigError, match="never unpickles"):
        livecodebench_tasks(path, skip_unreadable=True)
    [task] = livecodebench_tasks(path, private_tests=False)
    assert task["examples"] == task["tests"]
    assert task["tests"] == {"runs": [["1 2\n", "3\n"]], "comparison": "python"}


def packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode()


@pytest.mark.starts
async def test_the_sandbox_converts_private_tests_and_lets_no_pickle_name_a_global(tmp_path: Path) -> None:
    usable_host()
    cases = json.loads(STDIN["private_test_cases"])
    published = packed(pickle.dumps(json.dumps(cases)))
    plain = {**STDIN, "question_id": "xyz_b"}
    number = await convert_private_tests(
        write(tmp_path, {**STDIN, "private_test_cases": published}, plain), tmp_path / "a.jsonl"
    )
    tasks = livecodebench_tasks(str(tmp_path / "a.jsonl"))
    assert number == 2
    assert [task["tests"]["runs"] for task in tasks] == [[["1 2\n", "3\n"], ["5 -7\n", "-2\n"]]] * 2
    marker = tmp_path / "was-run"
    for hostile, message in (
        (b"cos\nsystem\n(S'touch " + str(marker).encode() + b"'\ntR.", "it names os.system"),
        (b"cbuiltins\neval\n(S'1'\ntR.", "it names builtins.eval"),
        (pickle.dumps("{"), "cannot be decoded in the sandbox"),
        (pickle.dumps('[{"input": 1}]'), "expected tests with the texts"),
        (pickle.dumps(3), "expected tests with the texts"),
    ):
        path = write(tmp_path, {**STDIN, "private_test_cases": packed(hostile)})
        with pytest.raises(ConfigError, match=message):
            await convert_private_tests(path, tmp_path / "b.jsonl")
    assert not marker.exists()


@pytest.mark.starts
def test_swe_records_keep_both_patches_and_lists_that_are_written_as_json(tmp_path: Path) -> None:
    [task] = swe_tasks(write(tmp_path, SWE))
    assert (task.id, task["question"], task["repo"]) == ("swe-me__tool-7", "The tool prints nothing.", "me/tool")
    assert task["fail_to_pass"] == ["test_tool.py::test_it_prints"]
    assert task["pass_to_pass"] == ["test_tool.py::test_help"]
    assert (task["reference"], "hints" in task.data) == (SWE["patch"], False)


@pytest.mark.starts
@pytest.mark.parametrize(
    ("factory", "record", "changes", "expected"),
    [
        (mbpp_tasks, MBPP, {"code": None}, "data.jsonl:1: expected text in the field 'code'"),
        (mbpp_tasks, MBPP, {"test_list": []}, "'test_list': expected at least one assertion"),
        (mbpp_tasks, MBPP, {"test_list": [1]}, "'test_list': expected a list of texts, got [1]"),
        (mbpp_tasks, MBPP, {"test_list": ["assert f(g(1)) == {1}"]}, "cannot be a hidden test"),
        (humaneval_tasks, HUMANEVAL, {"entry_point": None}, "expected text in the field 'entry_point'"),
        (humaneval_tasks, HUMANEVAL, {"test": "check = 1"}, "expected one function check(candidate)"),
        (humaneval_tasks, HUMANEVAL, {"test": "def check("}, "expected Python with a function check(candidate)"),
        (livecodebench_tasks, STDIN, {"public_test_cases": "no"}, "'public_test_cases': expected a list as JSON"),
        (livecodebench_tasks, STDIN, {"public_test_cases": '[{"input": 1}]'}, "needs the texts 'input' and 'output'"),
        (livecodebench_tasks, FUNCTIONAL, {"metadata": "{}"}, "'metadata': expected the name of a function"),
        (livecodebench_tasks, FUNCTIONAL, {"metadata": "{"}, "'metadata': expected JSON"),
        (
            livecodebench_tasks,
            FUNCTIONAL,
            {"private_test_cases": STDIN["private_test_cases"]},
            "testtype stdin or functional",
        ),
        (swe_tasks, SWE, {"base_commit": None}, "expected text in the field 'base_commit'"),
        (swe_tasks, SWE, {"FAIL_TO_PASS": "[]"}, "expected at least one test"),
    ],
)
def test_a_record_that_cannot_be_used_is_named_with_what_to_do(
    tmp_path: Path,
    factory: Callable[[str], list[Task]],
    record: Mapping[str, object],
    changes: Mapping[str, object],
    expected: str,
) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)) as error:
        factory(write(tmp_path, {**record, **changes}))
    assert "data.jsonl:1: " in str(error.value)
    assert "fix or remove the record" in str(error.value)


@pytest.mark.starts
def test_unreadable_tests_are_left_out_only_on_request_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop = {**MBPP, "task_id": 12, "test_list": ["assert double_all([x for x in (1, 2)]) == [2, 4]"]}
    path = write(tmp_path, MBPP, loop)
    with pytest.raises(ConfigError, match=r"data\.jsonl:2: .*leave out such records with skip_unreadable: true"):
        mbpp_tasks(path)
    with caplog.at_level(logging.WARNING):
        assert [task.id for task in mbpp_tasks(path, skip_unreadable=True)] == ["mbpp-11"]
    assert "mbpp: left out 1 of 2 records; the first: " in caplog.text
    with pytest.raises(ConfigError, match="none of 1 records has tests that can be used"):
        mbpp_tasks(path, start=1, skip_unreadable=True)
    with pytest.raises(ConfigError, match="expected text in the field 'code'"):
        mbpp_tasks(write(tmp_path, {**MBPP, "code": None}), skip_unreadable=True)


@pytest.mark.starts
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("assert f(1)", [["f(1)", "True"]]),
        ("assert not f(1)", [["f(1)", "False"]]),
        ("assert f(1) == 2 and f(2, b=[3]) is None", [["f(1)", "2"], ["f(2, b=[3])", "None"]]),
        ("assert 3 == f(-1)", [["f(-1)", "3"]]),
        ("assert A.f((1, 2)) == {'a': {1}}", [["A.f((1, 2))", "{'a': {1}}"]]),
        ("assert f(3 * 19, 'a' + 'b') == 2.0 / 4", [["f(57, 'ab')", "0.5"]]),
        ("assert f(list(range(3)), k=-math.pi) == [10 ** 3] * 2", [["f([0, 1, 2], k=-3.141592653589793)", "[1000, 1000]"]]),
        ("assert f(set()) == set([2]) | set([1])", [["f(set())", "{1, 2}"]]),
        ("assert set(f(1, (2,))) == set((1, 2))", [["set(f(1, (2,)))", "{1, 2}"]]),
        ("assert len(set(f(1))) == 1 + 1", [["len(set(f(1)))", "2"]]),
        ("assert sorted(f([2, 1])) == [1, 2]", [["sorted(f([2, 1]))", "[1, 2]"]]),
        ("assert max(1, 2) == f(1)", [["f(1)", "2"]]),
        ("assert sum(10, 15) == 6", [["sum(10, 15)", "6"]]),
    ],
)
def test_assertions_become_calls_with_values(line: str, expected: list[list[str]]) -> None:
    assert asserted_calls([line])["calls"] == expected


@pytest.mark.starts
@pytest.mark.parametrize(
    ("line", "tolerance"),
    [
        ("assert abs(f(1) - 0.1) < 1e-6", 1e-6),
        ("assert abs(0.1 - f(1)) <= 10 ** -4", 1e-4),
        ("assert math.isclose(f(1), 0.1, rel_tol=0.001)", 0.001),
        ("assert math.isclose(f(1), 0.1)", 1e-9),
    ],
)
def test_a_comparison_with_a_distance_becomes_a_tolerance(line: str, tolerance: float) -> None:
    tests = asserted_calls([line])
    assert (tests["calls"], tests["tolerance"]) == ([["f(1)", "0.1"]], pytest.approx(tolerance))


@pytest.mark.parametrize(
    "line",
    [
        "assert f(x) == 1",
        "assert f(1) == g(1)",
        "assert f(1) != 2",
        "assert f(1) > 2",
        "assert f(1) == 1 or f(1) == 2",
        "assert sorted(f([2, 1]), reverse=True) == [2, 1]",
        "assert sum(f(1)) == 3",
        "assert set(f(1))",
        "assert f(10 ** 10 ** 10) == 1",
        "assert f('a' * 10 ** 9) == 1",
        "assert f(1 << 10 ** 9) == 1",
        "assert f(list(range(10 ** 9))) == 1",
        "assert f(open('x')) == 1",
        "assert f('%099999999d' % 1) == 1",
        "assert f(1 / 0) == 1",
        "assert not sorted(f([2, 1]))",
        "assert abs(f(1) - x) < 1e-6",
        "assert abs(f(1)) < 1e-6",
        "assert f(*[1]) == 2",
        "assert f(**{'a': 1}) == 2",
        "assert f(1)[0] == 2",
        "assert (lambda: 1)() == 1",
        "f(1)",
        "assert f(1) == 1; assert f(2) == 2",
        "assert",
        "",
    ],
)
def test_an_assertion_that_says_more_than_a_call_and_a_value_is_refused(line: str) -> None:
    with pytest.raises(ConfigError):
        read_tests(asserted_calls([line]))


def test_assertions_about_two_functions_are_refused() -> None:
    with pytest.raises(ConfigError, match="expected assertions about one function"):
        asserted_calls(["assert f(1) == 1", "assert g(1) == 1"])


def test_a_check_that_does_more_than_assert_is_refused() -> None:
    for body in ("for n in range(3):\n        assert candidate(n) == n", "x = candidate(1)\n    assert x == 1", "pass"):
        with pytest.raises(ConfigError):
            checked_calls(f"def check(candidate):\n    {body}\n", "f")


@pytest.mark.parametrize("number", [2**64 + 1, 2**100, -(2**63) - 1])
def test_the_tests_of_livecodebench_keep_integers_of_any_size(tmp_path: Path, number: int) -> None:
    case = json.dumps([{"input": f"[{number}]\n3", "output": str(number + 3), "testtype": "functional"}])
    (tmp_path / "t.jsonl").write_text(json.dumps({**FUNCTIONAL, "public_test_cases": case, "private_test_cases": case}))
    [task] = livecodebench_tasks(str(tmp_path / "t.jsonl"))
    assert task["tests"]["calls"][0] == [f"Solution.addTo([{number}], 3)", str(number + 3)]
