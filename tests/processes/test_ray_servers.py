"""Inference servers on the nodes of a Ray cluster."""

from __future__ import annotations

import json
from pathlib import Path

import anyio
import pytest

from agentrl.inference.config import InferenceConfig
from agentrl.inference.launch.pool import launch_pool
from agentrl.processes.config import ClusterConfig
from agentrl.processes.ray import open_ray
from agentrl_workflows.demo.ray_nodes import LocalRayCluster
from tests.support.scripted import request

pytestmark = [pytest.mark.ray, pytest.mark.parametrize("anyio_backend", ["asyncio"])]


@pytest.mark.starts
async def test_a_server_whose_node_is_gone_serves_again_from_another(
    cluster: LocalRayCluster, checkpoint: Path, tmp_path: Path
):
    config = InferenceConfig(servers=2, device="cpu", max_context_tokens=64, health_interval_s=1)
    vocab_size = int(json.loads((checkpoint / "config.json").read_text())["vocab_size"])
    ray = ClusterConfig(launcher="ray", address=cluster.address, start_timeout_s=60)
    async with (
        open_ray(ray) as launcher,
        launch_pool(config, model_path=checkpoint, vocab_size=vocab_size, log_dir=tmp_path, launcher=launcher) as pool,
    ):
        assert len((await pool.generate(request(1, 2, 3, max_new_tokens=4))).output_ids)
        logs = [tmp_path / f"server-{index}.log" for index in range(2)]
        [(lost, node), *_] = [(log, node) for log in logs if (node := cluster.node_of(log)) is not None]
        before = pool.describe().servers[logs.index(lost)].url
        cluster.kill_node(node)
        with anyio.fail_after(90):
            while len({*pool.serving} - {before}) < 2:  # noqa: ASYNC110 - a process starts
                await anyio.sleep(0.1)
        for episode in range(4):
            assert len((await pool.generate(request(1, 2, episode=str(episode), max_new_tokens=2))).output_ids)
    cluster.add_node()
