"""An episode gives calls up that run at a server behind a socket, alone and in a pool: what was sampled is recorded."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import anyio
import pytest

from agentrl.client import Client, EpisodeSettings, PolicyBackend, SamplingConfig
from agentrl.inference.backend import Backend
from agentrl.inference.sglang.server import SGLangServer
from agentrl.rollout.scripted_policy import plain_tokenizer
from agentrl.servers.scripted.script import Hold, ScriptedReply
from agentrl.servers.scripted.server import ScriptedServer
from agentrl.servers.scripted.socket_server import ScriptedHTTP, serve_scripted
from agentrl.tokens.verify import verify
from agentrl.types import StopReason
from tests.support.scripted import pool_of, publication

PATIENCE_S = 300
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass
class Rig:
    client: Client
    server: SGLangServer
    script: ScriptedServer
    http: ScriptedHTTP
    hold: Hold


@asynccontextmanager
async def rig(at: int, *, in_pool: bool = True) -> AsyncGenerator[Rig]:
    plain, hold = plain_tokenizer(), Hold(at=at)
    script = ScriptedServer(
        lambda call: ScriptedReply(output="0123456789", holds=() if call.index else (hold,)),
        vocab_size=plain.renderer.vocab_size,
        encode=plain.encode_output,
        eos_id=min(plain.renderer.eos_ids),
    )
    async with serve_scripted(script) as http:
        server = SGLangServer(http.url, vocab_size=plain.renderer.vocab_size)
        async with pool_of(server) as pool:
            backend: Backend = pool if in_pool else server
            settings = EpisodeSettings(episode_id="e", task_id="t")
            client = Client(PolicyBackend(backend, plain.renderer, SamplingConfig(max_tokens=64), settings))
            with anyio.fail_after(PATIENCE_S):
                yield Rig(client, server, script, http, hold)


async def ask(client: Client, *, stream: bool) -> None:
    if not stream:
        await client.chat.completions.create(messages=HI)
        return
    async for _ in await client.chat.completions.create(messages=HI, stream=True):
        pass


@pytest.mark.parametrize("in_pool", [True, False])
@pytest.mark.parametrize("at", [1, 4, 9])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_cancelled_call_is_a_turn_of_what_the_server_had(stream: bool, at: int, in_pool: bool) -> None:
    async with rig(at, in_pool=in_pool) as r:
        async with anyio.create_task_group() as tasks:
            with anyio.CancelScope() as scope:
                tasks.start_soon(cancel_when, r.hold, scope)
                await ask(r.client, stream=stream)
        await ask(r.client, stream=stream)
        trajectory = r.client.close(StopReason.COMPLETED, 1.0)
    first, second = trajectory.turns
    assert first.stop_reason is StopReason.ABORT
    text = first.message["content"]
    assert text == "0123456789"[: len(text)]
    assert len(text) == at if not stream else 0 < len(text) <= at
    assert (second.stop_reason, second.message["content"]) == (StopReason.STOP, "0123456789")
    verify(trajectory)


async def cancel_when(hold: Hold, scope: anyio.CancelScope) -> None:
    await hold.reached.wait()
    scope.cancel()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_nothing_was_sampled_of_leaves_nothing(stream: bool) -> None:
    async with rig(0) as r:
        async with anyio.create_task_group() as tasks:
            with anyio.CancelScope() as scope:
                tasks.start_soon(cancel_when, r.hold, scope)
                await ask(r.client, stream=stream)
        assert not r.client.turns
        await ask(r.client, stream=stream)
        assert len(r.client.turns) == 1


async def test_a_call_that_is_given_up_during_a_pause_is_had_when_the_server_continues() -> None:
    async with rig(4) as r:
        async with anyio.create_task_group() as tasks:
            scope = anyio.CancelScope()

            async def call() -> None:
                with scope:
                    await ask(r.client, stream=False)

            tasks.start_soon(call)
            await r.hold.reached.wait()
            await r.server.pause("retract")
            scope.cancel()
            await anyio.wait_all_tasks_blocked()
            assert not r.client.turns
            await r.server.load_weights(publication(1))
            await r.server.resume()
        [turn] = r.client.episode.turns
    assert turn.stop_reason is StopReason.ABORT
    assert turn.message["content"][:4] == "0123"


async def test_the_end_of_the_episode_cuts_a_call_that_is_being_given_up() -> None:
    async with rig(4) as r:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(ask, r.client, stream=False))
            await r.hold.reached.wait()
            r.client.episode.end.come()
            tasks.cancel_scope.cancel()
        assert not r.client.turns
        assert r.client.episode.calls.in_flight == 0
