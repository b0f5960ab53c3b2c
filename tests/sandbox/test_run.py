"""A program's run: what goes in, what comes out, and its end by a cancellation."""

from __future__ import annotations

import secrets
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from agentrl.errors import ConfigError
from agentrl_sandbox.base import BoxSandbox
from agentrl_sandbox.types import Ending, Limits, Program, Result, python_program
from tests.support.leftovers import processes_with

# Runs the sandbox as an ordinary user; it drops root after its imports, since the tests' own Python may be root's alone.
ORDINARY = """
import os, sys
import anyio
import anyio._backends._asyncio, asyncio
from agentrl_sandbox.bubblewrap import open_bubblewrap
from agentrl_sandbox import open_warm_python
from agentrl_sandbox.inside import files_inside
from agentrl_sandbox.types import Limits, python_program
GREEDY = "import os, time\\nfor _ in range(6):\\n  if os.fork() == 0: x = b'x' * (60 << 20); time.sleep(60)\\ntime.sleep(60)"
files_inside("session"), files_inside("forks")
if os.geteuid() == 0:
    os.setgroups([])
    os.setresgid(64001, 64001, 64001)
    os.setresuid(64001, 64001, 64001)
async def main():
    sandbox = await open_bubblewrap(limits=Limits(wall_s=60))
    print((await sandbox.run(python_program("import os; print(os.getuid())"))).text)
    async with sandbox.session(files={"a": b"1"}, limits=Limits(memory_mb=160, wall_s=60)) as session:
        print((await session.python("x = open('a').read(); x")).text, (await session.snapshot()).files)
        print((await session.shell("sleep 60", timeout_s=0.1)).ended, (await session.python(GREEDY)).ended)
    spoil = "import os, time\\nopen('/tmp/left', 'w')\\nif os.fork() == 0: os.setsid(); time.sleep(600)"
    look = "import os; print(os.getuid(), os.listdir('/tmp'), [n for n in os.listdir('/proc') if n.isdecimal()])"
    async with open_warm_python(sandbox, sessions=1) as warm:
        for source in (spoil, look):
            print((await warm.run(python_program(source))).text)
anyio.run(main)
"""


@pytest.mark.starts
async def test_a_program_gets_its_arguments_files_input_and_variables(sandbox: BoxSandbox) -> None:
    source = """import os, sys, helper
print(sys.argv[1:], sys.stdin.read(), open('data/a b.txt').read(), helper.X, os.environ['MODE'])"""
    program = python_program(
        source,
        arguments=("one", "two words"),
        files={"data/a b.txt": b"contents", "helper.py": b"X = 1", "empty": b""},
        stdin="Grüße".encode(),
        environment={"MODE": "a=b"},
    )
    result = await sandbox.run(program)
    assert (result.text, result.is_success) == ("['one', 'two words'] Grüße contents 1 a=b", True)
    assert result.wall_s > 0


@pytest.mark.starts
async def test_exit_status_and_both_outputs_come_back(sandbox: BoxSandbox) -> None:
    result = await sandbox.run(Program(argv=("sh", "-c", "echo out; echo err >&2; exit 3")))
    assert (result.ended, result.exit_status, result.signal) == (Ending.EXITED, 3, None)
    assert (result.stdout, result.stderr) == (b"out\n", b"err\n")
    assert result.text == "out\nerr\n[exit status 3]"


@pytest.mark.starts
async def test_a_program_opens_its_standard_streams_by_name(sandbox: BoxSandbox) -> None:
    source = "open('/dev/stdout', 'w').write(open('/dev/stdin').read()); open('/dev/stderr', 'w').write('err')"
    result = await sandbox.run(python_program(source, stdin=b"in"))
    assert (result.text, result.is_success) == ("in\nerr", True)


@pytest.mark.starts
async def test_a_command_that_does_not_exist_is_the_program_s_failure(sandbox: BoxSandbox) -> None:
    result = await sandbox.run(Program(argv=("no-such-command",)))
    assert (result.ended, result.is_success) == (Ending.EXITED, False)
    assert b"no-such-command" in result.stderr


@pytest.mark.starts
async def test_two_runs_at_a_time_share_nothing(sandbox: BoxSandbox) -> None:
    results: dict[int, Result] = {}

    async def run(number: int) -> None:
        source = "import os, time; open('n', 'x').write('x'); time.sleep(0.05); print(os.listdir())"
        results[number] = await sandbox.run(python_program(source))

    async with anyio.create_task_group() as tasks:
        for number in range(6):
            tasks.start_soon(run, number)
    assert {result.text for result in results.values()} <= {"['main.py', 'n']", "['n', 'main.py']"}


@pytest.mark.starts
@pytest.mark.parametrize("after_s", [0.0, 0.005, 0.02, 0.2])
async def test_cancelled_at_any_time_a_run_leaves_no_process(sandbox: BoxSandbox, after_s: float) -> None:
    token = secrets.token_hex(8)
    program = python_program("import time\nwhile True: time.sleep(1)", arguments=(token,))
    with anyio.move_on_after(after_s) as scope:
        await sandbox.run(program)
    assert scope.cancelled_caught
    assert processes_with(token) == []


@pytest.mark.starts
async def test_a_limit_of_one_call_replaces_the_sandbox_s_own(sandbox: BoxSandbox) -> None:
    program = Program(argv=("sleep", "60"))
    result = await sandbox.run(program, Limits(wall_s=0.1))
    assert (result.ended, result.text) == (Ending.TIMEOUT, "[ended: timeout limit]")


@pytest.mark.parametrize("name", ["../up", "/absolute", "a/../../b", "", ".", "nul\0"])
def test_a_file_outside_the_working_directory_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="expected a relative path"):
        Program(argv=("true",), files={name: b""})


def test_a_program_that_cannot_be_started_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected a command"):
        Program(argv=())
    with pytest.raises(ConfigError, match="expected names"):
        Program(argv=("true",), environment={"A=B": "1"})
    with pytest.raises(ConfigError, match=r"main.py"):
        python_program("", files={"main.py": b""})
    with pytest.raises(ConfigError, match="at most 256"):
        python_program("", files={f"{number}": b"" for number in range(300)})


@pytest.mark.starts
@pytest.mark.usefixtures("sandbox")
def test_an_ordinary_user_runs_programs_as_root_does() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", ORDINARY], cwd=root, capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.stdout, done.stderr) == ("1000\n'1' {'a': b'1'}\ntimeout memory\n\n1000 [] ['1', '2']\n", "")
