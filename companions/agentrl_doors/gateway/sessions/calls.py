"""The calls of an episode over HTTP: each is made once for all connections that ask for it.

A request that its client marks as made again joins the call that still runs, or gets the recorded answer. One that the
client marks as its first try is a new call, whatever it equals: an agent may want several samples. Most clients have no
mark. They ask again after a connection has broken, so an equal request of theirs gets an answer that nobody got; while
somebody waits for that answer, the request is a new call.

Invariant: a call runs while somebody waits for it; the last one who leaves aborts it, and what it had sampled is a turn.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Final

import anyio

from agentrl.client.backend import Answer, AskedCall, ClientBackend, Delta, Piece
from agentrl.errors import (
    AgentRLError,
    ConfigError,
    EnvironmentFault,
    EpisodeLimit,
    ReplayDiverged,
    ServerError,
    TokenError,
    WorkflowError,
)
from agentrl_doors.gateway.refusals import CallRefused
from agentrl_doors.gateway.sessions.side_calls import OtherAnswers

ANSWERED_ERRORS: Final = (
    ConfigError,
    EnvironmentFault,
    EpisodeLimit,
    ReplayDiverged,
    ServerError,
    TokenError,
    WorkflowError,
)
"""Errors of a call that its client learns of; any other ends the episode, and perhaps the run."""
_REMEMBERED: Final = 64
"""Requests of an episode that a repetition may join."""


class SharedCall:
    """One call of the policy, and those who wait for its answer."""

    def __init__(
        self,
        backend: ClientBackend,
        asked: AskedCall,
        *,
        stream: bool,
        on_answer: Callable[[Answer], None],
        other: OtherAnswers | None = None,
        after: Sequence[SharedCall] = (),
    ) -> None:
        """Prepare the call; `other` answers it in the place of the backend, once the calls `after` are over."""
        self.id = ""
        """Of the answer; known when the first piece is."""
        self.answer: Answer | None = None
        self.is_delivered = False
        """Whether somebody got all of the answer."""
        self.is_over = False
        self._backend, self._asked, self._on_answer = backend, asked, on_answer
        self._stream = stream and other is None
        self._after = after
        self._answer = backend.answer if other is None else other.answer
        self._pieces: list[Piece] = []
        self._error: AgentRLError | None = None
        self._followers = 0
        self._scope = anyio.CancelScope()
        self._news = anyio.Event()

    @property
    def is_lost(self) -> bool:
        """Whether there is an answer that nobody got and nobody waits for."""
        return self.answer is not None and not self.is_delivered and not self._followers

    @property
    def is_running(self) -> bool:
        """Whether the answer may still come: the call is not over, and not everybody has left."""
        return not self.is_over and not self._scope.cancel_called

    @property
    def is_ending(self) -> bool:
        """Whether everybody has left, and what was sampled is not recorded yet."""
        return self._scope.cancel_called and not self.is_over

    async def run(self) -> None:
        """Make the call. A cancellation aborts it; what it had sampled is a turn."""
        error: AgentRLError | None = CallRefused("the episode has ended, and with it this call", status=410)
        try:
            with self._scope:
                for earlier in self._after:  # this one may continue what they had sampled
                    await earlier.until_over()
                await (self._run_stream() if self._stream else self._run_whole())
            error = None
        except ANSWERED_ERRORS as failed:
            error = failed
        finally:
            self.is_over, self._error = True, error
            self._tell()

    async def until_over(self) -> None:
        """Wait for the end of the call."""
        while not self.is_over:
            await self._news.wait()

    @contextmanager
    def followed(self) -> Generator[AsyncIterator[Piece]]:
        """Yield the pieces of the answer, those that have come included; an error of the call is raised by the iterator."""
        self._followers += 1
        try:
            yield self._follow()
        finally:
            self._followers -= 1
            if not self._followers and not self.is_over:
                self._scope.cancel()

    async def _follow(self) -> AsyncIterator[Piece]:
        at = 0
        while True:
            for piece in self._pieces[at:]:
                at += 1
                yield piece
            if at < len(self._pieces):
                continue
            if self._error is not None:
                raise self._error
            if self.is_over:
                return
            await self._news.wait()

    def _tell(self) -> None:
        self._news.set()
        self._news = anyio.Event()

    def _add(self, piece: Piece) -> None:
        self._pieces.append(piece)
        if isinstance(piece, Answer):
            self.answer, self.id = piece, piece.id
            self._on_answer(piece)

    async def _run_whole(self) -> None:
        answer = await self._answer(self._asked)
        self._add(Delta(answer.message.get("reasoning_content") or "", answer.message.get("content") or ""))
        self._add(answer)

    async def _run_stream(self) -> None:
        stream = await self._backend.stream(self._asked)
        try:
            while self.answer is None:
                pieces = await stream.next()
                self.id = stream.id
                for piece in pieces:
                    self._add(piece)
                self._tell()
        except BaseException as error:
            if stream.running is not None:
                stream.running.close()
            try:
                await stream.close(error)
            finally:
                if isinstance(error, AgentRLError):
                    self._backend.episode.calls.fail(error)
            raise
        if stream.running is not None:
            stream.running.close()
        await stream.close()


class RecentCalls:
    """The last calls of an episode, by the identity of their requests."""

    def __init__(self) -> None:
        self._calls: dict[bytes, SharedCall] = {}

    def repeated(self, identity: bytes, *, is_retry: bool | None) -> SharedCall | None:
        """Return the call that a request repeats; None: the request is a new call.

        `is_retry` is the mark of the client: whether it makes the request again, or for the first time; None: no mark.
        """
        call = self._calls.get(identity)
        if call is None or is_retry is False:
            return None
        if is_retry:
            return call if call.is_running or call.answer is not None else None
        return call if call.is_lost else None

    def awaited(self, identity: bytes) -> SharedCall | None:
        """Return the call of a request whose answer has not arrived; None if there is none."""
        call = self._calls.get(identity)
        return call if call is not None and (call.is_running or call.is_lost) else None

    def ending(self) -> list[SharedCall]:
        """Return the calls that everybody has left, and that are not over."""
        return [call for call in self._calls.values() if call.is_ending]

    def add(self, identity: bytes, call: SharedCall) -> None:
        """Remember a new call."""
        self._calls.pop(identity, None)
        while len(self._calls) >= _REMEMBERED:
            self._calls.pop(next(iter(self._calls)))
        self._calls[identity] = call
