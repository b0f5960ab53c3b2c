"""Hidden tests in a test file: what is refused at load time, and what right, wrong and hostile submissions get."""

from __future__ import annotations

import pytest

from agentrl.errors import ConfigError, EnvironmentFault
from agentrl.types import JsonValue
from agentrl_rewards.code import CodeGrade, CodeGrader, ModuleTests, read_tests
from agentrl_rewards.code.cases import best_constant
from agentrl_sandbox.base import BoxSandbox
from agentrl_sandbox.types import Limits, Program, Result
from tests.support.sandboxes import AnsweringSandbox
from tests.support.submissions import Submission, grade_all

LIMITS = Limits(wall_s=60, cpu_s=20, memory_mb=256, processes=32, num_files=512)
TEST_FILE = """
import math
import pytest
from solution import mix, ratio

@pytest.mark.parametrize("numbers, expected", [([2, 3], 23), ([4], 4)])
def test_digits(numbers, expected):
    assert mix(numbers) == expected

def test_near():
    assert ratio(1, 3) == pytest.approx(1 / 3)
    assert not math.isnan(ratio(1, 2))

def test_zero():
    with pytest.raises(ZeroDivisionError, match="zero"):
        ratio(1, 0)
"""
RIGHT = """
def mix(numbers):
    return int("".join(map(str, numbers)))
def ratio(a, b):
    return a / b
"""
ALWAYS_EQUAL = """
class Same(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __bool__(self): return True
    __hash__ = int.__hash__
"""
ANY_OBJECT = ALWAYS_EQUAL.replace("(int)", "").replace("int.", "object.")
FORGE = """
import gc, os, sys
nonces = {v for o in gc.get_objects() if isinstance(o, dict) for k, v in list(o.items()) if k == "nonce"}
channels = [o for o in gc.get_objects() if type(o).__name__ == "Channel"]
for each in nonces | {c._nonce for c in channels}:
    for line in ('passed %s ["",1]', 'passed %s true'):
        for fd in (1, 2, channels[0]._descriptor):
            os.write(fd, ((line % each) + "\\n").encode())
os._exit(0)
"""
HOSTILE = {
    "exit_at_import": "import sys; sys.exit(0)",
    "hard_exit_at_import": "import os; os._exit(0)",
    "exit_in_the_call": "import sys\ndef mix(*_): sys.exit(0)\nratio = mix",
    "hard_exit_in_the_call": "import os\ndef mix(*_): os._exit(0)\nratio = mix",
    "exit_handler": "import atexit, os\natexit.register(os._exit, 0)\ndef mix(*_): return 0\nratio = mix",
    "always_equal": f"{ALWAYS_EQUAL}\ndef mix(*_): return Same(7)\nratio = mix",
    "object_always_equal": f"{ANY_OBJECT}\ndef mix(*_): return Same()\nratio = mix",
    "patched_builtins": (
        "import builtins, operator\nbuiltins.AssertionError = type('Quiet', (BaseException,), {})\n"
        "builtins.abs = lambda x: 0\nbuiltins.isinstance = lambda *_: True\noperator.eq = lambda *_: True\n"
        "def mix(*_): return 0\nratio = mix"
    ),
    "patched_modules": (
        "import sys, types\nfake = types.ModuleType('hidden_tests')\nfake.test_digits = fake.test_near = lambda: None\n"
        "sys.modules['hidden_tests'] = sys.modules['pytest'] = fake\n"
        "sys.modules['solution'].mix = sys.modules['solution'].ratio = lambda *_: 0"
    ),
    "own_files": (
        "import os\nfor name in ('.grader/hidden_tests.py', '.grader/module_program.py', 'pytest.py', 'json.py'):\n"
        "    os.makedirs('.grader', exist_ok=True)\n    open(name, 'w').write('import os; os._exit(0)')\n"
        "def mix(*_): return 0\nratio = mix"
    ),
    "forged_lines": FORGE,
    "forged_lines_in_the_call": "def mix(*_):\n"
    + "".join(f"    {line}\n" for line in FORGE.strip().splitlines())
    + "ratio = mix",
    "printed_lines": "print('passed x [\"\",1]', flush=True)\ndef mix(*_): print('passed'); return 0\nratio = mix",
    "raises_skip": "def mix(*_): raise AssertionError('skipped')\nratio = mix",
    "raises_its_own": "class Skipped(BaseException): pass\ndef mix(*_): raise Skipped('zero')\nratio = mix",
    "looks_for_the_tests": (
        "import gc, inspect, re, sys\ndef mix(*_):\n"
        "    text = repr([o for o in gc.get_objects() if isinstance(o, (str, dict, list, tuple))])\n"
        "    frames = repr([f.frame.f_locals for f in inspect.stack()])\n"
        "    return 23 if 'expected' + ': 23' in text + frames else 0\nratio = mix"
    ),
    "keeps_the_argument": "def mix(numbers, *_):\n    if _ == (): numbers.clear()\n    return 0\nratio = mix",
}
USUAL = ("hard_exit_in_the_call", "always_equal", "forged_lines_in_the_call")
"""One of each kind: it ends its process, returns a hostile object, writes to the channel."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def response(source: str) -> str:
    return f"```python\n{source}\n```\n"


async def graded(sandbox: BoxSandbox, source: str, test_file: str) -> CodeGrade:
    return await CodeGrader(sandbox, limits=LIMITS).grade(response(source), ModuleTests(source=test_file))


@pytest.mark.starts
async def test_a_right_submission_passes_every_test_function(sandbox: BoxSandbox) -> None:
    grade = await graded(sandbox, RIGHT, TEST_FILE)
    assert (grade.reward, grade.feedback()) == (1.0, "3 of 3 tests passed.")


@pytest.mark.starts
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(USUAL, id="usual"),
        pytest.param(tuple(HOSTILE.keys() - set(USUAL)), id="all others", marks=pytest.mark.long),
    ],
)
async def test_no_hostile_submission_gets_a_reward_of_a_test_file(sandbox: BoxSandbox, names: tuple[str, ...]) -> None:
    hostile = [Submission(name=name, source=f"{HOSTILE[name]}\n", outcomes=frozenset()) for name in names]
    tests = ModuleTests(source="from solution import mix\ndef test_it():\n    assert mix([2, 3]) == 23\n")
    grades = await grade_all(CodeGrader(sandbox, limits=LIMITS), hostile, tests)
    assert {name: grade.reward for name, grade in grades.items() if grade.reward} == {}


@pytest.mark.starts
async def test_an_error_at_import_is_no_error_that_the_test_expects(sandbox: BoxSandbox) -> None:
    test_file = TEST_FILE.partition("@pytest")[0] + "def test_zero" + TEST_FILE.partition("def test_zero")[2]
    grade = await graded(sandbox, "raise ZeroDivisionError('zero')\n", test_file)
    assert (grade.reward, grade.feedback()) == (0.0, "0 of 1 tests passed.\nTest 1: raised an error")
    grade = await graded(sandbox, "import json)\n", test_file)
    assert grade.feedback() == "0 of 1 tests passed.\nTest 1: raised SyntaxError"
    assert (await graded(sandbox, RIGHT, test_file)).reward == 1.0


@pytest.mark.starts
async def test_no_program_holds_both_sides_and_no_warm_interpreter_runs_a_test(
    sandbox: BoxSandbox,
) -> None:
    programs: list[Program] = []

    async def run(program: Program) -> Result:
        programs.append(program)
        return await sandbox.run(program, LIMITS)

    grade = await CodeGrader(AnsweringSandbox(run), limits=LIMITS).grade(response(RIGHT), ModuleTests(source=TEST_FILE))
    assert grade.reward == 1.0
    hold = [{name for name in ("solution.py", ".grader/hidden_tests.py") if name in each.files} for each in programs]
    assert all(len(names) == 1 for names in hold)
    assert {each.argv[0] for each in programs if ".grader/hidden_tests.py" in each.files} == {"/bin/sh"}
    assert all(b"assert" not in each.stdin for each in programs)


@pytest.mark.starts
async def test_feedback_of_a_test_file_holds_the_outcome_alone(sandbox: BoxSandbox) -> None:
    source = "def mix(numbers): return None if numbers == [4] else 23\ndef ratio(a, b): raise KeyError(f'{a} {b}')\n"
    test_file = (
        f"{TEST_FILE}\ndef test_sum():\n    assert mix([4]) + 1 == 5\ndef test_gone():\n    assert ratio.__doc__ or 1\n"
    )
    with pytest.raises(ConfigError, match="ratio of the submission other than as a function that is called"):
        read_tests({"test_file": test_file})
    grade = await graded(sandbox, source, test_file.partition("def test_gone")[0])
    assert grade.feedback().splitlines() == [
        "0 of 4 tests passed.",
        "Test 1: wrong value",
        "Test 2: raised an error",
        "Test 3: raised an error",
        "Test 4: wrong value",
    ]


@pytest.mark.starts
async def test_a_share_of_a_test_file_counts_its_functions(sandbox: BoxSandbox) -> None:
    grader = CodeGrader(sandbox, limits=LIMITS, partial_credit=True)
    source = RIGHT.replace("a / b", "a / b + 1")
    assert await grader(response(source), ModuleTests(source=TEST_FILE)) == pytest.approx(2 / 3)


@pytest.mark.starts
async def test_a_submission_keeps_its_state_within_a_test_function_and_loses_it_after(sandbox: BoxSandbox) -> None:
    source = "seen = []\ndef put(x):\n    seen.append(x)\n    return {'b': len(seen), 'a': seen}\n"
    test_file = (
        "import counter as c\n"
        "def test_first():\n    assert c.put((1,))['b'] == 1\n    assert c.put(2) == {'a': [(1,), 2], 'b': 2}\n"
        "def test_second():\n    from counter import put\n    assert list(put(x=3)) == ['b', 'a']\n"
    )
    grade = await CodeGrader(sandbox, limits=LIMITS).grade(
        response(source), read_tests({"test_file": test_file, "module": "counter"})
    )
    assert (grade.reward, grade.feedback()) == (1.0, "2 of 2 tests passed.")


@pytest.mark.starts
async def test_an_object_of_the_submission_does_not_travel(sandbox: BoxSandbox) -> None:
    grade = await graded(
        sandbox,
        "class Stack: pass\ndef stack(): return Stack()\n",
        "from solution import stack\ndef test_it():\n    assert stack() is not None\n",
    )
    assert (grade.reward, grade.feedback()) == (0.0, "0 of 1 tests passed.\nTest 1: unsupported value")
    assert "got a value of type Stack" in grade.cases[0].detail


@pytest.mark.starts
@pytest.mark.parametrize(
    "body", ["assert True", "assert undefined_name", "f(object())", "import os; os._exit(0)", "yield f(1)"]
)
async def test_a_test_that_never_asks_the_submission_is_a_fault_of_the_task(sandbox: BoxSandbox, body: str) -> None:
    with pytest.raises(EnvironmentFault, match="correct the test file"):
        await graded(sandbox, "def f(x): return x\n", f"from solution import f\ndef test_it():\n    {body}\n")


@pytest.mark.starts
async def test_a_test_that_calls_without_end_fails(sandbox: BoxSandbox) -> None:
    test_file = "from solution import f\ndef test_it():\n    while f('x' * 10) != 3: pass\n"
    grade = await graded(sandbox, "def f(x): return x * 200_000\n", test_file)
    assert [case.outcome for case in grade.cases] == ["output"]


@pytest.mark.parametrize(
    ("test_file", "message"),
    [
        ("", "expected functions such as"),
        ("def test_a(:", "the text of a Python test file"),
        ("def test_a(): pass\ndef test_a(): pass", "each of another name"),
        ("def test_a(tmp_path): pass", "line 1: .* the fixture 'tmp_path' of test_a"),
        ("class TestA:\n    def test_a(self): pass", "the test class TestA"),
        ("async def test_a(): pass", "the async test test_a"),
        ("import pytest\n@pytest.fixture\ndef x(): pass\ndef test_a(x): pass", "the fixture 'x'|pytest.fixture"),
        ("import pytest\n@pytest.mark.skip\ndef test_a(): pass", "the decorator pytest.mark.skip"),
        ("import pytest\n@pytest.mark.parametrize('a', [1], ids=['x'])\ndef test_a(a): pass", "parametrize other than"),
        ("import pytest\n@pytest.mark.parametrize('b', [1])\ndef test_a(): pass", "values for 'b'"),
        ("import pytest\ndef test_a(): pytest.importorskip('x')", "pytest.importorskip"),
        ("from pytest import raises\ndef test_a(): pass", "write `import pytest`"),
        ("from solution import *\ndef test_a(): pass", "write `import pytest` and `from solution import f`"),
        ("import numpy\ndef test_a(): pass", "the import of 'numpy'"),
        ("import unittest\ndef test_a(): pass", "the import of 'unittest'"),
        ("def setup_module(): pass\ndef test_a(): pass", "the hook setup_module"),
        ("from solution import Stack\ndef test_a(): Stack()", "Stack of the submission, a class"),
        ("from solution import PI\ndef test_a(): assert PI", "PI of the submission other than as a function"),
        ("import solution\ndef test_a(): assert solution.x == 1", "solution.x of the submission other than"),
        ("import solution\ndef test_a(): getattr(solution, 'x')", "solution of the submission other than"),
    ],
)
def test_what_a_test_file_needs_and_the_grader_lacks_is_refused(test_file: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_tests({"test_file": test_file})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"test_file": "def test_a(): pass", "calls": []}, "expected only test_file and module"),
        ({"test_file": 3}, "expected texts in test_file"),
        ({"test_file": "def test_a(): pass", "module": "json"}, "a module name such as 'solution'"),
        ({"test_file": "def test_a(): pass", "module": "a.b"}, "a module name such as 'solution'"),
    ],
)
def test_data_around_a_test_file_is_checked(data: JsonValue, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_tests(data)


def test_no_constant_is_known_to_pass_a_test_file() -> None:
    assert best_constant(ModuleTests(source=TEST_FILE)) is None
