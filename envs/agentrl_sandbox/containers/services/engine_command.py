"""The command of an engine: short questions, and long work that is watched line by line.

Invariant: whatever a command started has ended when its block ends, also at a deadline and when it is cancelled.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import anyio
from anyio.abc import Process

from agentrl.errors import EnvironmentFault
from agentrl_sandbox.docker import docker_variables

_ASK_S: Final = 60.0
_GRACE_S: Final = 10.0
"""Seconds that a command has to end what it began."""
_PARENT, _BEGAN = 1, 19
"""Places of fields in `/proc/PID/stat`, counted behind the name."""


class Answer(NamedTuple):
    """What a command said."""

    is_success: bool
    text: str


async def ask(words: Sequence[str]) -> Answer:
    """Return what a command says: its output, or its last line of complaint.

    Raises:
        EnvironmentFault: it cannot be started, or says nothing in time.
    """
    try:
        with anyio.fail_after(_ASK_S):
            done = await anyio.run_process(words, check=False, env=docker_variables(), stdin=subprocess.DEVNULL)
    except (OSError, TimeoutError) as error:
        why = f"no answer within {_ASK_S:g} s" if isinstance(error, TimeoutError) else str(error)
        raise EnvironmentFault(f"containers: `{' '.join(words)}`: {why}") from error
    if done.returncode == 0:
        return Answer(True, done.stdout.decode(errors="replace").strip())
    said = done.stderr.decode(errors="replace").strip().splitlines()
    return Answer(False, said[-1] if said else "it said nothing")


async def watch(
    words: Sequence[str],
    take: Callable[[bytes], None],
    *,
    variables: Mapping[str, str],
    directory: str,
    deadline_s: float,
) -> int | None:
    """Give what a command writes to `take`, piece by piece; return its exit status, or None at the deadline.

    Raises:
        OSError: it cannot be started.
    """
    process = await anyio.open_process(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=variables,
        cwd=directory,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        with anyio.move_on_after(deadline_s):
            async for piece in process.stdout:
                take(piece)
            return await process.wait()
        return None
    finally:
        with anyio.CancelScope(shield=True):
            await _end(process)


async def _end(process: Process) -> None:
    """End a command with all that it started: it is asked first, since an engine has to end what runs elsewhere."""
    if process.returncode is None:
        below = dict(_descendants(process.pid))
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with anyio.move_on_after(_GRACE_S):
            await process.wait()
        below |= dict(_descendants(process.pid))
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for pid, began in below.items():
            if _began(pid) == began:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    await process.aclose()


def _descendants(pid: int) -> Iterator[tuple[int, str]]:
    """Yield the processes below another one, whatever their session, with when they began."""
    children: dict[int, list[tuple[int, str]]] = {}
    for place in Path("/proc").iterdir():
        if place.name.isdecimal() and (fields := _stat(int(place.name))):
            children.setdefault(int(fields[_PARENT]), []).append((int(place.name), fields[_BEGAN]))
    todo = [pid]
    while todo:
        for child in children.get(todo.pop(), []):
            yield child
            todo.append(child[0])


def _began(pid: int) -> str:
    fields = _stat(pid)
    return fields[_BEGAN] if fields else ""


def _stat(pid: int) -> list[str]:
    """Return what the kernel says of a process behind its name; nothing where it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
