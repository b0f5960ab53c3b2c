"""The counters of a run and the report made of them.

Invariant: each sampled token is trained, wasted for a named cause, part of an evaluation, or still in flight.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from agentrl.engine.batch import PreparedBatch
from agentrl.episode.summary import MetricValue
from agentrl.processes.machine import count_cores
from agentrl.trainer.base import StepReport
from agentrl.types import Group

Timer: TypeAlias = Literal["trainer_wait_s", "rollout_wait_s", "train_s"]


TRAINER_WORK = ("train_s", "sync_wait_s", "trainer.seconds_spot_check")
"""The keys of a `step` line whose seconds the trainer works."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishReport:
    """The cost of one publication, seconds."""

    publish_s: float
    """Until the trainer had its weights ready: copied, and, where it waits for the servers, written."""
    update_s: float
    """From then on, until every serving server held them."""
    pause_after_s: float
    """From the beginning of the update to the first pause."""
    pause_s: float
    probe_difference: float | None
    """Nats."""
    num_bytes: int
    """Size of the weights as each server read or received them."""
    version: int
    trainer_digest: str
    """Digest of the published weights, after its kind."""
    server_digests: Mapping[str, str]
    """The same of the weights in each server that took them, by its URL."""


class SyncCost(NamedTuple):
    """The cost of publications between two training steps."""

    published: PublishReport | None
    """The publication that ended; None: none did."""
    waited_s: float
    """Time that the trainer waited for publications."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """The report of a run."""

    train_steps: int
    """Finished steps, including skipped ones and those of earlier processes."""
    resumed_from_step: int
    """Steps of earlier processes; all other counts are of this process alone."""
    skipped_steps: Mapping[str, int]
    """Steps that left the weights as they were, by reason."""
    policy_version: int
    """Version of the last published weights."""
    max_staleness: int
    max_trained_staleness: int
    mean_staleness: float
    """Over all trained tokens."""
    episodes: int
    """Training episodes that ended, each attempt counted."""
    groups: int
    """Groups trained."""
    zero_variance_groups: int
    dropped_groups: Mapping[str, int]
    failed_episodes: Mapping[str, int]
    """Attempts, by stop reason."""
    sampled_tokens: int
    """Evaluations included."""
    evaluation_tokens: int
    trained_tokens: int
    """In the loss mask of a step that was not skipped."""
    wasted_tokens: Mapping[str, int]
    """Sampled for training and never trained, by cause; `in_flight`: the run ended first."""
    wall_seconds: float
    """Time of this process."""
    run_seconds: float
    """Time on the run's clock: that of earlier processes included."""
    trainer_wait_seconds: float
    """Time that the trainer waited for groups."""
    rollout_wait_seconds: float
    """Time that the dispatcher waited for the staleness bound."""
    train_seconds: float
    sync_seconds: float
    """Time that the trainer waited for weights to be published."""
    pause_seconds: float
    """Time that servers were paused for updates."""
    max_logprob_difference: float | None
    """Largest difference of a behavior log-prob from the trainer's under the same version, nats; None: not measured."""
    unchecked_steps: int
    """Steps before which some server's log-probs could not be compared with the trainer's."""
    interrupted_tokens: int
    """Trained tokens sampled after weights had changed in their model call."""
    mean_interrupted_difference: float | None
    """Of those whose version the trainer still had: distance of behavior log-probs from the trainer's, nats; None: none."""
    max_interrupted_difference: float | None
    """The largest of the same: rounding under `inference.pause_mode: exact`, the error of `fast`."""
    max_probe_difference: float | None
    """Largest difference on the probe after an update, nats; None: not measured."""
    evaluations: tuple[Mapping[str, MetricValue], ...]
    """The `evaluation` events, in order."""
    checkpoint: str | None
    """Path of the last checkpoint; None: none was written."""


@dataclass(slots=True)
class Totals:
    """The counters behind a `RunReport`."""

    first_step: int = 0
    steps: int = 0
    skipped: Counter[str] = field(default_factory=Counter[str])
    staleness_max: int = 0
    staleness_sum: int = 0
    trained_tokens: int = 0
    episodes: int = 0
    groups: int = 0
    zero_variance_groups: int = 0
    wasted: Counter[str] = field(default_factory=Counter[str])
    seconds: dict[Timer, float] = field(
        default_factory=lambda: {"trainer_wait_s": 0.0, "rollout_wait_s": 0.0, "train_s": 0.0}
    )
    sync_s: float = 0.0
    pause_s: float = 0.0
    logprob_difference: float | None = None
    unchecked_steps: int = 0
    interrupted_tokens: int = 0
    interrupted_compared: int = 0
    interrupted_sum: float = 0.0
    interrupted_max: float | None = None
    probe_difference: float | None = None
    evaluations: list[Mapping[str, MetricValue]] = field(default_factory=list[Mapping[str, MetricValue]])
    checkpoint: str | None = None

    def add_batch(
        self,
        groups: tuple[Group, ...],
        prepared: PreparedBatch,
        report: StepReport,
        sync: SyncCost,
        sampled: int,
    ) -> None:
        """Count a finished step; `sampled` is the number of tokens of its groups, failed attempts included."""
        kept = sum(episode.num_output_tokens for group in groups for episode in group.episodes)
        loss_tokens = len(prepared.staleness)
        self.add_waste("failed_episode", sampled - kept)
        self.add_waste("over_age", prepared.masked_tokens)
        turns = [turn for group in groups for episode in group.episodes for turn in episode.turns]
        left_out = sum(len(turn.output_ids) for turn in turns if turn.left_out)
        self.add_waste("left_out", left_out)
        self.add_waste("shaped_out", prepared.shaped_out_tokens)
        masked = prepared.masked_tokens + prepared.shaped_out_tokens
        self.add_waste("greedy", kept - masked - loss_tokens - left_out)
        self.steps += 1
        self.groups += len(groups)
        self.zero_variance_groups += int(prepared.metrics["zero_variance_groups"])
        self.sync_s += sync.waited_s
        if sync.published is not None:
            self.pause_s += sync.published.pause_s
            self.probe_difference = _larger(self.probe_difference, sync.published.probe_difference)
        self.logprob_difference = _larger(self.logprob_difference, report.metrics.get("max_logprob_difference"))
        self.logprob_difference = _larger(self.logprob_difference, report.metrics.get("max_spot_difference"))
        self.unchecked_steps += report.metrics.get("unchecked_servers", 0.0) > 0
        self._add_interrupted(report.metrics)
        if report.skipped is not None:
            self.skipped[report.skipped] += 1
            self.add_waste("skipped_step", loss_tokens)
            return
        self.trained_tokens += loss_tokens
        self.staleness_sum += int(prepared.staleness.sum())
        self.staleness_max = max(self.staleness_max, int(prepared.staleness.max(initial=0)))

    def _add_interrupted(self, metrics: Mapping[str, float]) -> None:
        compared = int(metrics.get("num_interrupted_fresh_tokens", 0))
        self.interrupted_tokens += int(metrics.get("num_interrupted_tokens", 0))
        self.interrupted_compared += compared
        self.interrupted_sum += compared * metrics.get("mean_interrupted_difference", 0.0)
        self.interrupted_max = _larger(self.interrupted_max, metrics.get("max_interrupted_difference"))

    def add_waste(self, cause: str, tokens: int) -> None:
        if tokens:
            self.wasted[cause] += tokens

    def report(
        self,
        *,
        policy_version: int,
        max_staleness: int,
        dropped_groups: Mapping[str, int],
        failed_episodes: Mapping[str, int],
        sampled_tokens: int,
        evaluation_tokens: int,
        in_flight_tokens: int,
        wall_seconds: float,
        run_seconds: float,
    ) -> RunReport:
        in_flight = {"in_flight": in_flight_tokens} if in_flight_tokens else {}
        return RunReport(
            train_steps=self.steps,
            resumed_from_step=self.first_step,
            skipped_steps=dict(self.skipped),
            policy_version=policy_version,
            max_staleness=max_staleness,
            max_trained_staleness=self.staleness_max,
            mean_staleness=self.staleness_sum / self.trained_tokens if self.trained_tokens else 0.0,
            episodes=self.episodes,
            groups=self.groups,
            zero_variance_groups=self.zero_variance_groups,
            dropped_groups=dropped_groups,
            failed_episodes=failed_episodes,
            sampled_tokens=sampled_tokens,
            evaluation_tokens=evaluation_tokens,
            trained_tokens=self.trained_tokens,
            wasted_tokens={**self.wasted, **in_flight},
            wall_seconds=wall_seconds,
            run_seconds=run_seconds,
            trainer_wait_seconds=self.seconds["trainer_wait_s"],
            rollout_wait_seconds=self.seconds["rollout_wait_s"],
            train_seconds=self.seconds["train_s"],
            sync_seconds=self.sync_s,
            pause_seconds=self.pause_s,
            max_logprob_difference=self.logprob_difference,
            unchecked_steps=self.unchecked_steps,
            interrupted_tokens=self.interrupted_tokens,
            mean_interrupted_difference=(
                self.interrupted_sum / self.interrupted_compared if self.interrupted_compared else None
            ),
            max_interrupted_difference=self.interrupted_max,
            max_probe_difference=self.probe_difference,
            evaluations=tuple(self.evaluations),
            checkpoint=self.checkpoint,
        )


class BusyMeter:
    """Measures the share of the time since the last step in which trainer, servers and driver were busy."""

    def __init__(self) -> None:
        self._most_tokens_per_s = 0.0
        self._processor_s = time.process_time()

    def step(self, elapsed_s: float, tokens_per_s: float, line: Mapping[str, object]) -> dict[str, float]:
        """Return the shares of a step that has just ended, from `tokens_per_s` sampled meanwhile and its other metrics."""
        self._most_tokens_per_s = max(self._most_tokens_per_s, tokens_per_s)
        now = time.process_time()
        used_s, self._processor_s = now - self._processor_s, now
        worked_s = sum(value for key in TRAINER_WORK if isinstance(value := line.get(key), float))
        return {
            "trainer_busy_share": min(1.0, worked_s / elapsed_s),
            "server_busy_share": tokens_per_s / self._most_tokens_per_s if self._most_tokens_per_s else 0.0,
            "driver_busy_cores": used_s / elapsed_s,
            "machine_cores": float(count_cores()),
        }


def _larger(known: float | None, found: float | None) -> float | None:
    return known if found is None else found if known is None else max(known, found)
