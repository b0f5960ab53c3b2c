"""Sessions: state that survives between calls, and what a program can do to it."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress

import anyio
import pytest

from agentrl.errors import ConfigError, EnvironmentFault
from agentrl_sandbox.base import BoxSandbox
from agentrl_sandbox.session import diff_snapshots
from agentrl_sandbox.types import Ending, Limits, Program, Result
from tests.support.leftovers import processes_with

pytestmark = pytest.mark.starts


async def test_python_keeps_its_variables_and_prints_the_last_expression(sandbox: BoxSandbox) -> None:
    async with sandbox.session() as session:
        assert (await session.python("x = 20\nx + 1")).text == "21"
        assert (await session.python("x += 1\nprint(x)")).text == "21"
        failed = await session.python("1 / 0")
        assert failed.exit_status == 1
        assert failed.text.endswith("ZeroDivisionError: division by zero\n[exit status 1]")
        assert "SyntaxError" in (await session.python("def f(:")).text
        assert (await session.python("import sys; sys.exit(4)")).exit_status == 4
        assert (await session.python("x")).text == "21"


async def test_the_shell_keeps_directory_variables_and_functions(sandbox: BoxSandbox) -> None:
    async with sandbox.session(files={"a/b.txt": b"hello"}) as session:
        assert (await session.shell("cd a; export Q=1; f() { echo f$Q; }")).is_success
        assert (await session.shell("f; pwd; cat b.txt; false")).text == "f1\n/work/a\nhello\n[exit status 1]"
        left = await session.shell("exit 3")
        assert (left.exit_status, left.state_lost) == (3, True)
        assert (await session.shell("pwd")).text == "/work"


async def test_a_late_call_is_interrupted_and_keeps_the_state(sandbox: BoxSandbox) -> None:
    async with sandbox.session() as session:
        await session.python("x = 1")
        late = await session.python("import time\nprint('begun')\ntime.sleep(60)", timeout_s=3.0)
        assert (late.ended, late.state_lost, late.stdout) == (Ending.TIMEOUT, False, b"begun\n")
        assert (await session.python("x")).text == "1"
        await session.shell("true")  # a bash that is still starting would die of the interrupt
        late = await session.shell("sleep 60", timeout_s=1.0)
        assert (late.ended, late.state_lost) == (Ending.TIMEOUT, False)


async def test_a_call_that_ignores_the_interrupt_is_killed_and_says_that_its_state_is_lost(sandbox: BoxSandbox) -> None:
    stubborn = """
import os, signal, time
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
if os.fork() == 0:
    os.setsid()  # and holds the pipes of the session
    time.sleep(600)
"""
    async with sandbox.session() as session:
        assert (await session.python(stubborn)).is_success  # by a call of its own: an interrupt could come before
        late = await session.python("time.sleep(600)", timeout_s=0.2)
        assert (late.ended, late.state_lost) == (Ending.TIMEOUT, True)
        assert (await session.python("1 + 1")).text == "2"


@pytest.mark.parametrize(
    ("source", "ended", "lost"),
    [
        ("print('x' * 5_000_000)", Ending.OUTPUT, False),
        ("import os; os._exit(3)", Ending.EXITED, True),
        ("import os; os.kill(os.getpid(), 11)", Ending.KILLED, True),
        ("import os\nfor n in range(3, 200):\n  try: os.close(n)\n  except OSError: pass", Ending.KILLED, True),
        ("import os\nif os.fork() == 0: print('child')\nelse: os.wait()", Ending.EXITED, False),
        ("import sys; sys.stdout = None; sys.stderr.close()", Ending.EXITED, False),
        ("import os; os.close(1); os.close(2)", Ending.EXITED, False),
        ("import os\nfor n in range(3, 20):\n  try: os.write(n, b'0\\n' * 9)\n  except OSError: pass", Ending.EXITED, False),
    ],
    ids=["floods", "exits", "crashes", "closes all", "forks", "no streams", "closes outputs", "forges answers"],
)
async def test_the_next_call_works_whatever_the_last_did(
    sandbox: BoxSandbox, source: str, ended: Ending, *, lost: bool
) -> None:
    async with sandbox.session() as session:
        await session.python("x = 7")
        first = await session.python(source)
        if lost:
            assert first.state_lost
        else:
            assert (first.ended, first.state_lost) == (ended, False)
        await session.python("y = 1")
        assert (await session.python("import sys; y == 1")).ended is Ending.EXITED
        assert (await session.shell("echo fine")).text == "fine"


async def test_commands_run_beside_the_files(sandbox: BoxSandbox) -> None:
    async with sandbox.session() as session:
        program = Program(
            argv=("sh", "-c", "cat x.txt -; echo $V"), files={"x.txt": b"a"}, stdin=b"b", environment={"V": "c"}
        )
        assert (await session.run(program)).text == "abc"
        assert (await session.run(Program(argv=("wc", "-c"), stdin=b"q" * 300_000))).text == "300000"
        assert (await session.run(Program(argv=("no-such",)))).exit_status == 127
        late = await session.run(Program(argv=("sleep", "600")), timeout_s=0.1)
        assert (late.ended, late.wall_s < 60) == (Ending.TIMEOUT, True)
        flood = await session.run(Program(argv=("yes",)))
        assert (flood.ended, len(flood.stdout)) == (Ending.OUTPUT, 2**20)


async def test_files_are_written_read_compared_and_restored(sandbox: BoxSandbox) -> None:
    many = {f"many/{number}": b"%d" % number for number in range(600)}
    async with sandbox.session(files={"a/b.txt": b"one\n", "keep": b"\0\xff"}) as session:
        await session.write(many)
        before = await session.snapshot()
        assert before.files == {"a/b.txt": b"one\n", "keep": b"\0\xff", **many}
        await session.shell("rm -r many; echo two >> a/b.txt; echo new > n; ln -s /etc/passwd link; mkfifo pipe")
        after = await session.snapshot(since=before)
        found = diff_snapshots(before, after)
        assert (found.added, found.changed, len(found.removed)) == (("n",), ("a/b.txt",), 600)
        assert "\n+two\n" in found.text
        assert after.left_out.keys() == {"link", "pipe"}
        await session.restore(before)
        assert diff_snapshots(before, await session.snapshot()).is_empty
        assert await session.read("a/b.txt") == b"one\n"


async def test_a_file_that_cannot_be_had_is_an_os_error(sandbox: BoxSandbox) -> None:
    async with sandbox.session(limits=Limits(work_mb=1, wall_s=60)) as session:
        await session.shell("ln -s /etc passwords; ln -s /etc/passwd link; mkfifo pipe; head -c 5000 /dev/zero > big")
        with pytest.raises(FileNotFoundError):
            await session.read("nothing")
        for path in ("link", "passwords/passwd", "pipe"):
            with pytest.raises(OSError, match=r"symbolic link|Not a directory|no regular file"):
                await session.read(path)
        with pytest.raises(OSError, match="larger than 100 bytes"):
            await session.read("big", max_bytes=100)
        with pytest.raises(OSError, match=r"symbolic|directory"):
            await session.write({"passwords/x": b""})
        with pytest.raises(OSError, match="No space left"):
            await session.write({"huge": b"x" * (3 << 20)})
        with pytest.raises(ConfigError, match="expected a relative path"):
            await session.read("../etc/passwd")
        assert (await session.shell("echo fine")).text == "fine"


async def test_a_session_over_its_memory_ends_and_every_later_call_says_why(sandbox: BoxSandbox) -> None:
    source = """
import os, time
for _ in range(6):
    if os.fork() == 0:
        kept = b"x" * (60 << 20)
        time.sleep(60)
time.sleep(60)
"""
    async with sandbox.session(limits=Limits(memory_mb=160, wall_s=60)) as session:
        result = await session.python(source)
        assert (result.ended, result.state_lost) == (Ending.MEMORY, True)
        assert (await session.shell("true")).ended is Ending.MEMORY
        with pytest.raises(EnvironmentFault, match=r"has ended \(memory\)"):
            await session.read("x")


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_program_that_kills_everything_it_can_leaves_the_session_working(sandbox: BoxSandbox) -> None:
    async with sandbox.session() as session:
        await session.python("x = 1")
        await session.shell("kill -9 -1; kill -9 1; kill -STOP 1")
        assert (await session.python("2")).state_lost
        result = await session.shell(
            "tr '\\0' ' ' < /proc/1/environ; cat /proc/1/mem; ls /proc/1/fd; echo x > /proc/1/fd/10"
        )
        assert not result.is_success
        assert (await session.shell("echo fine")).text == "fine"


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_fork_bomb_in_a_session_ends_with_its_call(sandbox: BoxSandbox) -> None:
    async with sandbox.session() as session:
        await session.shell("b() { b | b & }; b", timeout_s=1)
        await session.python("import os\nwhile True:\n  try: os.fork()\n  except OSError: pass", timeout_s=1)
        assert (await session.snapshot()).files == {}


async def test_calls_of_several_tasks_run_one_after_another(sandbox: BoxSandbox) -> None:
    results: dict[int, Result] = {}
    async with sandbox.session() as session, anyio.create_task_group() as tasks:

        async def call(number: int) -> None:
            results[number] = await session.python(f"print({number})")

        for number in range(8):
            tasks.start_soon(call, number)
    assert {number: result.text for number, result in results.items()} == {n: str(n) for n in range(8)}


@pytest.mark.parametrize("after_s", [0.02, 0.3])
async def test_a_cancelled_call_ends_the_session_and_leaves_no_process(sandbox: BoxSandbox, after_s: float) -> None:
    token = secrets.token_hex(8)
    with anyio.move_on_after(60) as scope:
        async with sandbox.session() as session:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(session.shell, f"sh -c 'sleep 1000' {token} & sleep 1000")
                await anyio.lowlevel.checkpoint()  # the call has begun: one that never began would leave the session open
                await anyio.sleep(after_s)
                tasks.cancel_scope.cancel()
            assert (await session.shell("true")).state_lost
    assert not scope.cancelled_caught
    assert processes_with(token) == []


async def test_a_session_that_is_cancelled_or_raises_leaves_no_process(sandbox: BoxSandbox) -> None:
    token = secrets.token_hex(8)
    background = f"mkfifo begun; (setsid sh -c 'echo > begun; sleep 1000; true' {token} &); cat begun"
    with suppress(ZeroDivisionError):
        async with sandbox.session() as session:
            await session.shell(background)
            assert processes_with(token)
            raise ZeroDivisionError
    assert processes_with(token) == []
    with anyio.CancelScope() as scope:
        async with sandbox.session() as session:
            await session.shell(background)
            scope.cancel()
            await anyio.lowlevel.checkpoint()
    assert processes_with(token) == []


async def test_sessions_leave_no_descriptors(sandbox: BoxSandbox) -> None:
    async with sandbox.session() as session:
        await session.python("1")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        async with sandbox.session() as session:
            await session.python("1")
    assert len(os.listdir("/proc/self/fd")) <= before
