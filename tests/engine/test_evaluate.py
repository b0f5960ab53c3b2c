"""Evaluation by itself."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from agentrl.client import Client
from agentrl.engine.evaluate import EvalReport, evaluate_policy
from agentrl.errors import ConfigError
from agentrl.observe.progress import NoProgress, Snapshot
from agentrl.rollout.config import RolloutConfig
from agentrl.servers.scripted.server import ScriptedCall
from agentrl.tokens.renderer import Renderer
from agentrl.types import Task, Trajectory
from agentrl.workflow import RolloutWorkflow
from tests.engine.harness import TASKS, lines, make_engine, run
from tests.rollout.harness import PATIENCE_S, SAMPLING, Judge, ask, make_server, says, workflow_of


async def evaluated(renderer: Renderer, workflow: RolloutWorkflow | None = None, **options: object) -> EvalReport:
    with anyio.fail_after(PATIENCE_S):
        return await evaluate_policy(
            workflow or Judge(),
            TASKS,
            backend=make_server(renderer, says("good"), version=5),
            renderer=renderer,
            rollout=RolloutConfig(max_concurrent_episodes=3),
            sampling=SAMPLING,
            **options,  # pyright: ignore[reportArgumentType] - the test's values
        )


async def test_each_task_is_run_once_and_reported_in_order(renderer: Renderer) -> None:
    seen: list[Trajectory] = []
    report = await evaluated(renderer, on_episode=seen.append)
    assert [episode.task_id for episode in report.episodes] == [task.id for task in TASKS]
    assert (report.success_rate, report.failed, report.versions) == (1.0, 0, (5, 5))
    assert len(seen) == len(TASKS)


async def test_more_episodes_than_tasks_take_the_tasks_again(renderer: Renderer) -> None:
    report = await evaluated(renderer, episodes=10)
    assert [episode.task_id for episode in report.episodes][-2:] == ["t0", "t1"]


async def test_greedy_evaluation_samples_at_temperature_zero(renderer: Renderer) -> None:
    report = await evaluated(renderer, greedy=True)
    assert {turn.temperature for episode in report.episodes for turn in episode.turns} == {0.0}
    assert report.metrics()["greedy"] is True


async def test_rates_and_returns_are_over_the_episodes_that_did_not_fail(renderer: Renderer) -> None:
    async def judge(task: Task, client: Client) -> float:
        await ask(client, "hello")
        if task.id in ("t0", "t1"):
            raise LookupError
        return 1.0

    report = await evaluated(renderer, workflow_of(judge))
    assert (report.failed, report.success_rate) == (2, 1.0)
    metrics = report.metrics()
    assert (metrics["success_rate"], metrics["return_mean"], metrics["episodes"]) == (1.0, 1.0, 8)
    assert (metrics["failed"], metrics["failed_episodes.workflow_error"]) == (2, 2)
    assert report.failures == {"workflow_error": 2}
    assert report.first_failed is not None
    assert report.first_failed.task_id == "t0"


async def test_an_evaluation_in_which_all_fail_has_no_rate(renderer: Renderer) -> None:
    async def judge(task: Task, client: Client) -> float:
        raise LookupError

    report = await evaluated(renderer, workflow_of(judge))
    assert (report.failed, report.success_rate) == (8, None)
    assert not {"success_rate", "return_mean", "return_std"} & set(report.metrics())


async def test_a_run_records_and_shows_that_its_evaluation_failed(tmp_path: Path, renderer: Renderer) -> None:
    async def judge(task: Task, client: Client) -> float:
        answer = await ask(client, task["question"])
        if client.episode.id.startswith("eval."):
            raise LookupError
        return float(answer == "good")

    class Shown(NoProgress):
        last: str | None = None

        async def show(self, snapshot: Callable[[], Snapshot]) -> None:
            try:
                await anyio.sleep_forever()
            finally:
                self.last = snapshot().last_evaluation

    shown = Shown()
    options = {"eval_every": 2, "eval_episodes": 5}
    engine = make_engine(
        tmp_path, renderer, workflow=workflow_of(judge), steps=2, eval_tasks=TASKS, engine=options, progress=shown
    )
    await run(engine)
    [event] = lines(tmp_path / "metrics.jsonl", "evaluation")
    assert (event["episodes"], event["failed"], event["failed_episodes.workflow_error"]) == (5, 5, 5)
    assert "success_rate" not in event
    assert shown.last is not None
    assert re.fullmatch(r"evaluation after step 2: no result, 5 of 5 episodes failed, \d+ s", shown.last)


@pytest.mark.parametrize("episodes", [0, -3])
async def test_fewer_than_one_episode_is_refused(renderer: Renderer, episodes: int) -> None:
    with pytest.raises(ConfigError, match=f"episodes: expected at least 1, got {episodes}"):
        await evaluated(renderer, episodes=episodes)


async def test_an_evaluation_without_tasks_is_refused(renderer: Renderer) -> None:
    def script(call: ScriptedCall) -> str:
        return "good"

    with pytest.raises(ConfigError, match="no tasks"):
        await evaluate_policy(
            Judge(),
            [],
            backend=make_server(renderer, script),
            renderer=renderer,
            rollout=RolloutConfig(),
            sampling=SAMPLING,
        )


async def test_a_cancelled_evaluation_ends_its_episodes(renderer: Renderer) -> None:
    begun, ended, reports = list[str](), list[str](), list[EvalReport]()

    async def wait(task: Task, client: Client) -> float:
        begun.append(task.id)
        try:
            await anyio.sleep_forever()
        finally:
            ended.append(task.id)
        return 1.0

    async def evaluate() -> None:
        reports.append(await evaluated(renderer, workflow_of(wait)))

    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(evaluate)
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
    assert reports == []
    assert len(begun) == 3
    assert sorted(ended) == sorted(begun)
