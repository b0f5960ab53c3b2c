"""A running call keeps its adapter as long as the staleness bound allows, and then continues with the newest."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import numpy as np
import pytest

from agentrl.inference.backend import Generation, SamplingParams
from agentrl.inference.config import InferenceConfig
from agentrl.inference.pool.pool import ServerPool
from agentrl.inference.sglang.server import SGLangServer
from agentrl.servers.embedded.engine import EmbeddedEngine, EngineOptions
from agentrl.servers.serve import serving
from tests.support.adapters import make_adapter, merged_logprobs, published_adapter
from tests.support.calls import Call, ask
from tests.support.tiny import tiny_checkpoint

PROMPT = list(range(3, 30))
VOCAB = 357


@pytest.fixture
def anyio_backend() -> str:
    """aiohttp needs asyncio."""
    return "asyncio"


pytestmark = pytest.mark.anyio


@asynccontextmanager
async def pool_over(engine: EmbeddedEngine, *, max_lag: int | None) -> AsyncGenerator[ServerPool]:
    async with serving(engine) as url:
        config = InferenceConfig.model_validate({"urls": [url], "health_interval_s": 60})
        async with ServerPool([SGLangServer(url, vocab_size=VOCAB, max_adapter_lag=max_lag)], config) as pool:
            yield pool


def assert_each_span_is_a_recompute(base: Path, folders: dict[int, Path], generation: Generation) -> None:
    ids = np.array([*PROMPT, *generation.output_ids], np.int32)
    for span in generation.spans:
        expected = merged_logprobs(base, folders[span.version], ids)[len(PROMPT) - 1 :][span.start : span.end]
        np.testing.assert_allclose(generation.output_logprobs[span.start : span.end], expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize(("max_lag", "versions"), [(0, [1, 2, 3, 4]), (1, [1, 3]), (2, [1, 4]), (3, [1]), (None, [1])])
async def test_a_call_continues_with_the_newest_adapter_once_its_own_is_too_old(
    tmp_path: Path, max_lag: int | None, versions: list[int]
) -> None:
    base = tiny_checkpoint(tmp_path / "model")
    folders = {version: make_adapter(base, tmp_path / f"v{version}", seed=version) for version in range(1, 5)}
    engine = EmbeddedEngine(EngineOptions(model_path=str(base), device="cpu", turn_s=0))
    async with pool_over(engine, max_lag=max_lag) as pool, anyio.create_task_group() as tasks:
        await pool.update_weights(published_adapter(folders[1], 1))
        call = Call(pool, ask(PROMPT, 900))
        tasks.start_soon(call.run)
        for version in range(2, 5):
            await call.more(5)
            await pool.update_weights(published_adapter(folders[version], version))
            if max_lag is not None:
                assert len(engine.adapters.names) <= max_lag + 2
        await call.more(5)
        ended = await call.finished()
        assert [span.version for span in ended.spans] == versions
        assert ended.num_retractions == len(versions) - 1
        assert len(ended.output_ids) == 900
        assert_each_span_is_a_recompute(base, folders, ended)


async def test_a_call_whose_rest_cannot_be_asked_for_ends_with_its_adapter(tmp_path: Path) -> None:
    base = tiny_checkpoint(tmp_path / "model")
    folders = {version: make_adapter(base, tmp_path / f"v{version}", seed=version) for version in (1, 2)}
    engine = EmbeddedEngine(EngineOptions(model_path=str(base), device="cpu", turn_s=0))
    sampling = SamplingParams(max_new_tokens=400, ignore_eos=True, frequency_penalty=0.1)
    async with pool_over(engine, max_lag=0) as pool, anyio.create_task_group() as tasks:
        await pool.update_weights(published_adapter(folders[1], 1))
        call = Call(pool, ask(PROMPT, 400, sampling=sampling))
        tasks.start_soon(call.run)
        await call.more(5)
        await pool.update_weights(published_adapter(folders[2], 2))
        ended = await call.finished()
        assert [span.version for span in ended.spans] == [1]
        assert ended.num_retractions == 0
