"""The whole chain: real embedded server processes, launched, updated, killed, brought back, and ended."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import anyio
import pytest

from agentrl.errors import ServerUnavailable
from agentrl.inference.config import InferenceConfig
from agentrl.inference.launch.pool import launch_pool
from agentrl.inference.sglang.server import SGLangServer
from agentrl.servers.scripted.engine import digests
from agentrl.types import StopReason
from agentrl.weights.tensors import model_checksum
from agentrl.weights.types import Publication
from tests.support.scripted import all_serving, request, seen
from tests.support.tiny import build_model

pytestmark = pytest.mark.starts


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def settings(**changes: object) -> InferenceConfig:
    given = {
        "health_interval_s": 60.0,  # a busy machine keeps it; the launcher reports the end of a process at once
        "max_running_requests": 8,
        "max_context_tokens": 256,
        "device": "cpu",
        **changes,
    }
    return InferenceConfig.model_validate(given)


def vocabulary(checkpoint: Path) -> int:
    return int(json.loads((checkpoint / "config.json").read_text())["vocab_size"])


def published(folder: Path, checkpoint: Path, version: int) -> Publication:
    config = json.loads((checkpoint / "config.json").read_text())
    build_model(folder, vocab_size=config["vocab_size"], eos_id=config["eos_token_id"], seed=version)
    tensors = dict(digests(str(folder)))
    return Publication(version=version, path=str(folder), checksum=model_checksum(tensors), tensor_checksums=tensors)


@pytest.mark.usefixtures("starts_truly")
async def test_servers_are_launched_updated_killed_restarted_and_ended(checkpoint: Path, tmp_path: Path) -> None:
    pids: list[int] = []
    others = set(_children())  # servers that other tests share
    config = settings(servers=2)
    async with launch_pool(config, model_path=checkpoint, vocab_size=vocabulary(checkpoint), log_dir=tmp_path) as pool:
        assert len(pool.describe().servers) == 2
        first = await pool.generate(request(1, 2, 3, max_new_tokens=8))
        assert 1 <= len(first.output_ids) <= 8
        assert first.spans[0].version == 0

        report = await pool.update_weights(published(tmp_path / "v1", checkpoint, 1))
        assert len(report.updated) == 2
        second = await pool.generate(request(1, 2, 3, max_new_tokens=8))
        assert [span.version for span in second.spans] == [1]

        url = pool.describe().servers[0].url
        [pid] = [process for process in _children() if url.rsplit(":", 1)[1] in _command(process)]
        os.kill(pid, signal.SIGKILL)
        await seen(pool, lambda status: "signal SIGKILL" in status.servers[0].reason or bool(status.servers[0].version == 0))
        for episode in range(4):
            assert (await pool.generate(request(1, 2, episode=str(episode), max_new_tokens=2))).spans[0].version == 1
        with anyio.fail_after(240):
            while len([s for s in pool.describe().servers if s.state == "serving"]) < 2:  # noqa: ASYNC110 - a process starts
                await anyio.sleep(0.05)
        await all_serving(pool)
        assert [server.version for server in pool.describe().servers] == [1, 1]
        pids = [process for process in _children() if process not in others]
    assert len(pids) == 2
    assert not [pid for pid in pids if "agentrl.servers.serve" in _command(pid)]


async def test_a_request_may_fill_the_context_that_was_promised_and_a_cancelled_one_frees_the_server(
    checkpoint: Path, tmp_path: Path
) -> None:
    size, config = vocabulary(checkpoint), settings(max_context_tokens=64)
    async with launch_pool(config, model_path=checkpoint, vocab_size=size, log_dir=tmp_path) as pool:
        for prompt, room in ((63, 1), (32, 32)):
            done = await pool.generate(request(*([7] * prompt), max_new_tokens=room))
            assert len(done.output_ids) == room or done.stop_reason is StopReason.STOP
        async with pool.stream(request(1, 2, max_new_tokens=60)) as stream:
            await anext(stream)
        async with SGLangServer(pool.describe().servers[0].url, vocab_size=size) as server:
            assert [load.num_running_reqs + load.num_waiting_reqs for load in await server.loads()] == [0]


async def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(ServerUnavailable, match=r"(?s)server-0 .*ended with exit code 2; .*nothing-here"):
        async with launch_pool(settings(), model_path=tmp_path / "nothing-here", vocab_size=9, log_dir=tmp_path):
            pass


async def test_cancelling_a_run_ends_its_servers(checkpoint: Path, tmp_path: Path) -> None:
    pids: list[int] = []
    others = set(_children())  # servers that other tests share
    with anyio.CancelScope() as scope:
        async with launch_pool(settings(), model_path=checkpoint, vocab_size=vocabulary(checkpoint), log_dir=tmp_path):
            pids = [process for process in _children() if process not in others]
            scope.cancel()
            await anyio.sleep_forever()
    assert len(pids) == 1
    assert not [pid for pid in pids if "agentrl.servers.serve" in _command(pid)]


def _children() -> list[int]:
    return [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and _parent(int(entry.name)) == os.getpid()
    ]


def _parent(pid: int) -> int:
    try:
        found = re.search(r"PPid:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return -1
    return int(found[1]) if found else -1


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""
