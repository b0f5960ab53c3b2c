"""The numbers a demo run ends with: the table on the terminal and the fields of summary.json.

Invariant: every figure is computed from recorded episodes or the run report, and is unrounded in the file. Success rates are
over the episodes that did not fail, and null if all failed; the number of failed episodes is beside them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from agentrl.engine.report import RunReport
from agentrl.episode.summary import is_success
from agentrl.types import Trajectory
from agentrl_workflows.demo.evaluations import Evaluations
from agentrl_workflows.demo.recipe import DemoRecipe


def success_split(episodes: Sequence[Trajectory], metric: str) -> tuple[float | None, float | None]:
    """Return the success rates of episodes without and with a metric above 0, excluding failures, or None."""
    done = [episode for episode in episodes if episode.failure is None]
    having = [is_success(episode) for episode in done if episode.metrics.get(metric, 0) > 0]
    without = [is_success(episode) for episode in done if not episode.metrics.get(metric, 0) > 0]
    return (_share_true(without), _share_true(having))


def mean_metric(evaluations: Evaluations, metric: str) -> float | None:
    """Return the mean of a metric over the sampled episodes that did not fail, or None; one without it counts as 0."""
    done = [episode for episode in evaluations.sampled.episodes if episode.failure is None]
    return sum(episode.metrics.get(metric, 0.0) for episode in done) / len(done) if done else None


def summary_fields(recipe: DemoRecipe, before: Evaluations, after: Evaluations, report: RunReport) -> dict[str, Any]:
    """Return the fields of summary.json, without the times."""
    limit = f"by_{recipe.limit_unit}_limit"
    fields: dict[str, Any] = {
        "sampled_before": before.sampled.success_rate,
        "sampled_after": after.sampled.success_rate,
        "greedy_before": before.greedy.success_rate,
        "greedy_after": after.greedy.success_rate,
        f"sampled_before_{limit}": {str(value): each.success_rate for value, each in before.by_limit.items()},
        f"sampled_after_{limit}": {str(value): each.success_rate for value, each in after.by_limit.items()},
    }
    if split := recipe.split:
        for kind, each in (("sampled", after.sampled), ("greedy", after.greedy)):
            fields[f"{kind}_after_without_and_with_{split.field}"] = success_split(each.episodes, split.metric)
    for metric in recipe.metrics:
        fields[f"{metric}_before"], fields[f"{metric}_after"] = (mean_metric(each, metric) for each in (before, after))
    return fields | {
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
    console: Console,
    recipe: DemoRecipe,
    before: Evaluations,
    after: Evaluations,
    report: RunReport,
    summary: Mapping[str, Any],
) -> None:
    """Print held-out success before and after, by the recipe's split and by limit, and the run's totals."""
    count = len(after.sampled.episodes)
    table = Table(title=f"success on {count} held-out tasks", title_justify="left")
    table.add_column("")
    for column in (recipe.start, "after RL"):
        table.add_column(column, justify="right")
    for label, first, second in (("sampled", before.sampled, after.sampled), ("greedy", before.greedy, after.greedy)):
        table.add_row(label, rate_text(first.success_rate), rate_text(second.success_rate), style="bold")
        if split := recipe.split:
            columns = [success_split(each.episodes, split.metric) for each in (first, second)]
            for part, values in zip((split.without, split.having), zip(*columns, strict=True), strict=True):
                table.add_row(f"  {part}", *map(rate_text, values))
    for limit, each in after.by_limit.items():
        same = before.by_limit.get(limit)
        label = f"sampled, at most {limit} {recipe.limit_unit}(s)"
        table.add_row(label, rate_text(same.success_rate if same else None), rate_text(each.success_rate))
    for metric, label in recipe.metrics.items():
        table.add_row(label, *(rate_text(mean_metric(each, metric)) for each in (before, after)))
    console.print(table)
    for when, failures in ((recipe.start, before.failures), ("after RL", after.failures)):
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
