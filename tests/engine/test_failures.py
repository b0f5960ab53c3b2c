"""How a run fails, stalls or is cancelled: named, recorded, and with nothing left running."""

from __future__ import annotations

import inspect
import math
import re
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import anyio
import pytest

import agentrl.engine.buffer
from agentrl.client import Client
from agentrl.engine.buffer import GroupBuffer, Signal, VersionClock
from agentrl.engine.journal import LoopState
from agentrl.engine.skipped import ErrorBudget
from agentrl.engine.staleness import Admission
from agentrl.errors import ErrorBudgetExceeded, InvariantError, RolloutWorkerDied, RunStopped, StallError
from agentrl.observe.progress import NoProgress, Snapshot
from agentrl.observe.trackers.base import TrackedRun
from agentrl.observe.trackers.feed import TrackerFeed
from agentrl.observe.trackers.to_jsonl import JsonlTracker
from agentrl.rollout.config import RolloutConfig
from agentrl.servers.scripted.server import Fault, ScriptedCall, ScriptedReply
from agentrl.tokens.renderer import Renderer
from agentrl.trainer.base import StepReport, TrainBatch
from agentrl.trainer.scripted import ScriptedTrainer
from agentrl.types import EpisodeFailure, StopReason, Task, Trajectory
from tests.engine.harness import balance, coin, episodes, lines, make_engine, make_parts, run
from tests.rollout.harness import PATIENCE_S, ask, make_server, workflow_of


def always_raises(task: Task, client: Client) -> float:
    raise LookupError("no answer anywhere")


def gives(value: object) -> Callable[[Task, Client], object]:
    def run(task: Task, client: Client) -> object:
        return value

    return run


def hangs(task: Task, client: Client) -> object:
    return anyio.sleep_forever()


@pytest.mark.parametrize(
    "wrong",
    [always_raises, gives(math.nan), gives("1.0"), gives(None), hangs],
    ids=["raises", "NaN", "string", "None", "hangs"],
)
async def test_a_workflow_that_always_fails_stops_the_run_with_the_first_failure(
    tmp_path: Path, renderer: Renderer, wrong: Callable[[Task, Client], object]
) -> None:
    trainer = ScriptedTrainer()
    rollout = {"episode_timeout_s": 0.2, "max_consecutive_failures": 10}
    engine = make_engine(tmp_path, renderer, workflow=workflow_of(wrong), trainer=trainer, rollout=rollout)
    with pytest.raises(ErrorBudgetExceeded, match=r"1\d episodes in a row failed"):
        await run(engine)
    assert trainer.batches == []
    report = engine.report()
    assert sum(report.failed_episodes.values()) >= 10
    assert report.groups == 0


async def test_the_error_budget_shows_the_first_traceback(tmp_path: Path, renderer: Renderer) -> None:
    engine = make_engine(tmp_path, renderer, workflow=workflow_of(always_raises), rollout={"max_consecutive_failures": 3})
    with pytest.raises(ErrorBudgetExceeded) as caught:
        await run(engine)
    assert 'raise LookupError("no answer anywhere")' in str(caught.value)
    assert re.search(r"All failures: \d workflow_error", str(caught.value))
    failed = lines(tmp_path / "metrics.jsonl", "episode_failed")
    assert failed[0]["kind"] == "WorkflowError"
    assert len(episodes(tmp_path)) == len(failed) >= 3


def outcome(failed: bool, reason: StopReason = StopReason.WORKFLOW_ERROR) -> Trajectory:
    failure = EpisodeFailure(kind="E", message="m", traceback="") if failed else None
    return Trajectory(episode_id="e", task_id="t", turns=(), stop_reason=reason, failure=failure)


def test_the_failure_rate_counts_over_the_last_64_episodes() -> None:
    budget = ErrorBudget(RolloutConfig(max_failure_rate=0.5, max_consecutive_failures=1000))
    for _ in range(32):
        budget.record(outcome(failed=False))
    for _ in range(32):
        budget.record(outcome(failed=True))
    with pytest.raises(ErrorBudgetExceeded, match="52% of the last 64 episodes failed"):
        budget.record(outcome(failed=True))


def test_episodes_that_died_with_their_worker_spend_no_budget() -> None:
    budget = ErrorBudget(RolloutConfig(max_failure_rate=0.5, max_consecutive_failures=2))
    died = EpisodeFailure(kind=RolloutWorkerDied.__name__, message="m", traceback="")
    for _ in range(100):
        budget.record(replace(outcome(failed=True, reason=StopReason.ENVIRONMENT_FAULT), failure=died))
    assert budget.by_reason == {"environment_fault": 100}


async def test_a_failed_member_is_retried_and_no_failure_is_trained(tmp_path: Path, renderer: Renderer) -> None:
    def script(call: ScriptedCall) -> ScriptedReply:
        first_attempt = call.episode_id.endswith(".1.0")
        return ScriptedReply(output=coin(call), fault=Fault.REFUSE if first_attempt else None)

    trainer = ScriptedTrainer()
    engine = make_engine(tmp_path, renderer, inference=make_server(renderer, script), trainer=trainer)
    report = await run(engine)
    assert report.failed_episodes == {"server_error": report.groups}
    assert report.dropped_groups == {}
    assert sum(len(batch.samples) for batch in trainer.batches) == 3 * report.groups
    assert balance(report) == 0


async def test_dropped_groups_are_counted_with_their_reason_and_replaced(tmp_path: Path, renderer: Renderer) -> None:
    async def judge(task: Task, client: Client) -> float:
        answer = await ask(client, task["question"])
        if task.id in ("t1", "t5"):
            raise LookupError("this task is broken")
        return float(answer == "good")

    engine = make_engine(
        tmp_path, renderer, workflow=workflow_of(judge), steps=6, rollout={"episode_retries": 0, "max_failure_rate": 1.0}
    )
    report = await run(engine)
    assert report.groups == 12
    [(reason, count)] = report.dropped_groups.items()
    assert reason == "episode_failed:workflow_error"
    assert count == len(lines(tmp_path / "metrics.jsonl", "dropped_group")) > 0
    assert report.wasted_tokens["dropped_group"] > 0
    assert balance(report) == 0


async def test_a_run_in_which_no_group_is_ever_whole_stops_although_most_episodes_succeed(
    tmp_path: Path, renderer: Renderer
) -> None:
    async def judge(task: Task, client: Client) -> float:
        answer = await ask(client, task["question"])
        if ".1." in client.episode.id:
            raise LookupError("one of each group")
        return float(answer == "good")

    engine = make_engine(
        tmp_path,
        renderer,
        workflow=workflow_of(judge),
        rollout={"episode_retries": 1, "max_failure_rate": 1.0, "max_consecutive_failures": 9},
    )
    with pytest.raises(ErrorBudgetExceeded, match=r"(?s)9 groups in a row .*incomplete_group: keep.*one of each"):
        await run(engine)


async def test_a_kept_group_is_trained_with_the_members_it_has(tmp_path: Path, renderer: Renderer) -> None:
    async def judge(task: Task, client: Client) -> float:
        answer = await ask(client, task["question"])
        if ".2." in client.episode.id:
            raise LookupError
        return float(answer == "good")

    trainer = ScriptedTrainer()
    rollout = {"incomplete_group": "keep", "episode_retries": 0}
    report = await run(make_engine(tmp_path, renderer, workflow=workflow_of(judge), trainer=trainer, rollout=rollout))
    assert (report.groups, report.dropped_groups) == (8, {})
    assert report.wasted_tokens["failed_episode"] > 0
    assert balance(report) == 0


class SceneReached(Exception):
    """All waits that a test looks for are there at once."""


class Scene(NoProgress):
    """A display that ends the run as soon as each of some waits is among those that a stalled run would name."""

    def __init__(self, *waits: str) -> None:
        """Look for these regular expressions."""
        self._waits = waits

    async def show(self, snapshot: Callable[[], Snapshot]) -> None:
        """Look again and again, as a person at a display does."""
        while True:
            lines = snapshot().waits
            if all(any(re.fullmatch(wait, line) for line in lines) for wait in self._waits):
                raise SceneReached
            await anyio.sleep(0.002)


async def test_the_trainer_the_groups_and_the_episodes_that_a_run_waits_for_are_named(
    tmp_path: Path, renderer: Renderer
) -> None:
    def script(call: ScriptedCall) -> ScriptedReply:
        stuck = call.episode_id == "1.2.0" and call.turn == 1
        return ScriptedReply(output=coin(call), fault=Fault.HANG if stuck else None)

    async def two_turns(task: Task, client: Client) -> float:
        await ask(client, "first")
        return float(await ask(client, "second") == "good")

    scene = Scene(
        r"the trainer waits for 1 of 2 groups are complete; missing: groups 1 since .* s",
        r"episode 1\.2\.0 of group 1 \(task t\d\) is in turn 1, waiting for an inference server since \d.*",
        r"the dispatcher waits for the staleness bound: 2 groups are open at version 1 since .* s",
    )
    engine = make_engine(
        tmp_path,
        renderer,
        workflow=workflow_of(two_turns),
        inference=make_server(renderer, script),
        algorithm={"max_staleness": 0},
        progress=scene,
    )
    with pytest.raises(SceneReached):
        await run(engine)


@pytest.mark.parametrize(
    ("held", "wait"),
    [
        (
            lambda: ScriptedTrainer(hold_steps={1: anyio.Event()}),
            "the trainer waits for its worker to train batch 2 since .* s",
        ),
        (
            lambda: ScriptedTrainer(hold_publish={2: anyio.Event()}),
            "the trainer waits for the servers to take version 2 since .* s",
        ),
    ],
    ids=["step", "publication"],
)
async def test_a_trainer_and_a_publication_that_do_not_end_are_named(
    tmp_path: Path, renderer: Renderer, held: Callable[[], ScriptedTrainer], wait: str
) -> None:
    with pytest.raises(SceneReached):
        await run(make_engine(tmp_path, renderer, trainer=held(), progress=Scene(wait)))


async def test_a_run_in_which_nothing_moves_ends_with_all_its_waits(tmp_path: Path, renderer: Renderer) -> None:
    held = ScriptedTrainer(hold_steps={0: anyio.Event()})
    with pytest.raises(StallError) as caught:
        await run(make_engine(tmp_path, renderer, trainer=held, engine={"stall_timeout_s": 0.1}))
    first, *waits = str(caught.value).splitlines()
    assert first == "nothing has moved for 0.1 s."
    assert waits
    assert all(re.match("  .* since ", wait) for wait in waits)


async def test_a_run_cancelled_in_the_middle_leaves_nothing_running_and_its_records_on_disk(
    tmp_path: Path, renderer: Renderer
) -> None:
    hold = anyio.Event()
    trainer = ScriptedTrainer(hold_steps={2: hold})
    running = [0]

    async def counted(task: Task, client: Client) -> float:
        running[0] += 1
        try:
            answer = await ask(client, task["question"])
            if client.episode.id.startswith("7."):
                await anyio.sleep_forever()
            return float(answer == "good")
        finally:
            running[0] -= 1

    engine = make_engine(tmp_path, renderer, workflow=workflow_of(counted), trainer=trainer, steps=50)
    threads = threading.active_count()
    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.run)
            await trainer.started.wait()
            while len(trainer.batches) < 3:
                await anyio.wait_all_tasks_blocked()
            await anyio.wait_all_tasks_blocked()
            assert running[0] > 0
            tasks.cancel_scope.cancel()
    assert running[0] == 0
    assert threading.active_count() <= threads + 4  # idle worker threads of the event loop's pool
    report = engine.report()
    assert report.train_steps == 2
    assert len(lines(tmp_path / "metrics.jsonl", "step")) == 2
    [end] = lines(tmp_path / "metrics.jsonl", "end")
    assert end["error"] == "cancelled"
    assert len(episodes(tmp_path)) == report.episodes > 0


def public_waits(*modules: ModuleType) -> set[str]:
    """Return the public async methods of the classes these modules define."""
    return {
        f"{name}.{method}"
        for module in modules
        for name, kind in vars(module).items()
        if inspect.isclass(kind) and kind.__module__ == module.__name__ and not name.startswith("_")
        for method, function in vars(kind).items()
        if inspect.iscoroutinefunction(function) and not method.startswith("_")
    }


WAITS: dict[str, Callable[[Signal, VersionClock, GroupBuffer], Awaitable[object]]] = {
    "Signal.wait": lambda changed, clock, buffer: changed.wait(),
    "Signal.wait_until": lambda changed, clock, buffer: changed.wait_until(
        lambda: clock.version == 1, timeout_s=None, what=lambda: "waits for version 1"
    ),
    "GroupBuffer.admit": lambda changed, clock, buffer: buffer.admit(),
    "GroupBuffer.closed": lambda changed, clock, buffer: buffer.closed(),
    "GroupBuffer.ready": lambda changed, clock, buffer: buffer.ready(),
    "GroupBuffer.take": lambda changed, clock, buffer: buffer.take(),
}


def test_the_waits_that_are_cancelled_below_are_all_there_are() -> None:
    assert public_waits(agentrl.engine.buffer) == WAITS.keys()


@pytest.mark.parametrize("name", WAITS)
async def test_every_public_wait_of_clock_and_buffer_can_be_cancelled_and_changes_nothing(name: str) -> None:
    changed = Signal()
    clock = VersionClock(changed=changed)
    buffer = GroupBuffer(clock=clock, changed=changed, admission=Admission(groups_per_step=1, max_staleness=0))
    ticket = await buffer.admit()
    assert ticket is not None
    state = (clock.version, buffer.open_indices, buffer.num_admitted, buffer.num_outstanding, buffer.may_admit)
    returned = list[object]()

    async def wait() -> None:
        returned.append(await WAITS[name](changed, clock, buffer))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    changed.fire()
    assert returned == []
    assert state == (clock.version, buffer.open_indices, buffer.num_admitted, buffer.num_outstanding, buffer.may_admit)
    buffer.drop(ticket.index, "no longer needed")
    clock.stepped()
    clock.tick(1)
    with anyio.fail_after(PATIENCE_S):
        assert await buffer.admit() is not None


async def test_a_run_that_waits_for_its_first_publication_can_be_cancelled(tmp_path: Path, renderer: Renderer) -> None:
    engine = make_engine(tmp_path, renderer, trainer=ScriptedTrainer(hold_publish={1: anyio.Event()}))
    with anyio.move_on_after(0.05) as scope:
        await engine.run()
    assert scope.cancelled_caught
    assert [end["error"] for end in lines(tmp_path / "metrics.jsonl", "end")] == ["cancelled"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
async def test_a_full_disk_ends_the_run_with_the_path_and_the_cause(tmp_path: Path, renderer: Renderer) -> None:
    (tmp_path / "episodes").mkdir()
    (tmp_path / "episodes" / "step-000001.jsonl").symlink_to("/dev/full")
    with pytest.raises(RunStopped, match=r"cannot write .*step-000001\.jsonl: No space left on device"):
        await run(make_engine(tmp_path, renderer))


class WithDifference(ScriptedTrainer):
    """Reports a log-prob difference."""

    async def step(self, batch: TrainBatch) -> StepReport:
        report = await super().step(batch)
        return StepReport(metrics={**report.metrics, "max_logprob_difference": 0.25 * len(self.batches)})


async def test_servers_and_trainer_that_disagree_on_log_probs_stop_the_run(tmp_path: Path, renderer: Renderer) -> None:
    engine = make_engine(tmp_path / "a", renderer, trainer=WithDifference(), engine={"max_logprob_difference": 0.6})
    with pytest.raises(InvariantError, match=r"step 3: a behavior log-prob differs by 0\.75 nats"):
        await run(engine)
    report = await run(make_engine(tmp_path / "b", renderer, trainer=WithDifference()))
    assert report.max_logprob_difference == 1.0


async def test_a_difference_over_the_limit_says_when_interrupted_calls_have_one(tmp_path: Path, renderer: Renderer) -> None:
    class Interrupted(WithDifference):
        async def step(self, batch: TrainBatch) -> StepReport:
            report = await super().step(batch)
            return StepReport(metrics={**report.metrics, "max_interrupted_difference": 0.5})

    engine = make_engine(tmp_path, renderer, trainer=Interrupted(), engine={"max_logprob_difference": 0.6})
    with pytest.raises(InvariantError, match=r"or inference\.pause_mode is fast .*: up to 0\.5 nats\)"):
        await run(engine)


class WithInterruptions(ScriptedTrainer):
    """Reports interrupted tokens: two and then one more with each step, compared in the first and third only."""

    async def step(self, batch: TrainBatch) -> StepReport:
        report = await super().step(batch)
        number = len(self.batches)
        found = {"num_interrupted_tokens": 1.0 + number, "num_interrupted_fresh_tokens": 0.0}
        if number in (1, 3):
            found |= {
                "num_interrupted_fresh_tokens": float(number),
                "mean_interrupted_difference": 0.1 * number,
                "max_interrupted_difference": 0.2 * number,
            }
        return StepReport(metrics={**report.metrics, **found})


async def test_the_error_of_interrupted_calls_adds_up_over_a_run(tmp_path: Path, renderer: Renderer) -> None:
    report = await run(make_engine(tmp_path, renderer, trainer=WithInterruptions()))
    assert report.interrupted_tokens == 2 + 3 + 4 + 5
    assert report.mean_interrupted_difference == pytest.approx((1 * 0.1 + 3 * 0.3) / 4)
    assert report.max_interrupted_difference == pytest.approx(0.6)
    steps = lines(tmp_path / "metrics.jsonl", "step")
    assert [line.get("trainer.max_interrupted_difference") for line in steps] == pytest.approx([0.2, None, 0.6, None])
    [end] = lines(tmp_path / "metrics.jsonl", "end")
    assert end["max_interrupted_difference"] == pytest.approx(0.6)
    untouched = await run(make_engine(tmp_path / "b", renderer))
    assert (untouched.interrupted_tokens, untouched.mean_interrupted_difference) == (0, None)
    assert untouched.max_interrupted_difference is None


@pytest.mark.parametrize("replaced", [False, True])
async def test_a_run_whose_files_are_gone_ends_at_the_next_step(tmp_path: Path, renderer: Renderer, replaced: bool) -> None:
    folder = tmp_path / "run"

    class Deleting(ScriptedTrainer):
        async def step(self, batch: TrainBatch) -> StepReport:
            if len(self.batches) == 1:
                folder.rename(tmp_path / "gone")  # all files at once: a thread of the run writes there meanwhile
            if len(self.batches) == 1 and replaced:
                folder.mkdir(exist_ok=True)
                (folder / "metrics.jsonl").write_text("")
            return await super().step(batch)

    trainer = Deleting()
    with pytest.raises(RunStopped, match=r"(metrics|index)\.jsonl was (replaced|deleted)"):
        await run(make_engine(folder, renderer, trainer=trainer, steps=20))
    assert len(trainer.batches) == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("full", ["metrics.jsonl", "episodes/step-000001.jsonl"])
async def test_a_disk_that_is_full_at_the_end_fails_the_run_and_its_trackers(
    tmp_path: Path, renderer: Renderer, full: str
) -> None:
    (tmp_path / "run" / "episodes").mkdir(parents=True)
    (tmp_path / "run" / full).symlink_to("/dev/full")
    described = TrackedRun(name="r", run_dir=tmp_path, project="p", config={}, resumed_step=0, began_at=0.0)
    feed = TrackerFeed({"jsonl": JsonlTracker()}, described, samples=0, decode=str)
    journal = LoopState(make_parts(tmp_path / "run", renderer, steps=1, trackers=feed)).journal
    journal.start()
    journal.episode(outcome(failed=False), group=0)
    with pytest.raises(RunStopped, match=full):
        await journal.close(None)
    assert lines(tmp_path / "tracked.jsonl")[-1] == {"call": "finish", "status": "failed"}
    if full != "metrics.jsonl":
        [end] = lines(tmp_path / "run" / "metrics.jsonl", "end")
        assert end["error"].startswith("RunStopped: ")
