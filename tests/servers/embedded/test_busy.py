"""The embedded engine answers calls while a step is computed, and computes the same tokens as if nobody had called."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import numpy as np
import pytest

from agentrl.errors import InvariantError
from agentrl.servers.embedded.core import Computed, Core, ModelStep
from agentrl.servers.embedded.engine import EmbeddedEngine
from agentrl.servers.engine import EngineSampling
from tests.support.embedded import Collector, ReferenceModel, generate, request, running
from tests.support.tiny import tiny_checkpoint

LIMIT_S = 120


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("busy")
    return [tiny_checkpoint(root / str(seed), seed=seed, spread=0.15) for seed in range(2)]


class Holding:
    """Holds the step that begins after `after` others until it is released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
        self.began, self.released, self._left = threading.Event(), threading.Event(), after
        compute = Core.compute

        def held(core: Core, step: ModelStep) -> Computed:
            self._left -= 1
            if self._left == -1:
                self.began.set()
                assert self.released.wait(LIMIT_S)
            return compute(core, step)

        monkeypatch.setattr(Core, "compute", held)

    @asynccontextmanager
    async def busy(self) -> AsyncGenerator[None]:
        """Enter the block when the step has begun, and release it at the end."""
        try:
            assert await anyio.to_thread.run_sync(self.began.wait, LIMIT_S)
            yield
        finally:
            self.released.set()


def prompt(seed: int, length: int = 20) -> list[int]:
    return np.random.default_rng(seed).integers(0, 350, length).tolist()


def submit(engine: EmbeddedEngine, count: int) -> list[Collector]:
    sinks = [Collector() for _ in range(count)]
    for seed, sink in enumerate(sinks):
        chosen = EngineSampling(max_new_tokens=12, ignore_eos=True, temperature=0.9, frequency_penalty=0.1 * (seed % 2))
        engine.submit(request(f"{seed:032x}", prompt(seed), chosen), sink)
    return sinks


async def undisturbed(path: Path, count: int) -> list[tuple[int, ...]]:
    async with running(path) as engine:
        return [tuple((await sink.wait()).output_ids) for sink in submit(engine, count)]


async def test_load_abort_and_new_requests_are_answered_during_a_step(
    versions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await undisturbed(versions[0], 3)
    holding = Holding(monkeypatch, after=4)
    async with running(versions[0]) as engine:
        sinks = submit(engine, 3)
        async with holding.busy():
            assert (engine.load.num_running, engine.info.weight_version) == (3, "0")
            assert engine.abort(f"{1:032x}", exact=True) == 1
            aborted = await sinks[1].wait()
            late = Collector()
            engine.submit(request("f" * 32, prompt(2), EngineSampling(max_new_tokens=1)), late)
        assert (await late.wait()).finish is not None
        others = [tuple((await sinks[at].wait()).output_ids) for at in (0, 2)]
    assert aborted.finish is not None
    assert aborted.finish.kind == "abort"
    assert 0 < len(aborted.output_ids) < 12
    assert tuple(aborted.output_ids) == expected[1][: len(aborted.output_ids)]
    assert others == [expected[0], expected[2]]


@pytest.mark.parametrize("mode", ["in_place", "retract"])
@pytest.mark.parametrize("after", [0, 5])
async def test_a_pause_discards_the_step_that_is_computed(
    mode: str, after: int, versions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await undisturbed(versions[0], 2)
    holding = Holding(monkeypatch, after)
    async with running(versions[0]) as engine:
        sinks = submit(engine, 2)
        async with holding.busy():
            await engine.pause(mode)  # pyright: ignore[reportArgumentType] - a parameter
            assert engine.load.paused == mode
        await engine.resume()
        assert [tuple((await sink.wait()).output_ids) for sink in sinks] == expected


async def test_an_update_during_a_step_is_served_by_the_next_one(
    versions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    holding = Holding(monkeypatch, after=5)
    async with running(versions[0]) as engine:
        [sink] = submit(engine, 1)
        async with holding.busy():
            await engine.pause("retract")
            reply = await engine.update_weights(
                str(versions[1]), weight_version="1", flush_cache=False, abort_all_requests=False
            )
            assert reply.success
            await engine.resume()
        result = await sink.wait()
    [(first, _), (second, at)] = result.versions
    assert (first, second) == ("0", "1")
    ids = [*result.request.input_ids, *result.output_ids]
    start = len(result.request.input_ids)
    old, new = (ReferenceModel(path).logprobs(ids, 0.9)[start:] for path in versions)
    judged = np.concatenate((old[:at], new[at:]))
    assert np.abs(judged - result.output_logprobs).max() < 1e-5


async def test_a_cancelled_engine_ends_with_the_step_that_it_computes(
    versions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    holding = Holding(monkeypatch, after=3)
    async with running(versions[0]) as engine:
        [sink] = submit(engine, 1)
        assert await anyio.to_thread.run_sync(holding.began.wait, LIMIT_S)
        threading.Timer(0.2, holding.released.set).start()
    result = await sink.wait()
    assert result.finish is not None
    assert result.finish.kind == "abort"


async def test_a_step_that_never_ends_ends_the_engine(versions: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.servers.embedded.engine.STUCK_S", 0.1)
    holding = Holding(monkeypatch, after=0)
    try:
        with pytest.RaisesGroup(pytest.RaisesExc(InvariantError, match="a step has taken"), flatten_subgroups=True):
            async with running(versions[0]) as engine:
                await generate(engine, request("0" * 32, prompt(0), EngineSampling(max_new_tokens=2)))
    finally:
        holding.released.set()
