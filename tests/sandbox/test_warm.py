"""Programs in forks of a warm interpreter end as in a sandbox of their own, and find nothing of the one before."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from agentrl.errors import ConfigError
from agentrl.support.concurrency import watch_outside_work
from agentrl_rewards.code import CodeGrader, call_tests
from agentrl_sandbox import Ending, Limits, Program, open_warm_python, python_program
from agentrl_sandbox.base import BoxSandbox
from tests.support.submissions import grade_all, read_submissions

pytestmark = pytest.mark.starts

SUBMISSIONS = Path(__file__).parents[1] / "reward" / "code" / "submissions"
LIMITS = Limits(wall_s=60, cpu_s=10, memory_mb=256)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_a_program_has_its_arguments_files_input_and_exit_status(sandbox: BoxSandbox) -> None:
    source = "import os, sys\nprint(input(), sys.argv[1:], __name__, open('data').read(), os.environ['A'])\nsys.exit(3)"
    program = python_program(source, arguments=("x",), files={"data": b"d"}, stdin=b"line\n", environment={"A": "1"})
    async with open_warm_python(sandbox, limits=LIMITS, sessions=1) as warm:
        result = await warm.run(program)
        assert (result.ended, result.exit_status) == (Ending.EXITED, 3)
        assert result.stdout == b"line ['x'] __main__ d 1\n"
        assert (await sandbox.run(program)).stdout == result.stdout


async def test_a_program_that_outlives_the_deadline_of_an_episode_is_outside_work(sandbox: BoxSandbox) -> None:
    async with open_warm_python(sandbox, limits=LIMITS, sessions=1) as warm:
        deadline = anyio.current_time() + 0.1
        with watch_outside_work(deadline) as work, anyio.CancelScope(deadline=deadline):
            await warm.run(python_program("import time\ntime.sleep(60)"))
        assert work.ran_into_deadline


@pytest.mark.parametrize(
    ("source", "ended", "status", "signal"),
    [
        ("raise ValueError('no')", Ending.EXITED, 1, None),
        ("import sys\nsys.exit('no')", Ending.EXITED, 1, None),
        ("import os\nos._exit(7)", Ending.EXITED, 7, None),
        ("import os\nos.kill(os.getpid(), 11)", Ending.KILLED, None, 11),
        ("import os, time\nos.kill(os.getppid(), 9)\ntime.sleep(0.2)", Ending.EXITED, 0, None),
        ("x = 'x' * 1_000\nwhile True:\n    print(x)", Ending.OUTPUT, None, None),
        ("import time\ntime.sleep(60)", Ending.TIMEOUT, None, None),
        ("import time\ntry:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    time.sleep(60)", Ending.TIMEOUT, None, None),
    ],
)
async def test_a_program_ends_as_in_a_sandbox_of_its_own(
    sandbox: BoxSandbox, source: str, ended: Ending, status: int | None, signal: int | None
) -> None:
    # After its timeout the session has to run a second program within the same limit.
    limits = Limits(wall_s=3.0 if ended is Ending.TIMEOUT else 60, output_kb=64)
    async with open_warm_python(sandbox, limits=limits, sessions=1) as warm:
        result = await warm.run(python_program(source))
        assert (result.ended, result.exit_status, result.signal) == (ended, status, signal)
        assert (await warm.run(python_program("print(1)"))).stdout == b"1\n"


@pytest.mark.parametrize(
    "trace",
    [
        "open('/tmp/left', 'w')",
        "open('/work/left', 'w')",
        "import builtins\nbuiltins.print = None\nimport json\njson.dumps = None",
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(60)",
        "import contextlib, os\nfor n in range(3, 256):\n  with contextlib.suppress(OSError): os.write(n, b'0\\n')",
    ],
)
async def test_a_program_finds_nothing_of_the_one_before(sandbox: BoxSandbox, trace: str) -> None:
    look = (
        "import json, os\nprint(os.listdir('/tmp'), os.listdir('/work'), os.listdir('.'), json.dumps(1))\n"
        "states = [open(f'/proc/{name}/stat').read().split()[2] for name in os.listdir('/proc') if name.isdecimal()]\n"
        "print(sum(state != 'Z' for state in states))"
    )
    async with open_warm_python(sandbox, limits=LIMITS, sessions=1) as warm:
        first = await warm.run(python_program(look))
        assert first.is_success, first.text
        await warm.run(python_program(trace))
        assert (await warm.run(python_program(look))).text == first.text


async def test_what_is_no_python_program_runs_in_a_sandbox_of_its_own(sandbox: BoxSandbox) -> None:
    async with open_warm_python(sandbox, limits=LIMITS, sessions=1) as warm:
        assert (await warm.run(Program(argv=("/bin/sh", "-c", "echo $0")))).stdout == b"/bin/sh\n"


async def test_a_cancelled_program_ends_and_the_next_one_runs(sandbox: BoxSandbox) -> None:
    async with open_warm_python(sandbox, limits=LIMITS, sessions=1) as warm:
        with anyio.move_on_after(1.0) as patience:
            await warm.run(python_program("import time\ntime.sleep(60)"))
        assert patience.cancelled_caught
        assert (await warm.run(python_program("print(1)"))).stdout == b"1\n"


async def test_a_program_over_its_memory_ends_with_that_reason(sandbox: BoxSandbox) -> None:
    source = "import subprocess, sys\ncode = 'x = bytearray(150 * 2**20); import time; time.sleep(20)'\n"
    source += "subprocess.run(['sh', '-c', f'python3 -c \"{code}\" & python3 -c \"{code}\"'])"
    async with open_warm_python(sandbox, limits=LIMITS, sessions=1) as warm:
        assert (await warm.run(python_program(source))).ended is Ending.MEMORY


async def test_grades_are_those_of_a_sandbox_for_each_case(sandbox: BoxSandbox) -> None:
    tests = call_tests([("f(1)", "2"), ("f(2)", "4")])
    sources = [
        "def f(x): return 2 * x",
        "def f(x): return x + 1",
        "def f(x):",
        "def g(x): return 2 * x",
        "import os; os._exit(0)",
    ]
    async with open_warm_python(sandbox, sessions=2) as warm:
        for source in sources:
            grades = [await CodeGrader(runner).grade(f"```python\n{source}\n```", tests) for runner in (warm, sandbox)]
            assert grades[0].feedback() == grades[1].feedback()


@pytest.mark.long
@pytest.mark.parametrize(("name", "reward"), [("hostile_functions", 0), ("hostile_resources", 0), ("honest_functions", 1)])
async def test_hostile_submissions_get_nothing_and_odd_ones_that_are_right_get_everything(
    sandbox: BoxSandbox, name: str, reward: float
) -> None:
    submissions = read_submissions(SUBMISSIONS / f"{name}.txt")
    tight = Limits(wall_s=12, cpu_s=3, memory_mb=256, processes=32, num_files=512)
    limits = Limits(wall_s=60, cpu_s=10) if reward else tight
    async with open_warm_python(sandbox) as warm:
        grader = CodeGrader(warm, limits=limits, max_timeouts=1)
        grades = await grade_all(grader, submissions, call_tests([("mix([2, 3, 4])", "3020")]))
    assert {name: grade.feedback() for name, grade in grades.items() if grade.reward != reward} == {}


async def test_there_is_at_least_one_session(sandbox: BoxSandbox) -> None:
    with pytest.raises(ConfigError, match="sessions must be at least 1, got 0"):
        async with open_warm_python(sandbox, sessions=0):
            pass
