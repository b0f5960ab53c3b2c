"""The `agentrl` command as a process: write it a run file, run it, read what it writes, send it signals."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from agentrl.commands.main import make_app
from agentrl.commands.running import run_command
from tests.support.forked_starts import SERVER_NAME

AGENTRL = str(Path(sys.executable).with_name("agentrl"))
END_S = 300.0
"""Deadline of a command that should end, seconds; a busy machine needs many times what an idle one does."""


def write_run(folder: Path, checkpoint: Path, **changes: Mapping[str, object]) -> Path:
    """Write a small run whose agent gives one answer, rewarded by its length."""
    (folder / "my_agent.py").write_text(
        "async def solve(task, client):\n"
        "    completion = await client.chat.completions.create(messages=[{'role': 'user', 'content': task['question']}])\n"
        "    return len(completion.choices[0].message.content) / 100\n"
    )
    (folder / "tasks.jsonl").write_text("".join(json.dumps({"question": f"Say {n}."}) + "\n" for n in range(20)))
    run: dict[str, Any] = {
        "name": "small",
        "workflow": "my_agent:solve",
        "tasks": {"path": "tasks.jsonl", "eval": {"path": "tasks.jsonl"}},
        "model": {"path": str(checkpoint)},
        "sampling": {"max_tokens": 8},
        "inference": {"device": "cpu", "max_context_tokens": 256, "max_running_requests": 16},
        "algorithm": {"group_size": 2, "groups_per_step": 2},
        "trainer": {"device": "cpu", "lr": 1e-3},
        "engine": {"steps": 2},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(run | changes))
    return path


def agentrl(folder: Path, *arguments: str, timeout_s: float = END_S) -> subprocess.CompletedProcess[str]:
    """Run the command in `folder` to its end."""
    return subprocess.run([AGENTRL, *arguments], cwd=folder, capture_output=True, text=True, timeout=timeout_s, check=False)


def status_here(*arguments: str) -> object:
    """Run the command in this process, which is up already, and return its exit status."""
    try:
        run_command(lambda: make_app(arguments)(arguments))
    except SystemExit as end:
        return end.code or 0
    return 0


def records(path: Path, event: str) -> list[dict[str, Any]]:
    """Return the whole lines of one event; a killed writer may leave a part of one."""
    lines = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [line for line in lines if line["event"] == event]


def children(pid: int) -> list[int]:
    """Return the processes that `pid` has started."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if int(fields[1]) == pid and not words.startswith(SERVER_NAME.encode()):
                found.append(int(entry.name))
    return found


def child_commands(pid: int) -> dict[int, str]:
    """Return the command lines of the processes whose parent is `pid`; those that have ended have none."""
    found: dict[int, str] = {}
    for child in children(pid):
        with suppress(OSError):
            found[child] = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return {child: line for child, line in found.items() if line}


def watches(pids: Sequence[int]) -> list[int]:
    """Return a descriptor for each process, which becomes readable when that process has ended."""
    return [os.pidfd_open(pid) for pid in pids]


def all_gone(descriptors: Sequence[int], *, within_s: float = END_S) -> bool:
    """Wait for processes that end by themselves; return whether they did."""
    gone = [bool(select.select([descriptor], [], [], within_s)[0]) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    return all(gone)


@contextmanager
def started(folder: Path, *command: str) -> Generator[subprocess.Popen[str], None, None]:
    """Start a command with its output piped; kill it when the block is left."""
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def read_until(process: subprocess.Popen[str], text: str, *, stdout: bool = False) -> str:
    """Read lines until one holds `text`, and return them."""
    lines, stream = "", process.stdout if stdout else process.stderr
    assert stream is not None
    for line in stream:
        lines += line
        if text in line:
            return lines
    raise AssertionError(f"it ended without {text!r}:\n{lines}")


def wait_until_reading_pipe(process: subprocess.Popen[str]) -> None:
    """Return when the main thread sleeps in a read of a pipe.

    A signal that arrives between Python's last look for one and the read is handled only once the read returns.
    """
    until = time.monotonic() + END_S
    while "pipe_read" not in Path(f"/proc/{process.pid}/wchan").read_text():
        assert process.poll() is None, f"process {process.pid} has ended"
        assert time.monotonic() < until, f"process {process.pid} does not read"
        time.sleep(0.01)


def ended(process: subprocess.Popen[str], signals: Sequence[signal.Signals]) -> str:
    """Send signals, wait for the end and return what it wrote to standard error."""
    for number in signals:
        process.send_signal(number)
    return process.communicate(timeout=END_S)[1]
