"""The numbers a demo run ends with: the table on the terminal and the fields of summary.json.

Invariant: every figure is computed from recorded episodes or the run report, and is unrounded in the file. Success rates are
over the episodes that did not fail, and null if all failed; the number of failed episodes is beside them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from agentrl.engine.evaluate import EvalReport
from agentrl.engine.report import RunReport
from agentrl.observe.metrics import is_success
from agentrl.types import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluations:
    """One checkpoint on the held-out tasks."""

    greedy: EvalReport
    by_turns: Mapping[int, EvalReport]
    """Sampled, by turn limit."""

    @property
    def sampled(self) -> EvalReport:
        """Sampled, under the largest turn limit."""
        return self.by_turns[max(self.by_turns)]

    @property
    def failures(self) -> dict[str, int]:
        """Episodes without a result, by stop reason, of all evaluations of the checkpoint."""
        total: Counter[str] = Counter()
        for report in (self.greedy, *self.by_turns.values()):
            total.update(report.failures)
        return dict(total)


def success_split(episodes: Sequence[Trajectory]) -> tuple[float | None, float | None]:
    """Return the success rates of episodes without and with a busy error, excluding failures, or None."""
    done = [episode for episode in episodes if episode.failure is None]
    busy = [is_success(episode) for episode in done if episode.metrics.get("busy", 0) > 0]
    calm = [is_success(episode) for episode in done if not episode.metrics.get("busy", 0) > 0]
    return (_share_true(calm), _share_true(busy))


def summary_fields(before: Evaluations, after: Evaluations, report: RunReport) -> dict[str, Any]:
    """Return the fields of summary.json, without the times."""
    return {
        "sampled_before": before.sampled.success_rate,
        "sampled_after": after.sampled.success_rate,
        "greedy_before": before.greedy.success_rate,
        "greedy_after": after.greedy.success_rate,
        "sampled_after_by_turn_limit": {str(turns): each.success_rate for turns, each in after.by_turns.items()},
        "sampled_after_without_and_with_busy_error": success_split(after.sampled.episodes),
        "greedy_after_without_and_with_busy_error": success_split(after.greedy.episodes),
        "episodes_evaluated": len(after.sampled.episodes),
        "failed_evaluation_episodes": {"before": before.failures, "after": after.failures},
        "train_steps": report.train_steps,
        "train_episodes": report.episodes,
        "sampled_tokens": report.sampled_tokens,
        "trained_tokens": report.trained_tokens,
        "wasted_tokens": dict(report.wasted_tokens),
        "max_staleness": report.max_staleness,
        "max_trained_staleness": report.max_trained_staleness,
        "mean_staleness": report.mean_staleness,
        "dropped_groups": sum(report.dropped_groups.values()),
        "zero_variance_groups": report.zero_variance_groups,
        "failed_episodes": dict(report.failed_episodes),
        "max_logprob_difference": report.max_logprob_difference,
        "interrupted_tokens": report.interrupted_tokens,
        "max_interrupted_difference": report.max_interrupted_difference,
        "max_probe_difference": report.max_probe_difference,
        "trainer_wait_seconds": report.trainer_wait_seconds,
        "rollout_wait_seconds": report.rollout_wait_seconds,
        "pause_seconds": report.pause_seconds,
        "checkpoint": report.checkpoint,
    }


def print_table(
    console: Console, before: Evaluations, after: Evaluations, report: RunReport, summary: Mapping[str, Any]
) -> None:
    """Print held-out success before and after, by busy error and by turn limit, and the run's totals."""
    count = len(after.sampled.episodes)
    table = Table(title=f"success on {count} held-out tasks", title_justify="left")
    table.add_column("")
    for column in ("warm start", "after RL"):
        table.add_column(column, justify="right")
    for label, first, second in (("sampled", before.sampled, after.sampled), ("greedy", before.greedy, after.greedy)):
        table.add_row(label, rate_text(first.success_rate), rate_text(second.success_rate), style="bold")
        for part, calm_or_busy in (("no busy error", 0), ("had a busy error", 1)):
            values = [success_split(each.episodes)[calm_or_busy] for each in (first, second)]
            table.add_row(f"  {part}", *map(rate_text, values))
    for turns, each in after.by_turns.items():
        same = before.by_turns.get(turns)
        table.add_row(
            f"sampled, at most {turns} turn(s)", rate_text(same.success_rate if same else None), rate_text(each.success_rate)
        )
    console.print(table)
    for when, failures in (("warm start", before.failures), ("after RL", after.failures)):
        if failures:
            console.print(f"{when}: {sum(failures.values())} evaluation episodes failed and are in no rate: {failures}")
    minutes = summary["wall_seconds"] / 60
    console.print(
        f"{minutes:.1f} minutes in all, {summary['rl_seconds'] / 60:.1f} of them reinforcement learning: "
        f"{report.train_steps} steps, {report.episodes} episodes, {report.sampled_tokens} tokens sampled, "
        f"{report.trained_tokens} trained"
    )
    difference = report.max_logprob_difference
    console.print(
        f"staleness of trained tokens: mean {report.mean_staleness:.2f}, largest {report.max_trained_staleness} (bound "
        f"{report.max_staleness}); largest log-prob difference server - trainer: "
        + ("not measured" if difference is None else f"{difference:.1e} nats")
    )


def _share_true(values: Sequence[bool]) -> float | None:
    return sum(values) / len(values) if values else None


def rate_text(value: float | None) -> str:
    """Return a rate as text; `-` where there is none."""
    return "-" if value is None else f"{value:.3f}"
