"""Each hazard of `agentrl.inference.embedded.hazards`: as a fault of the embedded server and at the real one it misleads a
naive client, without the fault it does not, and agentrl's own client is not misled by any or all of them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import numpy as np
import pytest
from anyio.abc import TaskGroup

from agentrl.errors import InvariantError
from agentrl.inference.base import GenerateRequest
from agentrl.inference.config import InferenceConfig
from agentrl.inference.embedded.engine import EmbeddedEngine, EngineOptions
from agentrl.inference.embedded.hazards import Hazard
from agentrl.inference.pool import ServerPool
from agentrl.inference.roster import State
from agentrl.inference.serve import serving
from agentrl.inference.sglang import SGLangServer
from agentrl.types import Publication, StopReason
from tests.inference.embedded_helpers import Judge
from tests.support.api import Api, api_of
from tests.support.calls import ENDLESS, Call, ask, begin
from tests.support.scenes import NAIVE, Scene
from tests.support.servers import CONTROL_S, publication_of, reset

PROMPT = [5, 6, 7, 8]
TOLERANCE = 1e-5
SURVIVED = [hazard for hazard in Hazard if hazard is not Hazard.ABORT_DEADLOCK]
"""What a real server can be put through without a restart."""


@asynccontextmanager
async def embedded(checkpoints: dict[int, Path], faults: frozenset[Hazard]) -> AsyncGenerator[tuple[str, Api]]:
    """Serve checkpoint 0 as version "0" with the given faults."""
    engine = EmbeddedEngine(EngineOptions(model_path=str(checkpoints[0]), faults=faults))
    health = Hazard.BLOCKING_HEALTH in faults
    async with serving(engine, blocking_health=health) as url, api_of(url) as api:
        yield url, api


async def misled(hazard: Hazard, api: Api, checkpoints: dict[int, Path]) -> bool:
    results: list[bool] = []
    async with anyio.create_task_group() as tasks:
        results.append(await NAIVE[hazard](Scene(api, tasks, checkpoints)))
        tasks.cancel_scope.cancel()
    return results[0]


def test_every_hazard_has_its_scene() -> None:
    assert set(NAIVE) == set(Hazard)


@pytest.mark.parametrize("hazard", Hazard)
async def test_a_fault_misleads_a_naive_client(hazard: Hazard, checkpoints: dict[int, Path]) -> None:
    async with embedded(checkpoints, frozenset({hazard})) as (_, api):
        assert await misled(hazard, api, checkpoints)


@pytest.mark.parametrize("hazard", Hazard)
async def test_without_its_fault_the_embedded_server_misleads_nobody(hazard: Hazard, checkpoints: dict[int, Path]) -> None:
    others = frozenset(Hazard) - {hazard}
    for faults in (frozenset[Hazard](), others):
        async with embedded(checkpoints, faults) as (_, api):
            assert not await misled(hazard, api, checkpoints)


@pytest.mark.sglang
@pytest.mark.parametrize("hazard", SURVIVED)
async def test_sglang_misleads_a_naive_client(hazard: Hazard, request: pytest.FixtureRequest) -> None:
    server = request.getfixturevalue("sglang_server")
    try:
        async with api_of(server.url) as api:
            assert await misled(hazard, api, server.checkpoints)
    finally:
        reset(server)


async def _generate(client: SGLangServer, request: GenerateRequest, reasons: list[StopReason]) -> None:
    reasons.append((await client.generate(request)).stop_reason)


async def storm(client: SGLangServer, published: dict[int, Publication], judges: dict[int, Judge], tasks: TaskGroup) -> None:
    """Two updates, one exact and one in place, with calls that go on and calls that are aborted meanwhile."""
    staying = [begin(tasks, client, [5, 6, 7 + at]) for at in range(2)]
    for version, mode in ((1, "retract"), (2, "in_place")):
        leaving = begin(tasks, client, PROMPT)
        for call in (*staying, leaving):
            await call.more(10)
        await client.pause("retract" if mode == "retract" else "in_place")
        held = Call(client, ask(PROMPT, 10))
        tasks.start_soon(held.run)
        unstreamed = ask(PROMPT, ENDLESS)
        aborted: list[StopReason] = []
        tasks.start_soon(_generate, client, unstreamed, aborted)
        await anyio.lowlevel.checkpoint()
        await client.abort(unstreamed.request_id)
        assert await client.check() == version - 1
        await client.load_weights(published[version])
        assert await client.check() == version
        await client.resume()
        assert [span.version for span in (await held.finished()).spans] == [version]
        await client.abort(leaving.request.request_id)
        assert (await leaving.finished()).stop_reason is StopReason.ABORT
        for call in staying:
            await call.more(10)
        assert aborted == [StopReason.ABORT]
        fresh = await client.generate(ask([5, 6, 7, 9, 10, 11], 20))
        ids = [5, 6, 7, 9, 10, 11, *fresh.output_ids.tolist()]
        assert np.abs(fresh.output_logprobs - judges[version].logprobs(ids)[6:]).max() < TOLERANCE
    for at, call in enumerate(staying):
        await client.abort(call.request.request_id)
        generation = await call.finished()
        assert [span.version for span in generation.spans] == [0, 1, 2]
        for span in generation.spans[:2]:
            expected = judges[span.version].logprobs([5, 6, 7 + at, *generation.output_ids.tolist()])[3:]
            recorded = generation.output_logprobs[span.start : span.end]
            assert np.abs(recorded - expected[span.start : span.end]).max() < TOLERANCE


@pytest.fixture(scope="module")
def judges(checkpoints: dict[int, Path]) -> dict[int, Judge]:
    return {version: Judge(checkpoints[version]) for version in (0, 1, 2)}


@pytest.mark.parametrize(
    "faults", [*(frozenset({hazard}) for hazard in Hazard), frozenset(Hazard)], ids=lambda f: "+".join(f)
)
async def test_our_client_is_not_misled(
    faults: frozenset[Hazard], checkpoints: dict[int, Path], judges: dict[int, Judge]
) -> None:
    published = {version: publication_of(checkpoints[version], version) for version in (1, 2)}
    async with embedded(checkpoints, faults) as (url, api), anyio.create_task_group() as tasks:
        async with SGLangServer(url, vocab_size=357, control_timeout_s=CONTROL_S) as client:
            await storm(client, published, judges, tasks)
        await api.idle()


@pytest.mark.sglang
async def test_our_client_is_not_misled_by_sglang(request: pytest.FixtureRequest, judges: dict[int, Judge]) -> None:
    server = request.getfixturevalue("sglang_server")
    published = {version: publication_of(server.checkpoints[version], version) for version in (1, 2)}
    try:
        async with anyio.create_task_group() as tasks, api_of(server.url) as api:
            async with SGLangServer(server.url, vocab_size=server.vocab_size, control_timeout_s=CONTROL_S) as client:
                await storm(client, published, judges, tasks)
            await api.idle()
    finally:
        reset(server)


class Watched(SGLangServer):
    """Lets a test wait for the pool's signs of life."""

    def __init__(self, url: str, *, vocab_size: int) -> None:
        super().__init__(url, vocab_size=vocab_size)
        self._answered, self._news = 0, anyio.Event()

    async def check(self) -> int:
        version = await super().check()
        self._answered += 1
        self._news.set()
        return version

    async def checked(self, times: int) -> None:
        """Wait for that many more."""
        goal = self._answered + times
        with anyio.fail_after(CONTROL_S):
            while self._answered < goal:
                self._news = anyio.Event()
                await self._news.wait()


async def test_a_pool_keeps_a_paused_server_whose_health_does_not_answer(
    checkpoints: dict[int, Path], tasks: TaskGroup
) -> None:
    async with embedded(checkpoints, frozenset(Hazard)) as (url, api):
        server = Watched(url, vocab_size=357)
        async with ServerPool([server], InferenceConfig(urls=(url,), health_interval_s=0.01)) as pool:
            await server.pause("retract")
            healthy = Scene(api, tasks, checkpoints).call(api.get("/health"))
            await server.checked(5)
            (status,) = pool.describe().servers
            assert (status.state, status.paused, healthy()) == (State.SERVING, True, False)
            await server.resume()


async def test_our_client_updates_no_server_that_is_not_paused(checkpoints: dict[int, Path]) -> None:
    async with (
        embedded(checkpoints, frozenset({Hazard.UPDATE_RACE})) as (url, _),
        SGLangServer(url, vocab_size=357) as client,
    ):
        with pytest.raises(InvariantError, match="pause"):
            await client.load_weights(publication_of(checkpoints[1], 1))
        assert await client.check() == 0
