"""Runs one cell of the fault matrix: a real run as processes, one fault at the moment its phase begins, and what came of it.

Invariant: nothing of a cell runs when `run_cell` returns; what it left behind is in the row.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest
import yaml
from anyio.abc import Process

from agentrl.support.concurrency import task_group
from tests.chaos.cells import Cell, Ending, Fault
from tests.chaos.phases import PIPE_VARIABLE
from tests.chaos.proxy import Proxy, open_proxy

STEPS = 6
STRIKE_AFTER_STEPS = 3
"""Steps that have ended when a fault may strike. The checkpoint of the first is whole by then: the next one waits for it."""
DISK_FAULTS = {
    "full": "dd if=/dev/zero of=runs/filler bs=1M count=32 || true",
    "read-only": "mkdir runs/aside && mount --bind runs/cell runs/aside && mount -o remount,bind,ro runs/aside "
    "&& mount --move runs/aside runs/cell",
}
"""Commands. The mount is read-only before the run sees it: while a file is open for writing, it could not become so."""
COLLECTIVE_TIMEOUT_S = 20
"""Seconds after which a frozen rank of several ends the run."""
RUN_DEADLINE_S = 200.0
END_DEADLINE_S = 60.0
"""Seconds in which everything that a run started has to end after its driver."""
MARK = "AGENTRL_CHAOS_CELL"
COMMANDS = {
    "trainer": "agentrl.trainer.worker",
    "server": "agentrl.servers.serve",
    "rollout worker": "agentrl.rollout.remote.process",
}
"""Part of the command line by which a process is found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What came of a cell."""

    fault: str
    phase: str
    struck: bool
    named_after_s: float | None
    """Seconds from the fault to the first line that names it; None: no line does."""
    message: str
    """That line, without paths and ports."""
    ending: Ending
    ended_after_s: float
    """Seconds from the fault to the end of the command."""
    resumed: bool | None
    """Whether `--resume` reached the last step; None where it was not needed."""
    steps_missing: list[int]
    steps_again: int
    """Steps that were trained a second time after the resume."""
    failed_episodes: int
    left_behind: list[str]
    output: str
    """What the command printed."""


@dataclass(slots=True)
class Watched:
    """What a driver printed, and when it was struck."""

    lines: list[tuple[float, str]] = field(default_factory=list[tuple[float, str]])
    struck_at: float | None = None

    def text(self) -> str:
        return "".join(line for _, line in self.lines)


class CellRun:
    """The folder and processes of one cell."""

    def __init__(self, cell: Cell, folder: Path, checkpoint: Path) -> None:
        self.cell = cell
        self.folder = folder
        self.checkpoint = checkpoint
        self.proxy: Proxy | None = None
        self._enter: list[str] = []

    async def run(self) -> Row:
        """Run, strike, resume where the run did not reach its end, and look at what is left."""
        fault = self.cell.fault
        async with AsyncExitStack() as stack:
            if fault.disk:
                self._enter = await stack.enter_async_context(small_disk(self.folder / "runs"))
            if fault.proxy:
                self.proxy = await stack.enter_async_context(self._proxied_server())
            self._write_run_file()
            watched = Watched()
            code, ended_at = await self._drive(watched)
            left = await self._left_behind()
            ending: Ending = "continues" if code == 0 else "is killed" if code < 0 else "ends with an error"
            resumed = None
            if ending != "continues":
                await self._heal()
                again = Watched(struck_at=0.0)  # strikes nothing
                resumed_code, _ = await self._drive(again, "--resume")
                resumed = resumed_code == 0
                watched.lines += again.lines
                left += await self._left_behind()
            left += self._leftover_files()
            return await self._row(watched, ending, ended_at, resumed, left)

    def _write_run_file(self) -> None:
        questions = [f"Say {n}." for n in range(20)]
        for name, held_out in (("train", False), ("eval", True)):
            lines = [json.dumps({"question": question, "held_out": held_out}) for question in questions]
            (self.folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        inference: dict[str, Any] = {"device": "cpu", "max_running_requests": 16, "servers": self.cell.fault.servers}
        inference = {"urls": [self.proxy.url]} if self.proxy else inference
        inference["max_context_tokens"] = 256
        run = {
            "name": "cell",
            "runs_dir": str(self.folder / "runs"),
            "workflow": "tests.chaos.agent:Agent",
            "workflow_args": {"with_child": self.cell.fault.target == "child"},
            "tasks": {"path": "train.jsonl", "eval": {"path": "eval.jsonl"}},
            "model": {"path": str(self.checkpoint)},
            "sampling": {"max_tokens": 24},
            "inference": inference,
            "rollout": {"runner": "processes", "workers": workers} if (workers := self.cell.fault.workers) else {},
            "algorithm": {"group_size": 2, "groups_per_step": 2, "max_staleness": 0},
            "trainer": {
                "device": "cpu",
                "lr": 1e-3,
                "restarts": 0,
                "parallel": {"dp": self.cell.fault.ranks},
                "collective_timeout_s": COLLECTIVE_TIMEOUT_S,
            },
            "engine": {"steps": STEPS, "checkpoint_every": 1, "eval_every": 1, "eval_episodes": 4},
        }
        (self.folder / "run.yaml").write_text(yaml.safe_dump(run))

    async def _drive(self, watched: Watched, *arguments: str) -> tuple[int, float]:
        """Run the driver to its end; return its status and when it ended."""
        read, write = os.pipe()
        temporary = self.folder / "tmp"
        temporary.mkdir(exist_ok=True)
        environment = os.environ | {
            PIPE_VARIABLE: str(write), MARK: self.cell.name, "TMPDIR": str(temporary), "PYTHONPATH": _python_path(),
        }  # fmt: skip
        command = [*self._enter, sys.executable, "-m", "tests.chaos.driver", str(self.folder / "run.yaml"), *arguments]
        try:
            process = await anyio.open_process(
                command, cwd=self.folder, env=environment, pass_fds=[write], stdin=subprocess.DEVNULL, stdout=None
            )
        finally:
            os.close(write)
        try:
            async with task_group() as tasks:
                all_read = anyio.Event()
                tasks.start_soon(_read_lines, process, watched, all_read)
                tasks.start_soon(self._strike_in_phase, read, process, watched)
                with anyio.move_on_after(RUN_DEADLINE_S):
                    await process.wait()
                ended_at, code = time.monotonic(), process.returncode
                if code is None:
                    kill_marked(self.cell.name)
                with anyio.move_on_after(END_DEADLINE_S):  # a process that was left behind may hold the pipe
                    await all_read.wait()
                tasks.cancel_scope.cancel()
        except BaseException:
            kill_marked(self.cell.name)
            raise
        finally:
            os.close(read)
        assert code is not None, f"{self.cell.name}: not ended after {RUN_DEADLINE_S:g} s:\n{watched.text()}"
        return code, ended_at

    async def _strike_in_phase(self, pipe: int, driver: Process, watched: Watched) -> None:
        announced = b""
        while True:
            await anyio.wait_readable(pipe)
            data = os.read(pipe, 4096)
            if not data:
                return
            *lines, announced = (announced + data).split(b"\n")
            for line in lines:
                phase, steps, *child = line.decode().split()
                if watched.struck_at is None and phase == self.cell.phase and int(steps) >= STRIKE_AFTER_STEPS:
                    await self._strike(driver, int(child[0]) if child else None, watched)

    async def _strike(self, driver: Process, child: int | None, watched: Watched) -> None:
        """Strike, and end the fault where it ends by itself."""
        fault = self.cell.fault
        targets = {"driver": driver.pid, "child": child}
        pid = 0 if fault.signal is None else targets.get(fault.target) or await self._find(fault)
        watched.struck_at = time.monotonic()
        if fault.signal is not None:
            try:
                os.kill(pid, getattr(signal, fault.signal))
            except ProcessLookupError:
                if child is None:
                    raise
                watched.struck_at = None  # its episode ended first, and the next one is struck
                return
        elif fault.disk is not None:
            with frozen(self.cell.name):  # entering the namespace takes longer than a step
                await self._inside("sh", "-c", DISK_FAULTS[fault.disk])
        elif self.proxy is not None and fault.proxy is not None:
            await self.proxy.set_mode(fault.proxy)
        if fault.heals_after_s is not None:
            await anyio.sleep(fault.heals_after_s)
            if fault.signal is not None:
                os.kill(pid, signal.SIGCONT)
            if self.proxy is not None:
                await self.proxy.set_mode("pass")

    async def _find(self, fault: Fault) -> int:
        """Return the process to strike; a server that was started again may appear a little later."""
        wanted = [COMMANDS[fault.target]] + [f"--rank={fault.rank}"] * (fault.ranks > 1)
        with anyio.fail_after(300):
            while True:
                found = [pid for pid, command in marked(self.cell.name) if all(word in command for word in wanted)]
                if found:
                    return found[0]
                await anyio.sleep(0.005)

    async def _heal(self) -> None:
        if self.proxy is not None:
            await self.proxy.set_mode("pass")
        if self._enter:
            await self._inside("sh", "-c", "umount runs/cell; rm -f runs/filler")

    async def _inside(self, *command: str) -> bytes:
        """Run a command in the namespace of the cell's disk; return what it prints."""
        return (await anyio.run_process([*self._enter, *command], cwd=self.folder)).stdout

    async def _left_behind(self) -> list[str]:
        """Return the commands of the run that still live, and kill them."""
        with anyio.move_on_after(END_DEADLINE_S):
            while marked(self.cell.name):  # noqa: ASYNC110 - nothing tells when processes that are not our children end
                await anyio.sleep(0.1)
        left = [command for _, command in marked(self.cell.name)]
        kill_marked(self.cell.name)
        return left

    def _leftover_files(self) -> list[str]:
        files = [str(path.relative_to(self.folder)) for path in (self.folder / "tmp").rglob("*")]
        run = self.folder / "runs" / "cell"
        return files + [str(path.relative_to(self.folder)) for path in run.rglob("*") if "partial" in path.name]

    async def _row(self, watched: Watched, ending: Ending, ended_at: float, resumed: bool | None, left: list[str]) -> Row:
        fault, struck_at = self.cell.fault, watched.struck_at
        named = None
        if struck_at is not None and fault.names is not None:
            named = next(
                ((at, line) for at, line in watched.lines if at >= struck_at and re.search(fault.names, line)), None
            )
        steps = [record["step"] for record in await self._records("metrics.jsonl") if record.get("event") == "step"]
        failed = [record for record in await self._records("episodes/index.jsonl") if record.get("failure")]
        return Row(
            fault=fault.name,
            phase=self.cell.phase,
            struck=struck_at is not None,
            named_after_s=None if named is None or struck_at is None else round(named[0] - struck_at, 1),
            message="" if named is None else self._plain(named[1]),
            ending=ending,
            ended_after_s=round(ended_at - (struck_at or ended_at), 1),
            resumed=resumed,
            steps_missing=sorted({*range(1, STEPS + 1)} - {*steps}),
            steps_again=len(steps) - len({*steps}),
            failed_episodes=len(failed),
            left_behind=left,
            output=watched.text(),
        )

    async def _records(self, name: str) -> list[dict[str, Any]]:
        written = await self._inside("sh", "-c", f"cat runs/cell/{name} || true")
        return [json.loads(line) for line in written.decode().splitlines()]

    def _plain(self, line: str) -> str:
        line = line.replace(str(self.folder / "runs" / "cell"), "RUN").replace(str(self.folder), ".")
        return re.sub(r"127\.0\.0\.1:\d+", "HOST:PORT", line).strip()

    @asynccontextmanager
    async def _proxied_server(self) -> AsyncGenerator[Proxy]:
        command = [
            sys.executable,
            "-m",
            "agentrl.servers.serve",
            "--model-path",
            str(self.checkpoint),
            "--max-context-tokens",
            "256",
        ]
        async with await anyio.open_process(command, cwd=self.folder, stderr=None) as server:
            assert server.stdout is not None
            with anyio.fail_after(RUN_DEADLINE_S):
                ready = json.loads(await server.stdout.receive())
            try:
                async with open_proxy(int(ready["url"].rpartition(":")[2])) as proxy:
                    yield proxy
            finally:
                server.kill()


async def _read_lines(process: Process, watched: Watched, done: anyio.Event) -> None:
    assert process.stderr is not None
    rest = ""
    async for data in process.stderr:
        *lines, rest = (rest + data.decode(errors="replace")).split("\n")
        watched.lines += [(time.monotonic(), f"{line}\n") for line in lines]
    watched.lines.append((time.monotonic(), rest))
    done.set()


@asynccontextmanager
async def small_disk(folder: Path) -> AsyncGenerator[list[str]]:
    """Mount a small file system on `folder` in a namespace of its own; yield the command that enters the namespace."""
    await anyio.Path(folder).mkdir()
    mount = f"mount -t tmpfs -o size=24m chaos {folder} && echo mounted && exec cat"
    holder = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount]
    async with await anyio.open_process(holder, stderr=None) as process:
        assert process.stdout is not None
        try:
            with anyio.fail_after(300):
                await process.stdout.receive()
        except anyio.EndOfStream:
            pytest.skip("a disk of its own needs `mount` in a user namespace, which this machine does not allow")
        # The shell changes the directory inside the namespace: one that was entered before has the mounts outside.
        inside = f'cd "{folder.parent}" && mountpoint -q "{folder}" && exec "$@"'
        namespace = ["nsenter", "--target", str(process.pid), "--user", "--mount", "--preserve-credentials"]
        try:
            yield [*namespace, "sh", "-c", inside, "sh"]
        finally:
            process.kill()


def marked(cell: str) -> Sequence[tuple[int, str]]:
    """Return the processes of a cell, with their command lines; dead ones that wait for their parent do not count."""
    found: list[tuple[int, str]] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes()
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if f"{MARK}={cell}".encode() in environment.split(b"\0"):
                found.append((int(entry.name), command.replace(b"\0", b" ").decode(errors="replace")))
    return found


@contextmanager
def frozen(cell: str) -> Generator[None]:
    """Freeze the processes of a cell for the duration of the block."""
    pids = [pid for pid, _ in marked(cell)]
    _send(pids, signal.SIGSTOP)
    try:
        yield
    finally:
        _send(pids, signal.SIGCONT)


def _send(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def kill_marked(cell: str) -> None:
    """Kill the processes of a cell."""
    _send([pid for pid, _ in marked(cell)], signal.SIGKILL)


def _python_path() -> str:
    root = str(Path(__file__).parents[2])
    return os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
