"""Everything at once, in virtual time: whatever servers and callers do, each call ends in time and leaves nothing behind."""

from __future__ import annotations

from collections import Counter
from random import Random

import anyio
import pytest

from agentrl.errors import ServerError
from agentrl.inference.pool.pool import ServerPool
from agentrl.servers.scripted.server import Fault, ScriptedCall, ScriptedReply, ScriptedServer
from tests.support.scripted import VOCAB, in_virtual_time, pool_of, request

CALLS = 300
TIMEOUT_S = 8.0
FAULTS = (Fault.SERVER_ERROR, Fault.REFUSE, Fault.HANG, Fault.DIE, Fault.ABORT, Fault.NOT_JSON, Fault.SHORT_LOGPROBS)


async def whole(pool: ServerPool, episode: str) -> str:
    generation = await pool.generate(request(episode=episode))
    return "answered" if len(generation.output_ids) else "empty"


async def streamed(pool: ServerPool, episode: str, chunks: int) -> str:
    ids: list[int] = []
    async with pool.stream(request(episode=episode)) as stream:
        async for chunk in stream:
            ids += chunk.output_ids.tolist()
            if chunk.generation is not None:
                return "answered" if chunk.generation.output_ids.tolist() == ids else "contradicted"
            if len(ids) >= chunks:
                return "left"
    return "unfinished"


async def storm(servers: list[ScriptedServer], pool: ServerPool, random: Random) -> None:
    """Kill, revive, freeze and thaw servers, for ever."""
    while True:
        await anyio.sleep(random.random())
        server = random.choice(servers)
        match random.randrange(4):
            case 0:
                server.die()
                if random.random() < 0.5:
                    pool.report_dead(server.url, "exit code 1")
            case 1:
                server.control_faults["check"] = Fault.HANG
            case _:
                server.revive()
                server.control_faults.clear()


@pytest.mark.parametrize("seed", range(4))
def test_every_call_ends_in_time_and_none_is_left_in_flight(seed: int) -> None:
    random = Random(seed)
    ends: Counter[str] = Counter()

    def script(call: ScriptedCall) -> ScriptedReply:
        fault = random.choice(FAULTS) if random.random() < 0.3 else None
        return ScriptedReply(output=range(10, 10 + random.randrange(2, 30)), fault=fault)

    servers = [ScriptedServer(script, vocab_size=VOCAB, url=f"scripted://{number}", timeout_s=99) for number in range(4)]

    async def call(pool: ServerPool, number: int) -> None:
        await anyio.sleep(random.uniform(0, 30))
        patience = random.uniform(0, 6) if random.random() < 0.3 else 2 * TIMEOUT_S
        started, end = anyio.current_time(), "cancelled"
        with anyio.move_on_after(patience):
            try:
                episode = str(number % 20)
                end = await (whole(pool, episode) if number % 2 else streamed(pool, episode, random.randrange(1, 60)))
            except ServerError as error:
                end = type(error).__name__
        assert anyio.current_time() - started <= min(patience, TIMEOUT_S) + 1e-6
        ends[end] += 1

    async def main() -> None:
        async with pool_of(*servers, request_timeout_s=TIMEOUT_S, health_interval_s=1.0) as pool:
            async with anyio.create_task_group() as outside:
                outside.start_soon(storm, servers, pool, random)
                async with anyio.create_task_group() as calls:
                    for number in range(CALLS):
                        calls.start_soon(call, pool, number)
                outside.cancel_scope.cancel()
            assert [server.in_flight for server in pool.describe().servers] == [0] * len(servers)

    in_virtual_time(main)
    assert all(not server.engine.player.playing for server in servers)
    assert sum(ends.values()) == CALLS
    assert ends["answered"] > CALLS / 4
    assert not ends.keys() - {"answered", "left", "cancelled", "ServerUnavailable", "ServerTimeout", "ReplyError"}, ends
