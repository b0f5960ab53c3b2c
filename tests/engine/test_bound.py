"""The staleness bound in whole runs whose episodes take very different times."""

from __future__ import annotations

import random
from pathlib import Path

import anyio
import pytest

from agentrl.client import Client
from agentrl.engine.staleness import StalenessPolicy
from agentrl.tokens.renderer import Renderer
from agentrl.trainer.scripted import ScriptedTrainer
from agentrl.types import Task
from tests.engine.harness import balance, make_engine, run
from tests.rollout.harness import ask, workflow_of


async def uneven(task: Task, client: Client) -> float:
    """Two turns, between which the environment takes a log-normal time: median 1 ms, one in fifty over 60 ms."""
    await ask(client, "first")
    await anyio.sleep(min(0.2, random.Random(client.episode.id).lognormvariate(-6.9, 2.0)))
    return float(await ask(client, "second") == "good")


@pytest.mark.parametrize("bound", [0, 1, 3])
@pytest.mark.parametrize("policy", ["wait", "mask", "drop"])
async def test_no_trained_token_is_over_the_bound_whatever_the_episodes_take(
    tmp_path: Path, renderer: Renderer, policy: StalenessPolicy, bound: int
) -> None:
    trainer = ScriptedTrainer()
    engine = make_engine(
        tmp_path,
        renderer,
        workflow=workflow_of(uneven),
        trainer=trainer,
        steps=15,
        algorithm={"max_staleness": bound, "staleness_policy": policy, "group_size": 2},
        rollout={"max_concurrent_episodes": 16},
        engine={"save_trajectories": False, "checkpoint_every": 0},
    )
    report = await run(engine)
    trained = [
        batch.policy_version - item.sample.token_versions[item.sample.loss_mask].min()
        for batch in trainer.batches
        for item in batch.samples
    ]
    assert report.train_steps == 15
    assert max(trained) == report.max_trained_staleness <= bound
    assert balance(report) == 0
    if policy == "wait":
        assert report.dropped_groups == {}
        assert "over_age" not in report.wasted_tokens
    if policy == "drop":
        assert set(report.dropped_groups) <= {"over_age"}
