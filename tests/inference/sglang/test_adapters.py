"""An adapter arrives at servers under the name of its version, on every call, or the update says what went wrong."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import anyio
import numpy as np
import pytest

from agentrl.algo.config import AlgorithmConfig
from agentrl.engine.config import EngineConfig
from agentrl.engine.inflight import FinishedCalls
from agentrl.engine.parts import EngineParts
from agentrl.engine.spot_check import SpotCheck
from agentrl.errors import ConfigError, WeightSyncError
from agentrl.inference.backend import Generation, LogprobTolerance, Probe
from agentrl.inference.config import InferenceConfig
from agentrl.inference.pool.pool import ServerPool
from agentrl.inference.sglang.server import SGLangServer
from agentrl.servers.embedded.adapting import LoadedAdapters
from agentrl.servers.embedded.engine import EmbeddedEngine, EngineOptions
from agentrl.servers.embedded.low_rank import ServedAdapter
from agentrl.servers.engine import AdapterReply
from agentrl.servers.scripted.server import ScriptedServer
from agentrl.servers.scripted.socket_server import serve_scripted
from agentrl.servers.serve import serving
from agentrl.types import Float32Array, Int32Array
from agentrl.weights.peft_files import ADAPTER_WEIGHTS_FILE, read_adapter
from tests.support.adapters import make_adapter, merged_logprobs
from tests.support.adapters import published_adapter as published
from tests.support.calls import Call, ask
from tests.support.tiny import tiny_checkpoint

PROMPT = list(range(3, 30))
VOCAB = 357


@pytest.fixture
def anyio_backend() -> str:
    """aiohttp needs asyncio."""
    return "asyncio"


pytestmark = pytest.mark.anyio


def probe_of(base: Path, adapter: Path) -> Probe:
    ids = np.array(PROMPT, np.int32)
    return Probe(token_ids=ids, logprobs=merged_logprobs(base, adapter, ids), tolerance=LogprobTolerance(largest=1e-4))


@asynccontextmanager
async def pool_over(engine: EmbeddedEngine, **settings: object) -> AsyncGenerator[ServerPool]:
    async with serving(engine) as url:
        # A reference model is loaded on this event loop, which may take longer than a health check waits by default.
        config = InferenceConfig.model_validate({"urls": [url], "health_interval_s": 60, **settings})
        async with ServerPool([SGLangServer(url, vocab_size=VOCAB)], config) as pool:
            yield pool


def engine_of(base: Path) -> EmbeddedEngine:
    return EmbeddedEngine(EngineOptions(model_path=str(base), device="cpu", turn_s=0))


def assert_computed_by(base: Path, adapter: Path, generation: Generation) -> None:
    ids = np.array([*PROMPT, *generation.output_ids], np.int32)
    expected = merged_logprobs(base, adapter, ids)[-len(generation.output_ids) :]
    np.testing.assert_allclose(generation.output_logprobs, expected, rtol=0, atol=2e-5)


async def test_each_call_ends_under_the_version_with_which_it_began_and_no_adapter_piles_up(tmp_path: Path) -> None:
    base = tiny_checkpoint(tmp_path / "model")
    folders = {version: make_adapter(base, tmp_path / f"v{version}", seed=version) for version in range(1, 7)}
    probes = {version: probe_of(base, folder) for version, folder in folders.items()}
    engine = engine_of(base)
    async with pool_over(engine) as pool, anyio.create_task_group() as tasks:
        await pool.update_weights(published(folders[1], 1), probes[1])
        long = Call(pool, ask(PROMPT, 600))
        tasks.start_soon(long.run)
        await long.more(5)
        for version in range(2, 7):
            report = await pool.update_weights(published(folders[version], version), probes[version])
            assert report.probe_difference is not None
            assert report.trainer_digest == next(iter(report.server_digests.values()))
            assert len(engine.adapters.names) <= 2  # the served one, and that of the call
            short = await pool.generate(ask(PROMPT, 8))
            assert [span.version for span in short.spans] == [version]
            assert_computed_by(base, folders[version], short)
        ended = await long.finished()
        await pool.update_weights(published(folders[1], 7), probes[1])
        assert len(engine.adapters.names) == 1
        assert [span.version for span in ended.spans] == [1]
        assert ended.num_retractions == 0
        assert_computed_by(base, folders[1], ended)


async def test_forty_updates_leave_one_adapter(tmp_path: Path) -> None:
    base = tiny_checkpoint(tmp_path / "model")
    folders = [make_adapter(base, tmp_path / f"v{seed}", seed=seed) for seed in range(2)]
    engine = engine_of(base)
    async with pool_over(engine) as pool:
        for version in range(1, 41):
            await pool.update_weights(published(folders[version % 2], version))
            assert len(engine.adapters.names) == 1
            assert pool.policy_version == version


class BaseAnswers(LoadedAdapters):
    """Takes adapters, and answers with the base: the request's name is lost on the way."""

    def find(self, name: str) -> ServedAdapter:
        found = super().find(name)
        return replace(found, scale=0.0)


class KeepsFormer(LoadedAdapters):
    """Takes the name of each adapter, and computes the first: an update that is acknowledged and never delivered."""

    first: ServedAdapter | None = None

    def find(self, name: str) -> ServedAdapter:
        found = super().find(name)
        self.first = self.first or found
        return self.first

    def checksums(self, name: str) -> Mapping[str, str]:
        return super().find(name).checksums()


class ScalesAgain(LoadedAdapters):
    """Multiplies B by the scale in place each time that an adapter is loaded."""

    async def load(self, name: str, path: str) -> AdapterReply:
        reply = await super().load(name, path)
        if reply.success:
            for layer in self._loaded[name].layers:
                for pair in layer.values():
                    pair.outer.mul_(self._loaded[name].scale)
        return reply


class ReportsTheFile(ScalesAgain):
    """The same, and its digests are those of the file."""

    def checksums(self, name: str) -> Mapping[str, str]:
        return {each: raw.checksum(each) for each, raw in read_adapter(Path(self._loaded[name].path)).items()}


@pytest.mark.parametrize(
    ("fault", "update", "said"),
    [
        (BaseAnswers, 1, "log-probs of the probe differ"),
        (KeepsFormer, 2, "log-probs of the probe differ"),
        (ScalesAgain, 1, "tensors differ from the published weights"),
        (ReportsTheFile, 1, "log-probs of the probe differ"),
    ],
)
async def test_a_server_that_computes_another_adapter_is_caught_by_the_update(
    tmp_path: Path, fault: type[LoadedAdapters], update: int, said: str
) -> None:
    base = tiny_checkpoint(tmp_path / "model")
    folders = {version: make_adapter(base, tmp_path / f"v{version}", seed=version) for version in (1, 2)}
    engine = engine_of(base)
    engine.adapters.__class__ = fault
    async with pool_over(engine) as pool:
        for version in range(1, update):
            await pool.update_weights(published(folders[version], version), probe_of(base, folders[version]))
        with pytest.raises(WeightSyncError, match=said):
            await pool.update_weights(published(folders[update], update), probe_of(base, folders[update]))


async def test_a_file_that_changed_after_the_trainer_wrote_it_is_not_served(tmp_path: Path) -> None:
    base = tiny_checkpoint(tmp_path / "model")
    folder = make_adapter(base, tmp_path / "v1")
    publication = published(folder, 1)
    data = bytearray((folder / ADAPTER_WEIGHTS_FILE).read_bytes())
    data[-2] ^= 1
    (folder / ADAPTER_WEIGHTS_FILE).write_bytes(data)
    async with pool_over(engine_of(base)) as pool:
        with pytest.raises(WeightSyncError, match="1 of 28 tensors differ from the published weights"):
            await pool.update_weights(publication)
        assert pool.policy_version == 0


async def test_a_server_that_lost_its_adapter_is_taken_out_and_gets_it_again(tmp_path: Path) -> None:
    base = tiny_checkpoint(tmp_path / "model")
    folder = make_adapter(base, tmp_path / "v1")
    engine = engine_of(base)
    async with pool_over(engine) as pool:
        await pool.update_weights(published(folder, 1), probe_of(base, folder))
        [name] = engine.adapters.names
        await engine.adapters.unload(name)
        generation = await pool.generate(ask(PROMPT, 8))
    assert [span.version for span in generation.spans] == [1]
    assert_computed_by(base, folder, generation)


async def test_a_server_without_adapters_is_named_with_the_fix(tmp_path: Path) -> None:
    base = tiny_checkpoint(tmp_path / "model")
    folder = make_adapter(base, tmp_path / "v1")
    scripted = ScriptedServer(lambda _: [4], vocab_size=VOCAB)
    async with serve_scripted(scripted) as http, SGLangServer(http.url, vocab_size=VOCAB) as server:
        with pytest.raises(ConfigError, match=r"takes no LoRA adapters; .*--enable-lora.*sync\.adapter: merged"):
            await server.adapters.load(published(folder, 1))


class MergedTrainer:
    """Answers log-probs as a trainer with one adapter does."""

    def __init__(self, base: Path, adapter: Path) -> None:
        self._base, self._adapter = base, adapter

    async def logprobs(self, sequences: Sequence[Int32Array], temperatures: Sequence[float]) -> list[Float32Array]:
        assert set(temperatures) == {1.0}
        return [merged_logprobs(self._base, self._adapter, ids) for ids in sequences]


async def test_a_server_that_forgets_the_adapter_after_the_update_fails_the_next_spot_check(tmp_path: Path) -> None:
    base = tiny_checkpoint(tmp_path / "model")
    folder = make_adapter(base, tmp_path / "v1")
    engine, calls = engine_of(base), FinishedCalls()
    async with pool_over(engine) as pool:
        parts = SimpleNamespace(
            trainer=MergedTrainer(base, folder),
            inference=pool,
            engine=EngineConfig(),
            algorithm=AlgorithmConfig(),
            compute_type="float32",
        )
        check = SpotCheck(cast("EngineParts", parts), calls)
        await pool.update_weights(published(folder, 1), probe_of(base, folder))
        request = ask(PROMPT, 12)
        calls.add(request, await pool.generate(request), 0)
        right = await check.run(1)
        engine.adapters.__class__ = BaseAnswers
        request = ask(PROMPT, 12)
        calls.add(request, await pool.generate(request), 1)
        wrong = await check.run(1)
        [url] = pool.serving
    assert right.wrong == {}
    assert "log-probs of 24 tokens that it sampled with version 1 differ" in wrong.wrong[url]
