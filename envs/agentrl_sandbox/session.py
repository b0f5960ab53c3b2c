"""A session: one sandbox that lives through many calls, with a Python, a shell and files that keep their state.

Invariant: calls run one at a time, and each ends by its deadline. After the sandbox has ended, for whatever reason, each
call returns a result that says why. A snapshot of its files holds contents of regular files only; what else the folder held
is named in `left_out`.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final, Protocol

import anyio
import msgspec

from agentrl.errors import EnvironmentFault
from agentrl.support.concurrency import outside_work
from agentrl_sandbox.types import MAX_FILES, MIB, Ending, Limits, Program, Result, check_files

REPLY_GRACE_S: Final = 8.0
"""Seconds after a call's deadline by which its reply arrives, or the sandbox is ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkspaceSnapshot:
    """The working directory of a session at one moment."""

    files: Mapping[str, bytes]
    """Contents by path relative to the working directory."""
    left_out: Mapping[str, str] = field(default_factory=dict[str, str])
    """Why a path is not in `files`: a link, a pipe, a file that is too large or cannot be read."""
    digests: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    """SHA-256 by path, by which the next snapshot is sent in parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkspaceDiff:
    """The difference of two snapshots, each part in order of the paths."""

    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]
    text: str
    """A unified diff; of files that are not UTF-8 it says only that they differ."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing changed."""
        return not (self.added or self.removed or self.changed)


def diff_snapshots(before: WorkspaceSnapshot, after: WorkspaceSnapshot) -> WorkspaceDiff:
    """Return what changed from `before` to `after`.

    Example:
        >>> found = diff_snapshots(WorkspaceSnapshot(files={"a": b"1"}), WorkspaceSnapshot(files={"a": b"2", "b": b""}))
        >>> found.added, found.changed
        (('b',), ('a',))
        >>> print(found.text)
        --- a
        +++ a
        @@ -1 +1 @@
        -1
        +2
    """
    names = sorted(before.files.keys() | after.files.keys())
    pieces = [_file_diff(name, before.files.get(name), after.files.get(name)) for name in names]
    return WorkspaceDiff(
        added=tuple(name for name in names if name not in before.files),
        removed=tuple(name for name in names if name not in after.files),
        changed=tuple(
            name
            for name in names
            if name in before.files and before.files[name] != after.files.get(name, before.files[name])
        ),
        text="\n".join(piece for piece in pieces if piece),
    )


def _file_diff(name: str, before: bytes | None, after: bytes | None) -> str:
    if before == after:
        return ""
    try:
        lines = [(data or b"").decode().splitlines() for data in (before, after)]
    except UnicodeDecodeError:
        return f"Binary files {name} differ"
    source, target = (name if data is not None else "/dev/null" for data in (before, after))
    return "\n".join(difflib.unified_diff(lines[0], lines[1], source, target, lineterm=""))


class Reply(msgspec.Struct):
    """The answer of the supervisor to any request; in JSON, bytes are base64."""

    ended: Ending | None = None
    exit_status: int | None = None
    signal: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    state_lost: bool = False
    error: tuple[int, str, str] | None = None
    content: bytes = b""
    digests: dict[str, str] = {}
    contents: dict[str, bytes] = {}
    left_out: dict[str, str] = {}
    stream: int = 0
    cut: int = 0


class SessionSupervisor(Protocol):
    """The way to the supervisor of one sandbox."""

    @property
    def ending(self) -> Ending:
        """The reason for the end of the sandbox."""
        ...

    async def ask(self, request: bytes, timeout_s: float) -> bytes | None:
        """Send a request and return its reply; None: the sandbox has ended, now or before.

        Cancellation: the sandbox is ended, since its next reply would answer this request.
        """
        ...


class Session:
    """A sandbox in use; `Sandbox.session` opens one.

    A call without `timeout_s` has `limits.wall_s`. A cancelled call ends the sandbox. A sandbox that could not do its part
    is an `EnvironmentFault`; so is a request for files once it has ended.
    """

    def __init__(self, supervisor: SessionSupervisor, limits: Limits) -> None:
        self.supervisor, self.limits = supervisor, limits
        self._turn = anyio.Lock()
        """Calls of several tasks run one after another: the supervisor does one thing at a time."""

    async def python(self, source: str, *, timeout_s: float | None = None) -> Result:
        """Run a piece of Python with the variables of the pieces before, and print the value of its last expression.

        Args:
            source: statements; an exception is printed and gives exit status 1.
            timeout_s: at the end of it the piece gets a KeyboardInterrupt, a second later the Python is killed: then
                `state_lost` is True, and the next call starts a new one.
        """
        return await self._run({"do": "python", "text": source}, timeout_s)

    async def shell(self, command: str, *, timeout_s: float | None = None) -> Result:
        """Run lines of bash in the directory, with the variables and functions that the lines before left.

        Args:
            command: bash; `exit` ends the shell, and the next call starts a new one.
            timeout_s: as for `python`.
        """
        return await self._run({"do": "shell", "text": command}, timeout_s)

    async def run(self, program: Program, *, timeout_s: float | None = None) -> Result:
        """Write the files of `program` and run its command beside Python and shell; its group ends with it."""
        if program.files:
            await self.write(program.files)
        return await self._run({"do": "run", "argv": program.argv, **_input_of(program)}, timeout_s)

    async def write(self, files: Mapping[str, bytes]) -> None:
        """Write files, with the folders above them.

        Raises:
            ConfigError: a path leaves the working directory.
            OSError: the sandbox's own, such as no space left, or a path through a link.
        """
        names = list(files)
        # The supervisor takes a bounded number of files in one request.
        for start in range(0, len(names), MAX_FILES):
            some = {name: files[name] for name in names[start : start + MAX_FILES]}
            check_files(some)
            await self._do({"do": "write", "files": some})

    async def read(self, path: str, *, max_bytes: int = MIB) -> bytes:
        """Return the contents of a regular file.

        Raises:
            ConfigError: the path leaves the working directory.
            OSError: there is no such file, it is a link, or it is larger than `max_bytes`.
        """
        check_files({path: b""})
        reply = await self._do({"do": "read", "path": path, "limit": max_bytes})
        return reply.content

    async def delete(self, paths: Sequence[str]) -> None:
        """Delete files, and the folders that this leaves empty; raises as `read`."""
        for path in paths:
            check_files({path: b""})
        await self._do({"do": "delete", "paths": list(paths)})

    async def snapshot(self, since: WorkspaceSnapshot | None = None) -> WorkspaceSnapshot:
        """Return the files of the working directory; contents that did not change are taken from the snapshot `since`."""
        known = dict(since.digests) if since is not None else {}
        reply = await self._do({"do": "snapshot", "known": known, "limit": self.limits.work_mb * MIB})
        files: dict[str, bytes] = {}
        for name, digest in sorted(reply.digests.items()):
            if name in reply.contents:
                files[name] = reply.contents[name]
            elif since is not None and since.digests.get(name) == digest:
                files[name] = since.files[name]
            else:
                raise EnvironmentFault(f"sandbox: the snapshot names {name!r}, but has no contents of it")
        return WorkspaceSnapshot(files=files, left_out=reply.left_out, digests=reply.digests)

    async def restore(self, snapshot: WorkspaceSnapshot) -> None:
        """Replace the files of the working directory by `snapshot`; links and pipes stay."""
        # Only what differs is written: most files of a working directory never change.
        now = await self.snapshot(since=snapshot)
        await self.delete([name for name in now.files if name not in snapshot.files])
        await self.write({name: data for name, data in snapshot.files.items() if now.files.get(name) != data})

    async def run_python(self, program: Program, *, timeout_s: float | None = None) -> Result:
        """Run `python3 FILE ...` in a fork of a warm interpreter; only what `Sandbox.forks` opens can, and nothing else.

        Files, directories, processes and network of `program` are its own. At its timeout every process of it is killed.
        """
        request = {"do": "fork", "argv": program.argv[1:], "files": dict(program.files), **_input_of(program)}
        return await self._run(request, timeout_s)

    async def do(self, request: Mapping[str, object], patience_s: float) -> Reply | None:
        """Send a request of another module and return its reply; None: the sandbox has ended.

        Raises:
            OSError: the sandbox's own.
        """
        async with self._turn:
            reply = await self._ask(request, patience_s)
        if reply is not None and reply.error is not None:
            number, said, path = reply.error
            raise OSError(number, said or os.strerror(number), path)
        return reply

    async def _run(self, request: Mapping[str, object], timeout_s: float | None) -> Result:
        patience = self.limits.wall_s if timeout_s is None else timeout_s
        async with self._turn:
            started_s = anyio.current_time()
            reply = await self._ask({**request, "timeout_s": patience}, patience)
            wall_s = anyio.current_time() - started_s
        if reply is None:
            said = b"the sandbox of this session has ended"
            return Result(ended=self.supervisor.ending, stderr=said, wall_s=wall_s, state_lost=True)
        if reply.ended is None:
            raise EnvironmentFault(f"sandbox: the supervisor could not do {request['do']!r}: {reply.error}")
        return Result(
            ended=reply.ended,
            exit_status=reply.exit_status,
            signal=reply.signal,
            stdout=reply.stdout,
            stderr=reply.stderr,
            wall_s=wall_s,
            state_lost=reply.state_lost,
        )

    async def _do(self, request: Mapping[str, object]) -> Reply:
        reply = await self.do(request, self.limits.wall_s)
        if reply is None:
            raise EnvironmentFault(
                f"sandbox: cannot {request['do']}, the session's sandbox has ended ({self.supervisor.ending})"
            )
        return reply

    async def _ask(self, request: Mapping[str, object], patience: float) -> Reply | None:
        with outside_work():
            data = await self.supervisor.ask(msgspec.json.encode(request), patience + REPLY_GRACE_S)
        if data is None:
            return None
        try:
            return msgspec.json.decode(data, type=Reply)
        except msgspec.DecodeError as error:
            raise EnvironmentFault(f"sandbox: the supervisor's reply is not one: {error}") from error


def _input_of(program: Program) -> dict[str, object]:
    return {"stdin": program.stdin, "environment": dict(program.environment)}


@asynccontextmanager
async def session_over(
    supervisor: SessionSupervisor, limits: Limits, files: Mapping[str, bytes] | None
) -> AsyncGenerator[Session]:
    """Yield a session over `supervisor`, with `files` in its working directory."""
    session = Session(supervisor, limits)
    if files:
        await session.write(files)
    yield session
