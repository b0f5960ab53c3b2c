"""The records of a run, and the state that both sides of its loop share.

Invariant: each finished episode, step, drop, evaluation and checkpoint is recorded once, where it happens, under the keys
of `agentrl.episode.summary`. Whatever moves the run restarts its stall timer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Literal

import anyio
import msgspec

from agentrl.engine.batch import PreparedBatch, trained_records
from agentrl.engine.buffer import GroupBuffer, Signal, VersionClock
from agentrl.engine.diagnostics import advantage_metrics, speaker_metrics, task_outcomes
from agentrl.engine.evaluate import EvalReport
from agentrl.engine.filter import FILTERED
from agentrl.engine.inflight import InFlight, WatchedBackend
from agentrl.engine.parts import EngineParts
from agentrl.engine.report import BusyMeter, PublishReport, RunReport, SyncCost, Timer, Totals
from agentrl.engine.skipped import AfterTurnErrors, ErrorBudget
from agentrl.engine.staleness import Admission
from agentrl.episode.summary import EndedEpisode, MetricValue, prefixed
from agentrl.errors import RunStopped
from agentrl.observe.episode_files import EpisodeFiles
from agentrl.observe.progress import Snapshot, StepPace, evaluation_line
from agentrl.observe.records import JsonLines
from agentrl.observe.resuming import last_version, last_wall_s
from agentrl.observe.stall import StallTimer, WaitBoard
from agentrl.observe.timeline import MIN_WAIT_S, Activity, ActivityName, Actor
from agentrl.processes.watchdog.delays import loop_blocked_s
from agentrl.trainer.base import StepReport
from agentrl.types import Group, Trajectory

_TIMED: Mapping[Timer, tuple[Actor, ActivityName]] = {
    "trainer_wait_s": ("trainer", "wait_for_batch"),
    "rollout_wait_s": ("dispatcher", "wait_for_bound"),
    "train_s": ("trainer", "train"),
}


class Journal:
    """The records of one run; each method that writes raises `RunStopped` when the disk refuses."""

    def __init__(
        self,
        parts: EngineParts,
        *,
        clock: VersionClock,
        buffer: GroupBuffer,
        flights: InFlight,
        waits: Callable[[], list[str]],
    ) -> None:
        """Write under `parts.run_dir`; the lines of an earlier process's steps stay, and a `resumed` event follows."""
        run_dir, engine, resume = parts.run_dir, parts.engine, parts.resume
        self._has_tasks = parts.source is None
        self._name, self._steps, self._max_staleness = parts.name, engine.steps, parts.algorithm.max_staleness
        self._clock, self._buffer, self._flights, self._waits = clock, buffer, flights, waits
        self._trackers = parts.trackers
        self._metrics = JsonLines(run_dir / "metrics.jsonl")
        mark = resume.mark() if resume.continues else None
        self._episodes = None
        if engine.save_trajectories:
            self._episodes = EpisodeFiles(
                run_dir / "episodes", next_step=resume.step + 1, keep_steps=engine.keep_episode_steps, mark=mark
            )
        self._budget = ErrorBudget(parts.rollout)
        self._after_turn = AfterTurnErrors()
        self._totals = Totals(first_step=resume.step, steps=resume.step)
        self._timeline = JsonLines(run_dir / "timeline.jsonl")
        self._last_step = time.perf_counter()
        self._resumed_s = last_wall_s(run_dir) if resume.continues else 0.0
        self._begin = self._last_step - self._resumed_s
        """The moment of `time.perf_counter` at which the run's clock shows 0."""
        self._last_tokens = 0
        self._busy = BusyMeter()
        self._pace = StepPace()
        self._last_blocked = loop_blocked_s()
        self._last_seconds: dict[Timer, float] = {}
        self._shown: Mapping[str, MetricValue] = {}
        if mark is not None:
            self._append("resumed", mark)

    def start(self) -> None:
        if self._trackers is not None:
            self._trackers.start()

    @contextmanager
    def timed(self, timer: Timer) -> Generator[None, None, None]:
        """Add the duration of the block, seconds, to a counter of the report, and record it in the timeline."""
        begin = time.perf_counter()
        try:
            with self.during(*_TIMED[timer]):
                yield
        finally:
            self._totals.seconds[timer] += time.perf_counter() - begin

    @contextmanager
    def during(self, actor: Actor, activity: ActivityName) -> Generator[None]:
        """Record the block in the timeline, unless it is left by an exception, for the step that is next to be finished."""
        begin = time.perf_counter()
        yield
        self._worked(actor, activity, begin, time.perf_counter())

    def publishing(self, version: int) -> None:
        """Record a version before any server can have it: no later process of the run uses the number for other weights."""
        self._append("publishing", {"version": version})

    def published(self, ended: float, report: PublishReport) -> None:
        """Record a publication that ended at `ended`, a moment of `time.perf_counter`, and who held which weights then."""
        digests = {"trainer_digest": report.trainer_digest, "server_digests": dict(report.server_digests)}
        self._append("published", {"version": report.version, **digests, "probe_difference": report.probe_difference})
        update = ended - report.update_s
        pause = update + report.pause_after_s
        self._worked("trainer", "publish", update - report.publish_s, update)
        self._worked("servers", "update", update, ended)
        self._worked("servers", "pause", pause, pause + report.pause_s)

    def _worked(self, actor: Actor, activity: ActivityName, begin: float, end: float, step: int | None = None) -> None:
        """Add a line to the timeline; `begin` and `end` are moments of `time.perf_counter`."""
        if activity.startswith("wait_") and end - begin < MIN_WAIT_S:
            return
        entry = Activity(
            actor=actor,
            activity=activity,
            start_s=round(begin - self._begin, 4),
            end_s=round(end - self._begin, 4),
            step=self._totals.steps + 1 if step is None else step,
        )
        self._timeline.append_bytes(msgspec.json.encode(entry) + b"\n")
        if self._trackers is not None:
            self._trackers.activity(entry)

    def episode(self, trajectory: Trajectory, *, group: int | None) -> None:
        """Record a finished episode; `group` is None for an evaluation.

        Raises:
            ErrorBudgetExceeded: too many training episodes have failed.
        """
        purpose, step = "evaluation" if group is None else "training", self._totals.steps + 1
        if self._trackers is not None:
            self._trackers.episode(step, purpose, trajectory)
        if self._episodes is not None:
            ended = EndedEpisode(
                trajectory=trajectory,
                purpose=purpose,
                group=group,
                step=step,
                policy_version=self._clock.version,
                run_begin_s=self._begin,
            )
            self._episodes.put(ended)
        if trajectory.failure is not None:
            self._append(
                "episode_failed",
                {
                    "group": group,
                    "episode_id": trajectory.episode_id,
                    "task_id": trajectory.task_id,
                    "stop_reason": str(trajectory.stop_reason),
                    "kind": trajectory.failure.kind,
                    "message": trajectory.failure.message,
                    **({} if trajectory.failure.after_turn is None else {"after_turn": trajectory.failure.after_turn}),
                },
            )
        if group is not None:
            self._totals.episodes += 1
            self._after_turn.record(trajectory)
            self._budget.record(trajectory)

    def completed(self) -> None:
        self._budget.group_completed()

    def dropped(self, index: int, reason: str) -> None:
        """Record a group that is dropped untrained.

        Raises:
            ErrorBudgetExceeded: too many in a row were dropped for their failed members.
        """
        tokens = self._flights.tokens_by_group.pop(index, 0)
        self._totals.add_waste(reason if reason in ("over_age", FILTERED) else "dropped_group", tokens)
        self._append("dropped_group", {"group": index, "reason": reason})
        if self._has_tasks and reason not in ("over_age", "unverified", FILTERED):  # these say nothing about the workflow
            self._budget.group_dropped(reason)

    async def check_in_place(self) -> None:
        """Raise `RunStopped` where a file of the run was deleted or replaced."""
        self._metrics.check_in_place()
        self._timeline.check_in_place()
        if self._episodes is not None:
            await self._episodes.check_in_place()

    def step(
        self,
        number: int,
        groups: tuple[Group, ...],
        prepared: PreparedBatch,
        report: StepReport,
        sync: SyncCost,
        *,
        drawn: Mapping[str, float],
    ) -> None:
        """Record a training step; `sync` is the cost of publications since the last one, `drawn` what the task draw says."""
        totals, now = self._totals, time.perf_counter()
        sampled = sum(self._flights.tokens_by_group.pop(group.index, 0) for group in groups)
        totals.add_batch(groups, prepared, report, sync, sampled)
        elapsed, self._last_step = now - self._last_step, now
        tokens, self._last_tokens = self._flights.num_tokens - self._last_tokens, self._flights.num_tokens
        since = {timer: seconds - self._last_seconds.get(timer, 0.0) for timer, seconds in totals.seconds.items()}
        self._last_seconds = dict(totals.seconds)
        # Rollouts and training overlap from the second step on, unless no staleness is allowed.
        parts = (since["trainer_wait_s"], since["train_s"] + sync.waited_s)
        self._pace.ended(now, first_s=max(parts) if self._max_staleness else sum(parts))
        blocked = loop_blocked_s()
        episodes = [episode for group in groups for episode in group.episodes]
        line: dict[str, MetricValue] = {
            "step": number,
            **prepared.metrics,
            **task_outcomes(group.episodes for group in groups),
            **advantage_metrics(episodes, prepared.advantages),
            **speaker_metrics(episodes),
            **drawn,
            "sampled_tokens": self._flights.num_tokens,
            "tokens_per_s": tokens / elapsed,
            "trainer_wait_s": since["trainer_wait_s"],
            "rollout_wait_s": since["rollout_wait_s"],
            "train_s": since["train_s"],
            "loop_blocked_s": blocked - self._last_blocked,
            "sync_wait_s": sync.waited_s,
            "sync_share": sync.waited_s / elapsed,
            **({} if sync.published is None else _publication_metrics(sync.published)),
            **prefixed("dropped_groups", self._buffer.dropped),
            **prefixed("failed_episodes", self._budget.by_reason),
            **prefixed("raised_after_turn", self._after_turn.by_line),
            **prefixed("wasted_tokens", totals.wasted),
            **prefixed("trainer", report.metrics),
        }
        line |= self._busy.step(elapsed, tokens / elapsed, line)
        self._last_blocked = blocked
        if report.skipped is not None:
            line["skipped"] = report.skipped
        trained = {**line, "trained_groups": [group.index for group in groups]}
        self._append("step", trained, policy_version=prepared.batch.policy_version)
        if self._episodes is not None:
            self._episodes.end_step(number, partial(trained_records, groups, prepared, report, step=number))
        self._shown = line
        if self._trackers is not None:
            self._trackers.step(number, self._wall_s(), line, episodes)

    def checkpoint_begun(self, step: int, held_s: float) -> None:
        """Record that the trainer has copied its state for a checkpoint, and did nothing else for `held_s` seconds."""
        end = time.perf_counter()
        self._worked("trainer", "checkpoint", end - held_s, end, step)

    def checkpoint(self, step: int, path: Path, *, seconds: float, held_s: float) -> None:
        """Record a checkpoint on the disk, written in `seconds`, for `held_s` of which the trainer did nothing else."""
        self._totals.checkpoint = str(path)
        self._append("checkpoint", {"step": step, "path": str(path), "seconds": seconds, "held_s": held_s})

    async def flush(self) -> None:
        """Return when every episode so far is on disk."""
        if self._episodes is not None:
            await self._episodes.flush()

    async def evaluation(self, step: int, report: EvalReport) -> str:
        """Record an evaluation that began after `step` and has ended, once its episodes are on disk; return a line of it."""
        end = time.perf_counter()
        await self.flush()
        self._worked("evaluation", "evaluate", end - report.seconds, end, step)
        line = {"step": step, **report.metrics()}
        self._totals.evaluations.append(line)
        self._append("evaluation", line)
        if self._trackers is not None:
            self._trackers.evaluation(step, self._wall_s(), line, report.episodes)
        return evaluation_line(line)

    def evaluation_skipped(self, step: int) -> None:
        """Record an evaluation that was due while two earlier ones were unfinished."""
        self._append("evaluation_skipped", {"step": step})

    def snapshot(self) -> Snapshot:
        evaluations = self._totals.evaluations
        return Snapshot(
            name=self._name,
            step=self._totals.steps,
            steps=self._steps,
            policy_version=self._clock.version,
            wall_s=self._wall_s(),
            max_staleness=self._max_staleness,
            step_s=self._pace.seconds,
            sampled_tokens=self._flights.num_tokens,
            episodes_in_flight=len(self._flights),
            groups_complete=self._buffer.num_complete,
            groups_outstanding=self._buffer.num_outstanding,
            failed_episodes=self._budget.by_reason.total(),
            dropped_groups=sum(self._buffer.dropped.values()),
            success_rate=self._number("success_rate"),
            return_mean=self._number("return_mean"),
            staleness_mean=self._number("staleness_mean"),
            staleness_max=self._number("staleness_max"),
            tokens_per_s=self._number("tokens_per_s"),
            signal_share=self._number("signal_share"),
            last_evaluation=evaluation_line(evaluations[-1]) if evaluations else None,
            waits=tuple(self._waits()),
        )

    def report(self) -> RunReport:
        run_seconds = self._wall_s()
        return self._totals.report(
            policy_version=self._clock.version,
            max_staleness=self._max_staleness,
            dropped_groups=self._buffer.dropped,
            failed_episodes=dict(self._budget.by_reason),
            sampled_tokens=self._flights.num_tokens,
            evaluation_tokens=self._flights.num_evaluation_tokens,
            in_flight_tokens=self._flights.tokens_by_group.total(),
            wall_seconds=run_seconds - self._resumed_s,
            run_seconds=run_seconds,
        )

    async def write(self) -> None:
        """Write the records of episodes until cancelled."""
        if self._episodes is not None:
            await self._episodes.write()

    async def close(self, error: BaseException | None) -> None:
        """Write the remaining records and the `end` event, and close the files; shielded, for `DRAIN_TIMEOUT_S` at most.

        Where no error ended the run, one of closing it is the error of the `end` event and of the trackers.
        """
        try:
            if self._episodes is not None:
                await self._episodes.close()
        except Exception as unwritten:
            error = error or unwritten
            raise
        finally:
            await self._close_files(error)

    async def _close_files(self, error: BaseException | None) -> None:
        """Write the `end` event, close both files and finish the trackers, also when the disk refuses the event."""
        message = None
        if error is not None:
            message = "cancelled" if _run_status(error) == "interrupted" else f"{type(error).__name__}: {error}"
        try:
            with closing(self._timeline), closing(self._metrics):
                self._append("end", {"error": message, **asdict(self.report())})
        except RunStopped as refused:
            error = error or refused
            raise
        finally:
            if self._trackers is not None:
                await self._trackers.close("finished" if error is None else _run_status(error))

    def _append(self, event: str, fields: Mapping[str, object], *, policy_version: int | None = None) -> None:
        version = self._clock.version if policy_version is None else policy_version
        self._metrics.append({"event": event, "wall_s": round(self._wall_s(), 3), "policy_version": version, **fields})

    def _wall_s(self) -> float:
        """Return the time on the run's clock, seconds."""
        return time.perf_counter() - self._begin

    def _number(self, key: str) -> float | None:
        value = self._shown.get(key)
        return value if isinstance(value, (int, float)) else None


def _run_status(error: BaseException) -> Literal["failed", "interrupted"]:
    return "interrupted" if isinstance(error, anyio.get_cancelled_exc_class()) else "failed"


def _publication_metrics(published: PublishReport) -> dict[str, MetricValue]:
    metrics: dict[str, MetricValue] = {
        "publish_s": published.publish_s,
        "update_s": published.update_s,
        "pause_s": published.pause_s,
        "update_bytes": published.num_bytes,
    }
    return metrics if published.probe_difference is None else {**metrics, "probe_difference": published.probe_difference}


class LoopState:
    """The shared state of one run, made from its parts."""

    def __init__(self, parts: EngineParts) -> None:
        self.board = WaitBoard()
        self._source = parts.source
        is_idle = (lambda: False) if parts.source is None else parts.source.is_idle
        self.watchdog = StallTimer(timeout_s=parts.engine.stall_timeout_s, describe=self._describe_waits, is_idle=is_idle)
        self.flights = InFlight(on_progress=self.watchdog.progress)
        self.backend = WatchedBackend(parts.inference, self.flights)
        changed = Signal()
        self.clock = VersionClock(start=_first_version(parts), changed=changed)
        self.buffer = GroupBuffer(
            clock=self.clock,
            changed=changed,
            admission=_admission(parts, self.clock.version),
            policy=parts.algorithm.staleness_policy,
            on_drop=self._dropped,
            first_index=parts.resume.groups_admitted,
            reopen=parts.resume.groups_open if parts.source is None else (),
        )
        self.journal = Journal(parts, clock=self.clock, buffer=self.buffer, flights=self.flights, waits=self._waits)

    def _dropped(self, index: int, reason: str) -> None:
        self.journal.dropped(index, reason)
        if self._source is not None:
            self._source.dropped(index)

    def _waits(self) -> list[str]:
        return self.board.lines() + self.flights.describe(self.buffer.waits_for())

    def _describe_waits(self) -> str:
        return "\n".join(f"  {line}" for line in (*self._waits(), *self.backend.describe()))


def _admission(parts: EngineParts, first_version: int) -> Admission:
    """Return when groups open; the groups of a source hold one episode each."""
    algorithm = parts.algorithm
    if parts.source is not None:
        return Admission(
            groups_per_step=algorithm.groups_per_step * algorithm.group_size,
            max_staleness=algorithm.max_staleness,
            first_version=first_version,
            is_demanded=True,
        )
    return Admission(
        groups_per_step=algorithm.groups_per_step,
        max_staleness=algorithm.max_staleness,
        first_version=first_version,
        total_groups=max(0, parts.engine.steps - parts.resume.step) * algorithm.groups_per_step,
    )


def _first_version(parts: EngineParts) -> int:
    """Return the version of the run's first publication: at least 1, and above every version that the servers have had.

    Weights that a server was launched with are version 0, so a server that was restarted never passes for the run's. The
    weights of a checkpoint keep their version unless the run used later ones, whose weights were lost.
    """
    before = parts.resume.policy_version
    used = last_version(parts.run_dir) if parts.resume.continues else 0
    return max(used + 1 if used > before else before, parts.inference.policy_version + 1)
