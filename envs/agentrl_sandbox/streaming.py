"""A program whose output arrives while it runs.

Invariant: a program ends at its deadline or at the end of the block, whichever comes first. Output over the budget is not
delivered; it is counted, and the program continues.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final

import anyio

from agentrl.errors import EnvironmentFault
from agentrl_sandbox.session import Reply, Session
from agentrl_sandbox.types import Ending, Result

_POLL_S: Final = 0.5
"""Seconds for which one question waits for output; other calls of the session wait for it as long."""
_GRACE_S: Final = 8.0
"""Seconds beyond the deadline by which the program's end is known."""
_STOP_S: Final = 10.0


class ProgramStream:
    """The output of a running program, both of its streams as one; iterate over it once.

    Example:
        async with container.stream(["make", "test"], timeout_s=600, max_bytes=100_000) as stream:
            async for piece in stream:
                show(piece)
        print(stream.result.exit_status, stream.cut_bytes)
    """

    def __init__(self, session: Session, first: Reply | None, timeout_s: float) -> None:
        self._session, self._first = session, first
        self._until = anyio.current_time() + timeout_s + _GRACE_S
        self._began_s = anyio.current_time()
        self._result: Result | None = None
        self.cut_bytes = 0
        """Bytes of output beyond the budget."""

    @property
    def result(self) -> Result:
        """How the program ended; its outputs are empty, since they have been delivered.

        Raises:
            RuntimeError: it has not ended; read its output to the end first.
        """
        if self._result is None:
            raise RuntimeError("the program has not ended; iterate over its output to the end first")
        return self._result

    async def __aiter__(self) -> AsyncIterator[bytes]:
        reply = self._first
        while True:
            if reply is None:
                self._result = Result(ended=self._session.supervisor.ending, wall_s=self._wall_s, state_lost=True)
                return
            if reply.content:
                yield reply.content
            if reply.ended is not None:
                self._note_end(reply)
                return
            if anyio.current_time() > self._until:
                raise EnvironmentFault(f"sandbox: a program has not ended {_GRACE_S:g} s after its deadline")
            assert self._first is not None
            reply = await self._session.do({"do": "poll", "stream": self._first.stream, "wait_s": _POLL_S}, _GRACE_S)

    @property
    def _wall_s(self) -> float:
        return anyio.current_time() - self._began_s

    def _note_end(self, reply: Reply) -> None:
        self.cut_bytes = reply.cut
        self._result = Result(
            ended=reply.ended or Ending.KILLED,
            exit_status=reply.exit_status,
            signal=reply.signal,
            wall_s=self._wall_s,
        )

    async def close(self) -> None:
        """End the program, unless it has ended."""
        if self._result is None and self._first is not None and self._first.stream:
            with anyio.move_on_after(_STOP_S, shield=True):
                await self._session.do({"do": "stop", "stream": self._first.stream}, _STOP_S)


@asynccontextmanager
async def stream_program(
    session: Session, argv: Sequence[str], *, environment: Mapping[str, str] | None, timeout_s: float, max_bytes: int
) -> AsyncGenerator[ProgramStream]:
    """Start a program in a session and yield its output; the block's end ends it.

    Args:
        session: where it runs, beside Python and shell.
        argv: the command.
        environment: variables beside those of the session.
        timeout_s: seconds until it is killed, whether its output is read or not.
        max_bytes: the budget of its output.
    """
    request = {"do": "start", "argv": list(argv), "environment": dict(environment or {})}
    first = await session.do({**request, "timeout_s": timeout_s, "budget": max_bytes}, _GRACE_S)
    stream = ProgramStream(session, first, timeout_s)
    try:
        yield stream
    finally:
        await stream.close()
