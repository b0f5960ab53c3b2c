"""A workflow scores the episodes of a group together: rewards, retries, records, and failures that are no rewards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import anyio
import numpy as np
import pytest

from agentrl.client import Client
from agentrl.commands.open_run import open_run
from agentrl.engine.evaluate import evaluate_policy
from agentrl.env import environment_boundary
from agentrl.errors import EnvironmentFault, InvariantError
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.group import DroppedGroup, run_group, score_episodes
from agentrl.tokens.renderer import Renderer
from agentrl.trainer.scripted import ScriptedTrainer
from agentrl.types import EpisodeFailure, Group, MemberAdvantages, StopReason, Task, Trajectory
from agentrl.workflow import GroupWorkflow
from agentrl_rewards.pass_at_k import pass_at_k
from tests.engine.harness import TASKS, balance, coin, episodes, lines, make_engine, run
from tests.rollout.harness import PATIENCE_S, SAMPLING, TASK, ask, make_renderer, make_server


class Ranked(GroupWorkflow):
    """Pays each episode of a group by its place; `faults` is what its judge does in each call, None for nothing."""

    def __init__(self, *faults: Callable[[], object] | None) -> None:
        self.faults = list(faults)
        self.calls: list[list[str]] = []

    async def run(self, task: Task, client: Client) -> float:
        return float(await ask(client, task["question"]) == task["answer"])

    async def score_group(self, task: Task, episodes: Sequence[Trajectory]) -> Sequence[float] | MemberAdvantages:
        self.calls.append([episode.episode_id for episode in episodes])
        fault = self.faults.pop(0) if self.faults else None
        if fault is not None and (found := fault()) is not None:
            return found  # pyright: ignore[reportReturnType] - wrong results are what is tested
        return [place / 10 + (episode.final_reward or 0.0) for place, episode in enumerate(episodes)]


def judge_is_gone() -> None:
    raise EnvironmentFault("judge: HTTP 503")


def caught_fault() -> None:
    try:
        with environment_boundary("judge"):
            raise ConnectionError("HTTP 503")
    except EnvironmentFault:
        pass


def ended(episode_id: str, *, failed: bool = False) -> Trajectory:
    failure = EpisodeFailure(kind="ValueError", message="failed", traceback="") if failed else None
    reason = StopReason.WORKFLOW_ERROR if failed else StopReason.COMPLETED
    return Trajectory(
        episode_id=episode_id,
        task_id="t0",
        turns=(),
        stop_reason=reason,
        final_reward=None if failed else 1.0,
        failure=failure,
        metrics={"own": 2.0},
    )


async def group_of(
    workflow: Ranked, seen: list[Trajectory], *, failing: Sequence[int] = (), **rollout: object
) -> Group | DroppedGroup:
    settings = RolloutConfig.model_validate({"episode_retries": 1, **rollout})

    async def play(task: Task, *, episode_id: str) -> Trajectory:
        await anyio.lowlevel.checkpoint()
        return ended(episode_id, failed=int(episode_id.split(".")[1]) in failing)

    async def score(task: Task, episodes: tuple[Trajectory, ...]) -> tuple[Trajectory, ...]:
        assert [episode.failure for episode in seen if episode.failure is None] == []  # reported after the scoring
        return await score_episodes(workflow, task, episodes, rollout=settings)

    with anyio.fail_after(PATIENCE_S):
        return await run_group(
            TASK,
            index=7,
            group_size=3,
            admitted_version=0,
            run=play,
            rollout=settings,
            slots=anyio.Semaphore(3),
            score=score,
            on_episode=seen.append,
        )


async def test_the_members_get_their_scores_as_final_rewards_and_are_reported_with_them() -> None:
    workflow, seen = Ranked(), list[Trajectory]()
    group = await group_of(workflow, seen)
    assert isinstance(group, Group)
    assert [episode.final_reward for episode in group.episodes] == [1.0, 1.1, 1.2]
    assert list(group.episodes) == seen
    assert workflow.calls == [["7.0.0", "7.1.0", "7.2.0"]]
    assert all(episode.metrics == {"own": 2.0} for episode in seen)


async def test_members_get_given_advantages_and_keep_the_rewards_of_run() -> None:
    seen: list[Trajectory] = []
    group = await group_of(Ranked(lambda: MemberAdvantages([0.5, -0.25, True])), seen)
    assert isinstance(group, Group)
    assert [episode.advantage for episode in group.episodes] == [0.5, -0.25, 1.0]
    assert [episode.final_reward for episode in group.episodes] == [1.0] * 3
    assert list(group.episodes) == seen
    scored = await group_of(Ranked(), [])
    assert isinstance(scored, Group)
    assert [episode.advantage for episode in scored.episodes] == [None] * 3


@pytest.mark.parametrize(
    ("verdict", "kept"),
    [(None, {"format": 0.5}), (lambda: MemberAdvantages([0.5]), {"right": 1.0, "format": 0.5})],
)
async def test_a_score_drops_the_parts_of_the_final_reward_that_it_replaces(
    verdict: Callable[[], object] | None, kept: dict[str, float]
) -> None:
    parts = {"right": 1.0, "format": 0.5}
    played = replace(ended("e"), reward_parts=parts, turn_reward_parts={"format": 0.5})
    [scored] = await score_episodes(Ranked(verdict), TASK, [played], rollout=RolloutConfig())
    assert scored.reward_parts == kept


async def test_failed_members_are_not_scored() -> None:
    workflow, seen = Ranked(), list[Trajectory]()
    group = await group_of(workflow, seen, failing=[1], incomplete_group="keep")
    assert isinstance(group, Group)
    assert workflow.calls == [["7.0.0", "7.2.0"]]
    assert [episode.final_reward for episode in group.episodes] == [1.0, 1.1]
    assert sorted(episode.episode_id for episode in seen) == ["7.0.0", "7.1.0", "7.1.1", "7.2.0"]


async def test_a_group_that_is_dropped_is_not_scored_and_its_members_are_reported() -> None:
    workflow, seen = Ranked(), list[Trajectory]()
    dropped = await group_of(workflow, seen, failing=[1], episode_retries=3)
    assert isinstance(dropped, DroppedGroup)
    assert workflow.calls == []
    assert {"7.0.0", "7.2.0"} <= {episode.episode_id for episode in seen}


async def test_a_scoring_that_fails_once_is_repeated_and_counted() -> None:
    workflow, seen = Ranked(judge_is_gone), list[Trajectory]()
    group = await group_of(workflow, seen)
    assert isinstance(group, Group)
    assert [episode.final_reward for episode in group.episodes] == [1.0, 1.1, 1.2]
    assert all(episode.metrics == {"own": 2.0, "score_retries": 1.0} for episode in seen)


@pytest.mark.parametrize(
    ("fault", "reason", "message"),
    [
        (judge_is_gone, "environment_fault", "HTTP 503"),
        (caught_fault, "environment_fault", "HTTP 503"),
        (lambda: 1 / 0, "workflow_error", "score_group, task t0, 3 episodes raised ZeroDivisionError"),
        (lambda: [1.0], "workflow_error", "expected a list of 3 scores"),
        (lambda: "abc", "workflow_error", "expected a list of 3 scores"),
        (lambda: [1.0, 0.0, float("nan")], "workflow_error", "a reward must be a finite number, got float nan"),
        (lambda: [1.0, 0.0, "1"], "workflow_error", "a reward must be a finite number, got str '1'"),
        (lambda: MemberAdvantages([1.0]), "workflow_error", "expected a list of 3 scores"),
        (
            lambda: MemberAdvantages([1.0, 0.0, float("inf")]),
            "workflow_error",
            "a reward must be a finite number, got float inf",
        ),
        (lambda: MemberAdvantages([1.0, 0.0, 1e31]), "workflow_error", "a reward must be a finite number"),
    ],
)
async def test_a_scoring_that_fails_for_good_fails_every_member_and_drops_the_group(
    fault: Callable[[], object], reason: str, message: str
) -> None:
    seen: list[Trajectory] = []
    dropped = await group_of(Ranked(fault, fault), seen)
    assert isinstance(dropped, DroppedGroup)
    assert dropped.reason == f"episode_failed:{reason}"
    assert [episode.episode_id for episode in seen] == ["7.0.0", "7.1.0", "7.2.0"]
    assert all(episode.final_reward is None and str(episode.stop_reason) == reason for episode in seen)
    assert all(message in failure.message for failure in dropped.failures)
    assert len(dropped.failures) == 3


async def test_a_scoring_that_hangs_runs_into_the_deadline() -> None:
    class Hangs(Ranked):
        async def score_group(self, task: Task, episodes: Sequence[Trajectory]) -> Sequence[float]:
            await anyio.sleep_forever()
            raise AssertionError

    dropped = await group_of(Hangs(), [], episode_timeout_s=0.05, episode_retries=0)
    assert isinstance(dropped, DroppedGroup)
    assert dropped.reason == "episode_failed:deadline"


async def test_an_error_inside_a_task_group_of_the_workflow_is_the_judge_s() -> None:
    class Nested(Ranked):
        async def score_group(self, task: Task, episodes: Sequence[Trajectory]) -> Sequence[float]:
            async def ask_judge() -> None:
                judge_is_gone()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask_judge)
            raise AssertionError

    dropped = await group_of(Nested(), [])
    assert isinstance(dropped, DroppedGroup)
    assert dropped.reason == "episode_failed:environment_fault"


async def test_a_broken_invariant_in_the_scoring_ends_the_run() -> None:
    def broken() -> None:
        raise InvariantError("digest mismatch")

    with pytest.raises(InvariantError, match="digest mismatch"):
        await group_of(Ranked(broken), [])


async def test_cancelling_a_scoring_reports_the_members_as_they_are() -> None:
    begun, seen = anyio.Event(), list[Trajectory]()

    class Hangs(Ranked):
        async def score_group(self, task: Task, episodes: Sequence[Trajectory]) -> Sequence[float]:
            begun.set()
            await anyio.sleep_forever()
            raise AssertionError

    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(group_of, Hangs(), seen)
            await begun.wait()
            tasks.cancel_scope.cancel()
    assert [(episode.episode_id, episode.final_reward) for episode in seen] == [(f"7.{n}.0", 1.0) for n in range(3)]


@pytest.fixture
def renderer(tmp_path: Path) -> Renderer:
    return make_renderer(tmp_path)


async def test_a_run_trains_on_the_scores_and_records_them(renderer: Renderer, tmp_path: Path) -> None:
    workflow, trainer = Ranked(judge_is_gone), ScriptedTrainer()
    report = await run(make_engine(tmp_path, renderer, workflow=workflow, trainer=trainer))
    assert (report.train_steps, report.groups, balance(report)) == (4, 8, 0)
    recorded = episodes(tmp_path)
    assert {round(record["final_reward"] % 1, 1) for record in recorded} == {0.0, 0.1, 0.2}
    assert len({record["episode_id"] for record in recorded}) == len(recorded) == report.episodes
    assert sum("score_retries" in record["metrics"] for record in recorded) == 3


async def test_a_run_trains_given_advantages_and_records_them(renderer: Renderer, tmp_path: Path) -> None:
    class Marginal(Ranked):
        async def score_group(self, task: Task, episodes: Sequence[Trajectory]) -> MemberAdvantages:
            return pass_at_k([place / 4 for place, _ in enumerate(episodes)])

    trainer = ScriptedTrainer()
    report = await run(make_engine(tmp_path, renderer, workflow=Marginal(), trainer=trainer))
    assert report.train_steps == 4
    values = {float(value) for batch in trainer.batches for item in batch.samples for value in np.unique(item.advantages)}
    assert values == {0.0, 0.25}
    stored = open_run(tmp_path).read_episodes()
    assert {each.trajectory.advantage for each in stored} == {0.0, 0.25}


async def test_equal_scores_in_group_after_group_are_warned_about_once(
    renderer: Renderer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Best(Ranked):
        async def score_group(self, task: Task, episodes: Sequence[Trajectory]) -> Sequence[float]:
            return [1.0] * len(episodes)

    await run(make_engine(tmp_path, renderer, workflow=Best(), steps=20, engine={"stop_after_skipped": 0}))
    told = [record.message for record in caplog.records if "one and the same score" in record.message]
    assert len(told) == 1
    assert "agentrl_rewards.pass_at_k.pass_at_k(scores)" in told[0]


async def test_a_run_counts_the_members_of_a_group_that_cannot_be_scored_as_failed(
    renderer: Renderer, tmp_path: Path
) -> None:
    class GoneForTheFirst(Ranked):
        async def score_group(self, task: Task, episodes: Sequence[Trajectory]) -> Sequence[float] | MemberAdvantages:
            if episodes[0].episode_id.startswith("0."):
                judge_is_gone()
            return await super().score_group(task, episodes)

    report = await run(make_engine(tmp_path, renderer, workflow=GoneForTheFirst()))
    assert report.failed_episodes == {"environment_fault": 3}
    assert report.dropped_groups == {"episode_failed:environment_fault": 1}
    assert (report.train_steps, balance(report)) == (4, 0)
    failed = lines(tmp_path / "metrics.jsonl", "episode_failed")
    assert [line["message"] for line in failed] == ["judge: HTTP 503"] * 3


async def test_an_evaluation_has_the_rewards_of_run(renderer: Renderer) -> None:
    workflow = Ranked()
    report = await evaluate_policy(
        workflow,
        TASKS,
        backend=make_server(renderer, coin),
        renderer=renderer,
        rollout=RolloutConfig(),
        sampling=SAMPLING,
    )
    assert workflow.calls == []
    assert {episode.final_reward for episode in report.episodes} == {0.0, 1.0}
