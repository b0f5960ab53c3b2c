"""Workers that join the driver over TCP, started by a launcher: that of this machine, and that of Ray."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from agentrl.processes.base import LocalLauncher
from agentrl.processes.config import ClusterConfig
from agentrl.rollout.remote.runner import StartWorker, launched_worker, ray_nodes
from agentrl.tokens.renderer import Renderer
from agentrl.types import StopReason, Task, Turn
from agentrl_workflows.demo.ray_nodes import LocalRayCluster
from tests.rollout.harness import PATIENCE_S, SAMPLING, make_server, says
from tests.support.remote import remote_runner


def ignore(turn: Turn) -> None:
    """Take a turn."""


@asynccontextmanager
async def launched_here() -> AsyncGenerator[StartWorker]:
    yield partial(launched_worker, LocalLauncher(), ClusterConfig(start_timeout_s=PATIENCE_S))


@pytest.mark.starts
@pytest.mark.long
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_launched_worker_plays_dies_and_is_launched_again(model: Path, renderer: Renderer, tmp_path: Path) -> None:
    runner = remote_runner("Acts", model, tmp_path, workers=1, nodes=launched_here)
    async with runner.opened(make_server(renderer, says("good"))):
        play = partial(runner.play, episode_id="0.0.0", sampling=SAMPLING, on_turn=ignore)
        dead = await play(Task(id="t", data={"act": "die"}))
        assert dead.failure is not None
        assert dead.stop_reason is StopReason.ENVIRONMENT_FAULT
        assert "signal SIGKILL" in dead.failure.message
        alive = await play(Task(id="t", data={"act": "none"}))
        assert alive.failure is None
        pid = int(alive.final_reward or 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.starts
@pytest.mark.long
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_launched_worker_ends_by_its_own_limit_and_not_before(
    model: Path, renderer: Renderer, tmp_path: Path
) -> None:
    @asynccontextmanager
    async def patient() -> AsyncGenerator[StartWorker]:
        config = ClusterConfig(start_timeout_s=PATIENCE_S)
        yield partial(launched_worker, LocalLauncher(), config, leave_s=PATIENCE_S)

    runner = remote_runner("LeavesSlowly", model, tmp_path, workers=1, nodes=patient, directory=tmp_path)
    async with runner.opened(make_server(renderer, says("good"))):
        assert not (tmp_path / "closed").exists()
    assert (tmp_path / "closed").exists()


@pytest.mark.ray
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_workers_on_the_nodes_of_a_ray_cluster_play(
    cluster: LocalRayCluster, model: Path, renderer: Renderer, tmp_path: Path
) -> None:
    config = ClusterConfig(launcher="ray", address=cluster.address, start_timeout_s=60)
    runner = remote_runner("Acts", model, tmp_path, workers=2, nodes=partial(ray_nodes, config))
    async with runner.opened(make_server(renderer, says("good"))):
        for number in range(4):
            task = Task(id="t", data={"act": "none"})
            trajectory = await runner.play(task, episode_id=f"{number}.0.0", sampling=SAMPLING, on_turn=ignore)
            assert trajectory.failure is None
            assert trajectory.ended_s is not None
