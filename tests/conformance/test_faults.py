"""Each fault of `agentrl.servers.embedded.faults`: as a fault of the embedded server and at the real one it misleads a
naive client, without the fault it does not, and agentrl's own client is not misled by any or all of them."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import anyio
import anyio.from_thread
import numpy as np
import pytest
from anyio.abc import TaskGroup

from agentrl.errors import InvariantError
from agentrl.inference.config import InferenceConfig
from agentrl.inference.pool.members import State
from agentrl.inference.pool.pool import ServerPool
from agentrl.inference.sglang.server import SGLangServer
from agentrl.servers.embedded.engine import EmbeddedEngine, EngineOptions
from agentrl.servers.embedded.faults import SGLangFault
from agentrl.servers.embedded.served_model import VersionWeights
from agentrl.servers.serve import serving
from agentrl.types import StopReason
from agentrl.weights.types import Publication
from tests.support.api import Api, api_of
from tests.support.calls import Whole, ask, begin, begin_whole, give_up_update
from tests.support.embedded import ReferenceModel
from tests.support.scenes import NAIVE, Scene
from tests.support.servers import CONTROL_S, publication_of, reset
from tests.support.tap import Tap, tapped

PROMPT = [5, 6, 7, 8]
TOLERANCE = 1e-5
SURVIVED = [fault for fault in SGLangFault if fault not in (SGLangFault.ABORT_DEADLOCK, SGLangFault.UPDATE_COLLISION)]
"""What a real server can be put through without a restart."""


@asynccontextmanager
async def embedded(checkpoints: dict[int, Path], faults: frozenset[SGLangFault]) -> AsyncGenerator[tuple[str, Api]]:
    """Serve checkpoint 0 as version "0" with the given faults."""
    engine = EmbeddedEngine(EngineOptions(model_path=str(checkpoints[0]), faults=faults))
    health = SGLangFault.BLOCKING_HEALTH in faults
    async with serving(engine, blocking_health=health) as url, api_of(url) as api:
        yield url, api


async def misled(fault: SGLangFault, api: Api, checkpoints: dict[int, Path]) -> bool:
    results: list[bool] = []
    async with anyio.create_task_group() as tasks:
        results.append(await NAIVE[fault](Scene(api, tasks, checkpoints)))
        tasks.cancel_scope.cancel()
    return results[0]


def test_every_hazard_has_its_scene() -> None:
    assert set(NAIVE) == set(SGLangFault)


@pytest.mark.parametrize("fault", SGLangFault)
async def test_a_fault_misleads_a_naive_client(fault: SGLangFault, checkpoints: dict[int, Path]) -> None:
    async with embedded(checkpoints, frozenset({fault})) as (_, api):
        assert await misled(fault, api, checkpoints)


@pytest.mark.parametrize("fault", SGLangFault)
async def test_without_its_fault_the_embedded_server_misleads_nobody(
    fault: SGLangFault, checkpoints: dict[int, Path]
) -> None:
    others = frozenset(SGLangFault) - {fault}
    for faults in (frozenset[SGLangFault](), others):
        async with embedded(checkpoints, faults) as (_, api):
            assert not await misled(fault, api, checkpoints)


@pytest.mark.sglang
@pytest.mark.parametrize("fault", SURVIVED)
async def test_sglang_misleads_a_naive_client(fault: SGLangFault, request: pytest.FixtureRequest) -> None:
    server = request.getfixturevalue("sglang_server")
    try:
        async with api_of(server.url) as api:
            assert await misled(fault, api, server.checkpoints)
    finally:
        reset(server)


@dataclass(frozen=True, slots=True)
class Rig:
    """Our client, the tap through which it talks to a server, and the server's own endpoints."""

    client: SGLangServer
    tap: Tap
    api: Api
    tasks: TaskGroup


async def storm(rig: Rig, published: dict[int, Publication], references: dict[int, ReferenceModel]) -> None:
    """Two updates, one exact and one in place, with calls that go on and calls that are given up meanwhile."""
    client = rig.client
    staying = [begin(rig.tasks, client, [5, 6, 7 + at]) for at in range(2)]
    for version, mode in ((1, "retract"), (2, "in_place")):
        leaving = begin(rig.tasks, client, PROMPT)
        for call in (*staying, leaving):
            await call.more(10)
        held = await paused_update(rig, "retract" if mode == "retract" else "in_place", published[version], running=3)
        assert [span.version for span in (await held.finished()).spans] == [version]
        await client.abort(leaving.request.request_id)
        assert (await leaving.finished()).stop_reason is StopReason.ABORT
        for call in staying:
            await call.more(10)
        # The staying calls began first and are as long as any: what was given up has not run to its end before.
        await rig.api.until(lambda load: (load["num_running_reqs"], load["num_waiting_reqs"]) == (2, 0), "two calls stay")
        fresh = await client.generate(ask([5, 6, 7, 9, 10, 11], 20))
        ids = [5, 6, 7, 9, 10, 11, *fresh.output_ids.tolist()]
        assert np.abs(fresh.output_logprobs - references[version].logprobs(ids)[6:]).max() < TOLERANCE
    for at, call in enumerate(staying):
        await client.abort(call.request.request_id)
        generation = await call.finished()
        assert generation.stop_reason is StopReason.ABORT
        assert [span.version for span in generation.spans] == [0, 1, 2]
        for span in generation.spans[:2]:
            expected = references[span.version].logprobs([5, 6, 7 + at, *generation.output_ids.tolist()])[3:]
            recorded = generation.output_logprobs[span.start : span.end]
            assert np.abs(recorded - expected[span.start : span.end]).max() < TOLERANCE
    assert "/update_weight_version" not in rig.tap.paths  # it would abort everything


async def paused_update(rig: Rig, mode: Literal["retract", "in_place"], new: Publication, *, running: int) -> Whole:
    """Update while calls are given up, at the server and before it, and an update as well; return a call that was held.

    `running` calls are at the server before.
    """
    client, tap = rig.client, rig.tap
    aborted, cancelled = (begin_whole(rig.tasks, client, [5, 7, last]) for last in (8, 9))
    await rig.api.until(lambda load: load["num_running_reqs"] == running + 2, "the calls run that are to be given up")
    await client.pause(mode)
    asked = len(tap.paths)
    held, unsent = begin_whole(rig.tasks, client, PROMPT, 10), begin_whole(rig.tasks, client, PROMPT)
    await anyio.lowlevel.checkpoint()
    cancelled.scope.cancel()
    for call in (aborted, unsent):
        await client.abort(call.request.request_id)
        assert (await call.finished()).stop_reason is StopReason.ABORT
    await cancelled.ended()
    assert await client.check() == new.version - 1
    await give_up_update(client, tap, new)
    await client.load_weights(new)
    assert await client.check() == new.version
    assert set(tap.paths[asked:]) <= {"/model_info", "/server_info", "/update_weights_from_disk"}
    await client.resume()
    return held


@asynccontextmanager
async def rigged(url: str, vocab_size: int) -> AsyncGenerator[Rig]:
    """Yield our client of the server at `url`; what it began has ended at the server when the block is left."""
    async with api_of(url) as api, tapped(url) as tap:
        async with (
            anyio.create_task_group() as tasks,
            SGLangServer(tap.url, vocab_size=vocab_size, control_timeout_s=CONTROL_S) as client,
        ):
            yield Rig(client, tap, api, tasks)
        await api.idle()


@pytest.fixture(scope="module")
def references(checkpoints: dict[int, Path]) -> dict[int, ReferenceModel]:
    return {version: ReferenceModel(checkpoints[version]) for version in (0, 1, 2)}


@pytest.mark.parametrize(
    "faults", [*(frozenset({fault}) for fault in SGLangFault), frozenset(SGLangFault)], ids=lambda f: "+".join(sorted(f))
)
async def test_our_client_is_not_misled(
    faults: frozenset[SGLangFault], checkpoints: dict[int, Path], references: dict[int, ReferenceModel]
) -> None:
    published = {version: publication_of(checkpoints[version], version) for version in (1, 2)}
    async with embedded(checkpoints, faults) as (url, _), rigged(url, 357) as rig:
        await storm(rig, published, references)


@pytest.mark.sglang
async def test_our_client_is_not_misled_by_sglang(
    request: pytest.FixtureRequest, references: dict[int, ReferenceModel]
) -> None:
    server = request.getfixturevalue("sglang_server")
    published = {version: publication_of(server.checkpoints[version], version) for version in (1, 2)}
    try:
        async with rigged(server.url, server.vocab_size) as rig:
            await storm(rig, published, references)
    finally:
        reset(server)


class Held(EmbeddedEngine):
    """Reads one checkpoint only when it is told to."""

    def __init__(self, options: EngineOptions, path: str) -> None:
        super().__init__(options)
        self.reading = anyio.Event()
        """Whether an update is waiting to read it."""
        self.released = threading.Event()
        self._path = path

    def _read(self, model_path: str) -> VersionWeights:
        if model_path == self._path:
            anyio.from_thread.run_sync(self.reading.set)
            self.released.wait(CONTROL_S)
        return super()._read(model_path)


async def test_an_update_that_was_given_up_is_over_before_our_client_asks_for_the_next(
    checkpoints: dict[int, Path], tasks: TaskGroup
) -> None:
    first, second = (publication_of(checkpoints[version], version) for version in (1, 2))
    options = EngineOptions(model_path=str(checkpoints[0]), faults=frozenset({SGLangFault.UPDATE_COLLISION}))
    engine = Held(options, first.path)
    async with serving(engine) as url, rigged(url, 357) as rig:
        await rig.client.pause("retract")
        async with anyio.create_task_group() as group:
            group.start_soon(rig.client.load_weights, first)
            with anyio.fail_after(CONTROL_S):
                await engine.reading.wait()
            group.cancel_scope.cancel()
        scene = Scene(rig.api, tasks, checkpoints)
        async with anyio.create_task_group() as group:  # who waits for the end of it may leave, too
            group.start_soon(engine.settled)
            await scene.taken_in()
            group.cancel_scope.cancel()
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(rig.client.load_weights, second)
                assert not await scene.happens(lambda: rig.tap.paths.count("/update_weights_from_disk") == 2)
                engine.released.set()
        finally:
            engine.released.set()
        await rig.client.resume()
        assert [span.version for span in (await rig.client.generate(ask(PROMPT, 4))).spans] == [2]


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
    async with embedded(checkpoints, frozenset(SGLangFault)) as (url, api):
        server = Watched(url, vocab_size=357)
        async with ServerPool([server], InferenceConfig(urls=(url,), health_interval_s=0.5)) as pool:
            await server.pause("retract")
            healthy = Scene(api, tasks, checkpoints).call(api.get("/health"))
            await server.checked(2)
            (status,) = pool.describe().servers
            assert (status.state, status.paused, healthy()) == (State.SERVING, True, False)
            await server.resume()


async def test_our_client_updates_no_server_that_is_not_paused(checkpoints: dict[int, Path]) -> None:
    async with (
        embedded(checkpoints, frozenset({SGLangFault.UPDATE_RACE})) as (url, _),
        SGLangServer(url, vocab_size=357) as client,
    ):
        with pytest.raises(InvariantError, match="pause"):
            await client.load_weights(publication_of(checkpoints[1], 1))
        assert await client.check() == 0
