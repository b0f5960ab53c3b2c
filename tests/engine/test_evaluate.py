"""Evaluation by itself, and beside training: `engine.eval_weights`."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import pytest

from agentrl.client import Client
from agentrl.engine.evaluate import EvalReport, evaluate_policy
from agentrl.engine.parts import RunState
from agentrl.errors import ConfigError, InvariantError
from agentrl.observe.progress import NoProgress, Snapshot
from agentrl.observe.timeline import MIN_WAIT_S, read_timeline
from agentrl.rollout.config import RolloutConfig
from agentrl.servers.scripted.server import ScriptedCall
from agentrl.tokens.renderer import Renderer
from agentrl.trainer.base import StepReport, TrainBatch
from agentrl.trainer.scripted import ScriptedTrainer
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


class Counted(ScriptedTrainer):
    """Lets others wait until it has trained a number of batches."""

    stepped = anyio.Event()

    async def step(self, batch: TrainBatch) -> StepReport:
        report = await super().step(batch)
        self.stepped.set()
        self.stepped = anyio.Event()
        return report

    async def has_trained(self, count: int) -> None:
        while len(self.batches) < count:
            await self.stepped.wait()


class Spanning:
    """A run that evaluates every second version with one episode, which makes a call, awaits `between` and makes another."""

    def __init__(self, run_dir: Path, renderer: Renderer, *, steps: int = 4, **engine: object) -> None:
        self.steps, self.trainer = steps, Counted(steps_while_sending=True)
        self.between: Callable[[int], Awaitable[None]] = self.trainer_waits
        self.waits: list[tuple[str, ...]] = []
        self._snapshots: list[Callable[[], Snapshot]] = []
        spanning = self

        async def judge(task: Task, client: Client) -> float:
            answer = await ask(client, task["question"])
            if client.episode.id.startswith("eval."):
                await spanning.between(int(client.episode.id.split(".")[1]))
                await ask(client, "Again.")
            return float(answer == "good")

        class Watching(NoProgress):
            async def show(self, snapshot: Callable[[], Snapshot]) -> None:
                spanning._snapshots.append(snapshot)
                await anyio.sleep_forever()

        self.engine = make_engine(
            run_dir,
            renderer,
            workflow=workflow_of(judge),
            trainer=self.trainer,
            steps=steps,
            eval_tasks=TASKS[:1],
            algorithm={"max_staleness": 2},
            progress=Watching(),
            engine={"eval_every": 2, "eval_episodes": 1, **engine},
            interrupt_s=PATIENCE_S,
        )

    async def trainer_waits(self, step: int) -> None:
        """Return when the trainer has trained the batch after `step`, if any, and can do no more; note the waits."""
        await self.trainer.has_trained(min(step + 1, self.steps))
        await anyio.wait_all_tasks_blocked()
        await anyio.sleep(MIN_WAIT_S)  # the timeline leaves out shorter waits
        self.waits.append(self._snapshots[0]().waits)


def versions_of(run_dir: Path) -> list[tuple[int, int, int]]:
    """Return the step and the lowest and highest version of each evaluation."""
    return [(e["step"], e["min_version"], e["max_version"]) for e in lines(run_dir / "metrics.jsonl", "evaluation")]


def published_after(run_dir: Path, step: int) -> list[int]:
    """Return the versions that were published after the evaluation of `step` was recorded."""
    events = lines(run_dir / "metrics.jsonl")
    ended = next(i for i, event in enumerate(events) if event["event"] == "evaluation" and event["step"] == step)
    return [event["version"] for event in events[ended:] if event["event"] == "publishing"]


async def test_an_evaluation_of_live_weights_that_spans_an_update_samples_both_versions(
    tmp_path: Path, renderer: Renderer
) -> None:
    spanning = Spanning(tmp_path, renderer)
    spanning.between = lambda step: spanning.trainer.has_trained(4)  # the servers have version 4 before the trainer begins
    await run(spanning.engine)
    [(step, lowest, highest), *_] = versions_of(tmp_path)
    assert (step, lowest) == (2, 3)
    assert highest in (4, 5)


@pytest.mark.parametrize("overlap", [False, True])
async def test_an_evaluation_of_frozen_weights_samples_one_version_and_the_update_follows_its_end(
    tmp_path: Path, renderer: Renderer, overlap: bool
) -> None:
    spanning = Spanning(tmp_path, renderer, eval_weights="frozen", overlap_publication=overlap)
    report = await run(spanning.engine)
    assert versions_of(tmp_path) == [(2, 3, 3), (4, 5, 5)]
    assert published_after(tmp_path, 2) == [4, 5]
    assert published_after(tmp_path, 4) == []
    assert (report.train_steps, report.policy_version) == (4, 5)
    [wait] = [line for line in spanning.waits[0] if line.startswith("the trainer")]
    assert wait.startswith(
        "the trainer waits for the frozen evaluation after step 2 to end, before it sends version 4 since"
    )
    waited = [(entry.actor, entry.step) for entry in read_timeline(tmp_path) if entry.activity == "wait_for_evaluation"]
    assert waited == [("trainer", 3)]


async def test_a_frozen_evaluation_whose_episodes_fail_lets_the_update_follow(tmp_path: Path, renderer: Renderer) -> None:
    async def fail(step: int) -> None:
        await spanning.trainer_waits(step)
        raise LookupError

    spanning = Spanning(tmp_path, renderer, eval_weights="frozen")
    spanning.between = fail
    report = await run(spanning.engine)
    assert [line["failed"] for line in report.evaluations] == [1, 1]
    assert published_after(tmp_path, 2) == [4, 5]


async def test_a_frozen_evaluation_that_ends_the_run_lets_the_trainer_save_the_step_that_waited(
    tmp_path: Path, renderer: Renderer
) -> None:
    async def fail(step: int) -> None:
        await spanning.trainer_waits(step)
        raise InvariantError("this episode is impossible")

    spanning = Spanning(tmp_path, renderer, eval_weights="frozen")
    spanning.between = fail
    with pytest.raises(InvariantError, match="this episode is impossible"):
        await run(spanning.engine)
    assert [Path(path).name for path in spanning.trainer.saved] == ["step-000003"]
    assert versions_of(tmp_path) == []


async def test_a_run_that_is_cancelled_in_a_frozen_evaluation_saves_the_step_that_waited_and_leaves_it_due(
    tmp_path: Path, renderer: Renderer
) -> None:
    async def cancel(step: int) -> None:
        await spanning.trainer_waits(step)
        tasks.cancel_scope.cancel()
        await anyio.sleep_forever()

    spanning = Spanning(tmp_path, renderer, eval_weights="frozen")
    spanning.between = cancel
    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(spanning.engine.run)
    assert [Path(path).name for path in spanning.trainer.saved] == ["step-000003"]
    state = RunState.from_note(spanning.trainer.notes[-1], where="here")
    assert (state.policy_version, state.evaluations_due) == (4, (2,))


async def test_a_run_ends_after_the_frozen_evaluation_of_its_last_weights(tmp_path: Path, renderer: Renderer) -> None:
    spanning = Spanning(tmp_path, renderer, steps=2, eval_weights="frozen")
    report = await run(spanning.engine)
    assert versions_of(tmp_path) == [(2, 3, 3)]
    assert (report.train_steps, report.policy_version) == (2, 3)


async def test_a_frozen_evaluation_that_samples_another_version_is_an_error(renderer: Renderer) -> None:
    report = await evaluated(renderer)
    report.check_frozen(5)
    with pytest.raises(InvariantError, match=r"began at version 4, .* but versions 5 to 5 sampled its tokens"):
        report.check_frozen(4)
