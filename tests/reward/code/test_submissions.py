"""Submissions that cheat get nothing, and submissions that are odd but right get everything, in the real sandbox."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl_rewards.code import CodeGrade, CodeGrader, ProgramTests, StdinCase, call_tests
from agentrl_sandbox.base import BoxSandbox
from agentrl_sandbox.types import Limits
from tests.support.submissions import Submission, grade_all, read_submissions

FOLDER = Path(__file__).parent / "submissions"
MIX = call_tests([("mix([2, 3, 4])", "3020")])
SUM = ProgramTests(
    cases=(StdinCase(stdin="1500 2700\n", expected="4200\n"), StdinCase(stdin="12345 54321\n", expected="66666\n"))
)
STRICT = Limits(wall_s=60, cpu_s=20, memory_mb=256, processes=32, num_files=512)
SHORT = STRICT.model_copy(update={"wall_s": 6.0, "cpu_s": 1})
GENEROUS = Limits(wall_s=60, cpu_s=30)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def hostile(name: str) -> list[Submission]:
    return read_submissions(FOLDER / f"hostile_{name}.txt")


def honest(name: str) -> list[Submission]:
    return read_submissions(FOLDER / f"honest_{name}.txt")


def test_there_are_enough_submissions() -> None:
    assert len(hostile("functions") + hostile("resources") + hostile("programs")) >= 60
    assert len(honest("functions") + honest("programs")) >= 40


def in_turn(submissions: list[Submission]) -> list[tuple[Limits, int, list[Submission]]]:
    """Return the limits of submissions, how many of them run at a time, and which.

    Only what runs until a limit has short ones. What may take the whole machine first runs alone: nothing beside it begins.
    """
    ends = [each for each in submissions if "timeout" not in each.outcomes]
    runs_on = [each for each in submissions if each.outcomes == frozenset({"timeout"})]
    explodes = [each for each in submissions if each not in ends and each not in runs_on]
    return [(STRICT, 4, ends), (SHORT, 8, runs_on), (SHORT, 1, explodes)]


@pytest.mark.starts
@pytest.mark.parametrize("name", ["functions", "resources", "programs"])
async def test_no_hostile_submission_gets_a_reward(sandbox: BoxSandbox, name: str) -> None:
    submissions = hostile(name)
    grades: dict[str, CodeGrade] = {}
    for limits, places, some in in_turn(submissions):
        grader = CodeGrader(sandbox, limits=limits, num_concurrent=places, max_timeouts=1)
        grades |= await grade_all(grader, some, SUM if name == "programs" else MIX)
    assert {name: grade.reward for name, grade in grades.items() if grade.reward != 0} == {}
    outcomes = {name: {case.outcome.value for case in grade.cases} - {"not_run"} for name, grade in grades.items()}
    assert {each.name: outcomes[each.name] for each in submissions if not outcomes[each.name] <= each.outcomes} == {}


@pytest.mark.starts
@pytest.mark.parametrize("name", ["functions", "programs"])
async def test_no_odd_submission_that_is_right_loses_anything(sandbox: BoxSandbox, name: str) -> None:
    grader = CodeGrader(sandbox, limits=GENEROUS, num_concurrent=4)
    grades = await grade_all(grader, honest(name), SUM if name == "programs" else MIX)
    assert {name: grade.feedback() for name, grade in grades.items() if grade.reward != 1} == {}


SEARCH = r"""
import gc, glob, os, re
PATTERN = re.compile("can" + "ary-[a-z]+-[0-9a-f]{8}")
found = set()
def look(text):
    found.update(PATTERN.findall(text))
def search(argument):
    for folder in ("/work", "/tmp", "/dev/shm", "/etc", "/run", "/home", "/root", "/var"):
        for place, _, names in os.walk(folder):
            for name in names:
                try:
                    look(open(os.path.join(place, name), errors="replace").read(10 ** 6))
                except OSError:
                    pass
    for path in glob.glob("/proc/*/environ") + glob.glob("/proc/*/cmdline") + glob.glob("/proc/*/maps"):
        try:
            look(open(path, errors="replace").read())
        except OSError:
            pass
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
        for line in list(maps):
            words = line.split()
            if "r" not in words[1] or "vvar" in line or "vsyscall" in line:
                continue
            start, end = (int(part, 16) for part in words[0].split("-"))
            try:
                memory.seek(start)
                look(memory.read(end - start).decode("latin-1"))
            except OSError:
                pass
    raise LookupError(sorted(found))
"""


@pytest.mark.starts
async def test_what_is_expected_is_nowhere_in_the_sandbox(sandbox: BoxSandbox) -> None:
    tests = call_tests([("search('canary-argument-0123abcd')", "'canary-expected-0123abcd'")])
    grade = await CodeGrader(sandbox, limits=GENEROUS).grade(f"```python\n{SEARCH}```\n", tests)
    assert grade.cases[0].detail.startswith("LookupError: ['canary-argument-0123abcd'] (line ")


@pytest.mark.starts
async def test_a_submission_gets_the_same_reward_each_time(sandbox: BoxSandbox) -> None:
    source = "def mix(values):\n    return next(iter({'a', 'b', 'c', 'd', 'e'}))\n"
    tests = call_tests([(f"mix({number})", repr(letter)) for number, letter in enumerate("abcde")])
    grader = CodeGrader(sandbox, partial_credit=True)
    grades = [await grader.grade(f"```python\n{source}```\n", tests) for _ in range(2)]
    assert grades[0].reward == pytest.approx(0.2)
    assert [case.outcome for case in grades[0].cases] == [case.outcome for case in grades[1].cases]


STARTERS = {
    "the class of the starter": "class Solution:\n    def addTo(self, nums: List[int], more: int) -> List[int]:\n",
    "a function without the class": "def addTo(nums: List[int], more: int) -> List[int]:\n",
}


@pytest.mark.starts
@pytest.mark.parametrize("name", STARTERS)
async def test_a_solution_may_copy_the_starter_of_its_task(sandbox: BoxSandbox, name: str) -> None:
    indent = " " * (8 if "class" in STARTERS[name].split()[0] else 4)
    source = f"{STARTERS[name]}{indent}return [each + more for each in nums]\n"
    tests = call_tests([("Solution.addTo([1, 2], 3)", "[4, 5]")])
    grade = await CodeGrader(sandbox, limits=GENEROUS).grade(f"```python\n{source}```\n", tests)
    assert grade.reward == 1, grade.cases[0].detail


@pytest.mark.starts
async def test_an_error_tells_the_line_of_the_submission_and_a_name_that_nobody_has(sandbox: BoxSandbox) -> None:
    source = "def f(x: List[int]):\n\n    return no_such_name(x)\n"
    grade = await CodeGrader(sandbox, limits=GENEROUS).grade(f"```python\n{source}```\n", call_tests([("f([1])", "1")]))
    assert grade.cases[0].detail == "NameError: name 'no_such_name' is not defined (line 3)"
