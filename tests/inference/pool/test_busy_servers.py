"""A server that is too busy for health checks, and answers calls all the same, keeps its place in the pool."""

from __future__ import annotations

from contextlib import AsyncExitStack

import anyio
import pytest

from agentrl.errors import ServerUnavailable
from agentrl.inference.backend import GenerateRequest, Generation
from agentrl.inference.pool.members import FROZEN_CHECKS, State
from agentrl.servers.scripted.server import ScriptedServer
from tests.support.scripted import VOCAB, in_virtual_time, pool_of, request, seen

CALLS = 20


class Busy(ScriptedServer):
    """Answers no health check, and `CALLS` calls, one every 0.7 s."""

    answered = 0

    async def check(self) -> int:
        await anyio.sleep_forever()
        raise AssertionError

    async def connect(self) -> None:
        if self.answered:
            await anyio.sleep_forever()
        await super().connect()

    async def generate(self, request: GenerateRequest) -> Generation:
        if self.answered == CALLS:
            await anyio.sleep_forever()
        await anyio.sleep(0.7)
        self.answered += 1
        return await super().generate(request)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_server_that_answers_calls_is_not_frozen_and_one_that_answers_nothing_is(streamed: bool) -> None:
    async def main() -> None:
        only = Busy(lambda _: [4] * (CALLS if streamed else 1), vocab_size=VOCAB)
        pool = pool_of(only, health_interval_s=1, request_retries=0)
        async with pool, AsyncExitStack() as open_streams:
            if streamed:
                chunks = await open_streams.enter_async_context(pool.stream(request()))
                for _ in range(CALLS):
                    await anyio.sleep(0.7)
                    assert len((await anext(chunks)).output_ids) == 1
            else:
                for _ in range(CALLS):
                    await pool.generate(request())
            only.answered = CALLS
            assert pool.describe().servers[0].state is State.SERVING
            with anyio.move_on_after(0.5) as early:
                await pool.until_frozen(only.url)
            assert early.cancelled_caught
            if not streamed:
                with pytest.raises(ServerUnavailable, match="the pool waited for its health check"):
                    await pool.generate(request())
            await seen(pool, lambda status: status.servers[0].state is State.DEAD)
            with anyio.fail_after(2 * FROZEN_CHECKS + 1):
                await pool.until_frozen(only.url)

    in_virtual_time(main)
