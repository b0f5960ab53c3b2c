"""Model calls over several servers: routed, tried again elsewhere when a server fails, checked for their versions.

Invariant: a call that failed at a server is sent again under a new request id, at most `request_retries` times in all; a
reply with a version the pool cannot have asked for is thrown away, and its server taken out.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from uuid import uuid4

import anyio

from agentrl.concurrency import Deadline
from agentrl.errors import ServerUnavailable
from agentrl.inference.backend import GenerateRequest, Generation, GenerationChunk
from agentrl.inference.config import InferenceConfig
from agentrl.inference.pool.members import Member, Roster, State


class Failover:
    """Sends model calls to the servers of a roster."""

    def __init__(
        self,
        roster: Roster,
        config: InferenceConfig,
        *,
        suspect: Callable[[Member], Awaitable[None]],
        lose: Callable[[Member, State, str], None],
    ) -> None:
        """Begin with no call in flight.

        Args:
            roster: the servers.
            config: deadline and retries.
            suspect: finds out whether a server that failed a call is alive, and takes it out if not.
            lose: takes a server out.
        """
        self.roster, self.suspect, self.lose = roster, suspect, lose
        self.timeout_s = config.request_timeout_s
        self.retries = config.request_retries

    async def generate(self, request: GenerateRequest) -> Generation:
        """Return the completion of `request`; see `ServerPool.generate`."""
        attempt = Attempt(self, request)
        while True:
            try:
                with attempt.deadline() as wait:
                    member = await attempt.next_server(wait)
                    return attempt.checked(await member.server.generate(attempt.request))
                raise attempt.evicted()
            except ServerUnavailable as error:
                await attempt.failed(error)


class Attempt:
    """One model call on its way through the servers."""

    def __init__(self, failover: Failover, request: GenerateRequest) -> None:
        """Begin with no server tried."""
        self.request = request
        self.member: Member | None = None
        self.failures: list[str] = []
        self._failover, self._roster = failover, failover.roster
        self._avoid: set[Member] = set()
        self._lowest = 0
        self._started = anyio.current_time()

    async def next_server(self, wait: Deadline) -> Member:
        """Return where to send the call; `wait` is called off when that server is evicted. See `Roster.route`."""
        self.member = None
        self.member = await self._roster.route(self.request.episode_id, self._avoid)
        self._lowest = self._roster.version
        wait.join(self.member.waits)
        return self.member

    def deadline(self) -> Deadline:
        """Return the call's deadline for its next wait, which is called off when the server it waits for is evicted."""
        wait = Deadline(self._failover.timeout_s, self.waited, since=self._started)
        if self.member is not None:
            wait.join(self.member.waits)
        return wait

    def evicted(self) -> ServerUnavailable:
        """Return the error for a wait that was called off."""
        member = self.member
        assert member is not None
        return ServerUnavailable(f"{member.url}: taken out while the call waited for it: {member.reason}", url=member.url)

    def checked(self, generation: Generation) -> Generation:
        """Return what the server sampled, if it can have had the versions it names.

        Raises:
            ServerUnavailable: the server was taken out because it cannot.
        """
        member, highest = self.member, self._roster.target
        assert member is not None
        for span in generation.spans:
            if not self._lowest <= span.version <= highest:
                reason = (
                    f"{member.url}: sampled with version {span.version}, while the pool had {self._lowest} to {highest}; "
                    "was the server restarted?"
                )
                if member.state is State.SERVING:
                    self._failover.lose(member, State.BEHIND, reason)
                raise ServerUnavailable(reason, url=member.url)
        return generation

    async def failed(self, error: ServerUnavailable) -> None:
        """Take note of a failure; returns when the call is to be sent again.

        Raises:
            ServerUnavailable: when it is not: no server is left, or it has been tried often enough.
        """
        self.failures.append(str(error))
        if self.member is None or not self._failover.retries:
            raise error
        if len(self.failures) > self._failover.retries:
            tried = "; ".join(self.failures)
            raise ServerUnavailable(f"model call failed {len(self.failures)} times: {tried}", url=error.url) from error
        with Deadline(self._failover.timeout_s, self.waited, since=self._started):
            await self._failover.suspect(self.member)
        self._avoid.add(self.member)
        self.member = None
        self.request = replace(self.request, request_id=uuid4().hex)

    def waited(self) -> str:
        """Return who waited for whom, for the message of the deadline."""
        request = self.request
        where = f"waiting for {self.member.url}" if self.member else f"waiting for a server: {self._roster.reasons()}"
        before = f" after {len(self.failures)} failures ({'; '.join(self.failures)})" if self.failures else ""
        return (
            f"model call {request.request_id} of episode {request.episode_id!r} ({request.context.size} tokens, at most "
            f"{request.sampling.max_new_tokens} more) got no answer, {where}{before}"
        )


class PoolStream(AsyncIterator[GenerationChunk]):
    """The chunks of one call; it moves to another server only as long as no chunk is out."""

    def __init__(self, failover: Failover, request: GenerateRequest) -> None:
        """Begin; nothing is sent before the first chunk is asked for."""
        self._failover = failover
        self._attempt = Attempt(failover, request)
        self._open = AsyncExitStack()
        self._chunks: AsyncIterator[GenerationChunk] | None = None
        self._started = self._ended = False

    async def __anext__(self) -> GenerationChunk:
        if self._ended:
            raise StopAsyncIteration
        while True:
            try:
                return await self._next()
            except ServerUnavailable as error:
                await self.aclose()
                if self._started:
                    raise
                await self._attempt.failed(error)

    async def _next(self) -> GenerationChunk:
        attempt = self._attempt
        with attempt.deadline() as wait:
            if self._chunks is None:
                member = await attempt.next_server(wait)
                self._chunks = await self._open.enter_async_context(member.server.stream(attempt.request))
            chunk = await anext(self._chunks)
            if chunk.generation is not None:
                attempt.checked(chunk.generation)
                self._ended = True
            self._started = True
            return chunk
        raise attempt.evicted()

    async def aclose(self) -> None:
        """End the call; what has not ended is aborted at the server.

        Cancellation: the connection is closed all the same.
        """
        self._chunks = None
        await self._open.aclose()
        self._open = AsyncExitStack()
