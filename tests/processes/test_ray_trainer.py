"""A trainer of two ranks on the nodes of a Ray cluster."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from agentrl.algo.config import AlgorithmConfig
from agentrl.errors import TrainerDied
from agentrl.processes.config import ClusterConfig
from agentrl.processes.ray import open_ray
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.worker.client import RemoteTrainer, launch_trainer
from agentrl_workflows.demo.ray_nodes import LocalRayCluster
from tests.support.processes import until_ended
from tests.trainer.helpers import random_batch

pytestmark = [pytest.mark.ray, pytest.mark.parametrize("anyio_backend", ["asyncio"])]


async def step_on(trainer: RemoteTrainer) -> None:
    """Train until the trainer dies: Ray ends what runs on a lost node a moment later."""
    while True:
        await trainer.step(random_batch(version=1, samples=7))


@pytest.mark.starts
async def test_two_ranks_train_until_a_node_is_lost(cluster: LocalRayCluster, checkpoint: Path, tmp_path: Path):
    config = TrainerConfig.model_validate({"lr": 1e-3, "device": "auto", "parallel": {"dp": 2}})
    ray = ClusterConfig(launcher="ray", address=cluster.address, start_timeout_s=60)
    log = tmp_path / "trainer.log"
    try:
        async with (
            open_ray(ray) as launcher,
            launch_trainer(
                config,
                AlgorithmConfig(),
                model_path=checkpoint,
                total_steps=10,
                seed=5,
                log_path=log,
                cluster=ray,
                launcher=launcher,
            ) as trainer,
        ):
            assert (await trainer.step(random_batch(version=1, samples=7))).skipped is None
            node = cluster.node_of(log) or cluster.node_of(tmp_path / "trainer-1.log")
            assert node is not None
            cluster.kill_node(node)
            lost = rf"rank \d \([^\n]*on node \S+ \({node[:8]}\)\): (its connection closed|signal SIGKILL|node)"
            with anyio.fail_after(300), pytest.raises(TrainerDied, match=lost):
                await step_on(trainer)
            for pid in trainer.pids:
                await until_ended(pid)
    finally:
        cluster.add_node()
