"""Weight updates over real sockets, at a server that closes a kept connection just as the next call arrives."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from agentrl.errors import WeightSyncError
from agentrl.inference.backend import Probe, UpdateReport
from agentrl.inference.pool.members import State
from agentrl.inference.pool.pool import ServerPool
from agentrl.inference.sglang.server import SGLangServer
from agentrl.servers.scripted.server import ScriptedServer, scripted_logprobs
from agentrl.servers.scripted.socket_server import serve_scripted
from agentrl.weights.disk import publish
from agentrl.weights.tensors import RawTensor
from tests.support.scripted import VOCAB, pool_of
from tests.support.tap import Tap, tapped

IDS = np.array([1, 5, 9, 2], np.int32)
PATHS = ["/pause_generation", "/update_weights_from_disk", "/weights_checker", "/continue_generation", "/generate"]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def pool_behind_tap(**changes: object) -> AsyncGenerator[tuple[ServerPool, Tap]]:
    """Yield a pool of one server, which others run, and the proxy that closes its connections."""
    scripted = ScriptedServer(lambda _: [4], vocab_size=VOCAB)
    async with (
        serve_scripted(scripted) as http,
        tapped(http.url) as tap,
        SGLangServer(tap.url, vocab_size=VOCAB) as server,
        pool_of(server, **changes) as pool,
    ):
        yield pool, tap


async def update(pool: ServerPool, folder: Path) -> UpdateReport:
    probe = Probe(token_ids=IDS, logprobs=scripted_logprobs(IDS, version=1))
    weights = publish({"w": RawTensor.of(np.ones(1, np.float32))}, version=1, directory=folder, source=None)
    return await pool.update_weights(weights, probe)


@pytest.mark.parametrize("policy", ["stop", "evict"])
@pytest.mark.parametrize("path", PATHS)
async def test_a_call_of_an_update_whose_connection_was_closed_is_made_again(path: str, policy: str, tmp_path: Path) -> None:
    async with pool_behind_tap(on_server_failure=policy) as (pool, tap):
        tap.to_close = [path]
        report = await update(pool, tmp_path)
        assert (report.evicted, report.probe_difference) == ((), 0.0)
        assert [server.state for server in pool.describe().servers] == [State.SERVING]
    assert tap.to_close == []
    assert tap.paths.count(path) == 2


async def test_a_call_of_an_update_is_made_as_often_as_a_model_call_and_then_fails(tmp_path: Path) -> None:
    async with pool_behind_tap(on_server_failure="stop", request_retries=1) as (pool, tap):
        tap.to_close = ["/generate"] * 2
        with pytest.raises(
            WeightSyncError, match=r"call failed 2 times: .*closed the connection.*; .*closed the connection"
        ):
            await update(pool, tmp_path)
    assert tap.paths.count("/generate") == 2
