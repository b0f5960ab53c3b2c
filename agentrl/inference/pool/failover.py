"""Model calls over several servers: routed, sent to another server after a failure, checked for their versions.

Invariant: a call that failed at a server is sent again under a new request id, at most `request_retries` times. A reply with
a version that the pool cannot have published is discarded, and its server evicted.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from uuid import uuid4

import anyio

from agentrl.errors import ServerUnavailable
from agentrl.inference.backend import GenerateRequest, Generation, GenerationChunk
from agentrl.inference.config import InferenceConfig
from agentrl.inference.pool.members import Member, Members, State, Tries
from agentrl.support.concurrency import Deadline


class Failover:
    """Sends model calls to the members of a pool."""

    def __init__(
        self,
        members: Members,
        config: InferenceConfig,
        *,
        check_health: Callable[[Member], Awaitable[None]],
        evict: Callable[[Member, State, str], None],
    ) -> None:
        self.members, self.check_health, self.evict = members, check_health, evict
        self._attempts: dict[str, Attempt] = {}
        """The calls in flight, by the ids that their callers know."""
        self.timeout_s = config.request_timeout_s
        self.retries = config.request_retries

    async def generate(self, request: GenerateRequest) -> Generation:
        """Return the completion of `request`, from the server that its episode uses, or another if that one fails.

        Raises:
            ServerUnavailable: all attempts failed, or no server is left; names the servers and the reasons.
            ServerTimeout: no answer within `inference.request_timeout_s`, all attempts together.
            RequestRejected, ReplyError: as for one server, without another attempt.
        """
        with self._attempting(request) as attempt:
            while True:
                try:
                    with attempt.deadline() as wait:
                        member = await attempt.next_server(wait)
                        return attempt.checked(await member.server.generate(attempt.request))
                    # Reached only when the deadline was called off: the server was evicted, or the caller gave up
                    # before one was found.
                    raise attempt.evicted()
                except ServerUnavailable as error:
                    await attempt.failed(error)

    @asynccontextmanager
    async def stream(self, request: GenerateRequest) -> AsyncGenerator[AsyncIterator[GenerationChunk], None]:
        """Yield the completion of `request` as it is sampled; other servers are tried until the first chunk is out."""
        with self._attempting(request) as attempt:
            chunks = PoolStream(attempt)
            try:
                yield chunks
            finally:
                await chunks.aclose()

    async def give_up(self, request_id: str) -> None:
        """Have a call return the tokens it has, with `StopReason.ABORT`; one that waits for a server fails."""
        attempt = self._attempts.get(request_id)
        if attempt is not None:
            await attempt.give_up()

    @contextmanager
    def _attempting(self, request: GenerateRequest) -> Generator[Attempt]:
        attempt = self._attempts[request.request_id] = Attempt(self, request)
        try:
            yield attempt
        finally:
            del self._attempts[request.request_id]


class Attempt:
    """A model call on its way through the servers."""

    def __init__(self, failover: Failover, request: GenerateRequest) -> None:
        self.request = request
        self.member: Member | None = None
        self._tries = Tries(failover.retries, "model call")
        self._failover, self._members = failover, failover.members
        self._avoid: set[Member] = set()
        self._lowest = 0
        self._is_given_up = False
        self._wait: Deadline | None = None
        self._started = anyio.current_time()

    async def next_server(self, wait: Deadline) -> Member:
        """Return the server for the call; evicting that server ends `wait`."""
        self.member = None
        self.member = await self._members.route(self.request.episode_id, self._avoid, self.request.context)
        # Read at routing: a server that answers with an older version has missed an update or was restarted.
        self._lowest = self._members.version
        wait.join(self.member.waits)
        return self.member

    def deadline(self) -> Deadline:
        """Return the call's deadline for its next wait; evicting the server that it waits for ends the wait."""
        wait = self._wait = Deadline(self._failover.timeout_s, self.waited, since=self._started)
        if self.member is not None:
            wait.join(self.member.waits)
        return wait

    async def give_up(self) -> None:
        """Have the call end with the tokens that its server has; without a server it fails."""
        self._is_given_up = True
        if self.member is not None:
            await self.member.server.give_up(self.request.request_id)
        elif self._wait is not None:
            self._wait.call_off()

    def evicted(self) -> ServerUnavailable:
        member = self.member
        if member is None:
            return ServerUnavailable("the call was given up before a server had it")
        return ServerUnavailable(f"{member.url}: evicted while the call waited for it: {member.reason}", url=member.url)

    def heard(self) -> None:
        """Record that the server has sent tokens."""
        if self.member is not None:
            self.member.heard_at = anyio.current_time()

    def checked(self, generation: Generation) -> Generation:
        """Return `generation`, or evict the server and raise if it cannot have had the versions that it reports."""
        # The target, not the version: during an update some servers already sample with the weights that are on their
        # way.
        member, highest = self.member, self._members.target
        assert member is not None
        self.heard()
        for span in generation.spans:
            if not self._lowest <= span.version <= highest:
                reason = (
                    f"{member.url}: sampled with version {span.version}, while the pool had {self._lowest} to {highest}; "
                    "was the server restarted?"
                )
                # A server that was evicted meanwhile keeps the reason of that eviction.
                if member.state is State.SERVING:
                    self._failover.evict(member, State.BEHIND, reason)
                raise ServerUnavailable(reason, url=member.url)
        return generation

    async def failed(self, error: ServerUnavailable) -> None:
        """Return when the call should be sent again; raise the error if no server or no attempt is left."""
        if self.member is None or self._is_given_up:
            raise error
        self._tries.count(error)
        with Deadline(self._failover.timeout_s, self.waited, since=self._started):
            # Before the next server is chosen: a dead server is evicted now, and its other calls leave it too.
            await self._failover.check_health(self.member)
            self._avoid.add(self.member)
            # Another server needs no pause: only the one that refused may be overloaded.
            if not self._members.other_serving(self._avoid):
                await self._tries.back_off(error)
        self.member = None
        # The first server may still run the call under its former id.
        self.request = replace(self.request, request_id=uuid4().hex)

    def waited(self) -> str:
        request = self.request
        where = f"waiting for {self.member.url}" if self.member else f"waiting for a server: {self._members.reasons()}"
        failures = self._tries.failures
        before = f" after {len(failures)} failures ({'; '.join(failures)})" if failures else ""
        return (
            f"model call {request.request_id} of episode {request.episode_id!r} ({request.context.size} tokens, at most "
            f"{request.sampling.max_new_tokens} more) got no answer, {where}{before}"
        )


class PoolStream(AsyncIterator[GenerationChunk]):
    """The chunks of one call; the call moves to another server only before its first chunk."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
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
                # What the caller has got cannot be taken back, and another server would sample another continuation.
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
            attempt.heard()
            if chunk.generation is not None:
                attempt.checked(chunk.generation)
                self._ended = True
            self._started = True
            return chunk
        raise attempt.evicted()

    async def aclose(self) -> None:
        """End the call, even if cancelled; an unfinished one is aborted at the server."""
        self._chunks = None
        await self._open.aclose()
        self._open = AsyncExitStack()
