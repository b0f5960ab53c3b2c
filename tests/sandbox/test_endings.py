"""Whatever a program does once it has started is its result; only a program that was not started is a fault."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from agentrl.errors import EnvironmentFault
from agentrl_sandbox.base import BoxSandbox
from agentrl_sandbox.box import Use
from agentrl_sandbox.bubblewrap.host import Host, UserIds
from agentrl_sandbox.bubblewrap.seccomp import native_architecture, seccomp_filter
from agentrl_sandbox.bubblewrap.start import SUPERVISOR_FOLDER, BubblewrapBox, BubblewrapStarter
from agentrl_sandbox.bubblewrap.usage import ControlGroup, ControlGroups
from agentrl_sandbox.types import Ending, Limits, Program, python_program
from tests.support.hostile_programs import odd_ends

pytestmark = pytest.mark.starts

# Runs the kinds as an ordinary user; it drops root after its imports, since the tests' own Python may be root's alone.
ORDINARY = """
import os, signal
signal.signal(signal.SIGQUIT, signal.SIG_IGN)  # as in a process that a shell started in the background
import anyio, anyio._backends._asyncio, anyio.to_thread, asyncio
from agentrl_sandbox.bubblewrap import open_bubblewrap
from tests.support.hostile_programs import odd_ends
if os.geteuid() == 0:
    os.setgroups([])
    os.setresgid(64001, 64001, 64001)
    os.setresuid(64001, 64001, 64001)
async def main():
    print(os.getuid() != 0, await odd_ends(await open_bubblewrap()))
anyio.run(main)
"""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_every_kind_of_program_ends_as_a_result(sandbox: BoxSandbox) -> None:
    assert await odd_ends(sandbox) == {}


@pytest.mark.usefixtures("sandbox")
def test_every_kind_of_program_of_an_ordinary_user_ends_as_a_result() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", ORDINARY], cwd=root, capture_output=True, text=True, timeout=600, check=False
    )
    assert (done.stdout, done.stderr) == ("True {}\n", "")


async def test_a_program_ignores_and_blocks_no_signal_that_this_process_does(sandbox: BoxSandbox) -> None:
    earlier = signal.signal(signal.SIGQUIT, signal.SIG_IGN)  # as in a process that a shell started in the background
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        result = await sandbox.run(Program(argv=("grep", "-E", "Sig(Ign|Blk)", "/proc/self/status")))
        async with sandbox.session() as session:
            in_session = await session.shell("grep -E 'Sig(Ign|Blk)' /proc/self/status")
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        signal.signal(signal.SIGQUIT, earlier)
    of_the_c_library = 0b11 << 31  # signals 32 and 33
    for text in (result.text, in_session.text):
        assert [int(mask, 16) & ~of_the_c_library for mask in text.split()[1::2]] == [0, 0], text


async def test_files_that_do_not_fit_are_a_fault_of_the_caller_and_not_the_program_s_end(sandbox: BoxSandbox) -> None:
    program = python_program("print(1)", files={"large": b"x" * (3 << 20)})
    with pytest.raises(EnvironmentFault, match=r"cannot start: bwrap: .*No space left on device"):
        await sandbox.run(program, Limits(work_mb=1))


class UnreadGroup(ControlGroup):
    """A group whose sandbox the kernel ends for its memory before a reading shows it."""

    def memory(self) -> int:
        return 0

    def ran_out(self) -> bool:
        return True


class UnreadGroups(ControlGroups):
    def make(self, limits: Limits) -> ControlGroup:
        return UnreadGroup(self.folder / "group", limits)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder


async def test_a_session_that_the_kernel_ends_for_its_memory_says_so(host: Host, tmp_path: Path) -> None:
    starter = BubblewrapStarter(host, seccomp_filter(native_architecture()), UserIds(), UnreadGroups(tmp_path))
    supervisor = (host.python, "-I", "-S", "-B", f"{SUPERVISOR_FOLDER}/supervisor.py")
    sandbox = BoxSandbox("bubblewrap", starter, supervisor, is_isolated=True, limits=Limits(wall_s=60))
    async with sandbox.session() as session:
        assert (await session.python("1 + 1")).text == "2"
        [outside] = _children("bwrap")
        os.kill(outside, signal.SIGKILL)
        with anyio.fail_after(300):
            while (ended := (await session.python("1 + 1")).ended) is Ending.EXITED:  # it may answer once more
                pass
        assert (ended, (await session.python("1 + 1")).ended) == (Ending.MEMORY, Ending.MEMORY)


class StoppingStarter(BubblewrapStarter):
    """Stops the first bubblewrap as soon as its program starts, so that it cannot report an end any more."""

    stopped = 0

    @asynccontextmanager
    async def start(self, program: Program, limits: Limits, *, use: Use = "program") -> AsyncGenerator[BubblewrapBox]:
        async with super().start(program, limits, use=use) as box:
            if not self.stopped:
                [self.stopped] = _children("bwrap")
                os.kill(self.stopped, signal.SIGSTOP)
            yield box


@pytest.mark.long
async def test_a_sandbox_that_is_slow_to_end_gives_a_result_and_keeps_its_user(host: Host) -> None:
    starter = StoppingStarter(host, seccomp_filter(native_architecture()), UserIds())
    sandbox = BoxSandbox("bubblewrap", starter, (), is_isolated=True, limits=Limits())
    late = await sandbox.run(Program(argv=("sleep", "600")), Limits(wall_s=0.1))
    assert late.ended is Ending.TIMEOUT
    assert _children("bwrap") == [starter.stopped]
    os.kill(starter.stopped, signal.SIGCONT)
    assert (await sandbox.run(python_program("print(1)"))).is_success


def _children(name: str) -> list[int]:
    """Return this process's children with this name."""
    numbers = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [int(number) for number in numbers if Path(f"/proc/{number}/comm").read_text().strip() == name]
