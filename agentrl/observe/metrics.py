"""The statistics of episodes behind the keys of `metrics.jsonl`, which `agentrl.observe.metric_keys` lists.

Invariant: a statistic over no episodes has no key. A failed episode has no result, so rates and returns leave it out.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from agentrl.types import Int32Array, StopReason, Trajectory

MetricValue = float | int | str | bool | None
_LIMITS = frozenset({StopReason.TURN_LIMIT, StopReason.TOKEN_LIMIT, StopReason.CONTEXT_LIMIT, StopReason.DEADLINE})


def is_success(episode: Trajectory) -> bool:
    """Return whether an episode reached its goal.

    Where the workflow recorded `success`, the episode succeeded if that is at least 0.5; otherwise, if its final reward is
    positive. A failed episode did not succeed.
    """
    if episode.failure is not None:
        return False
    recorded = episode.metrics.get("success")
    return recorded >= 0.5 if recorded is not None else (episode.final_reward or 0.0) > 0.0


def episode_metrics(episodes: Sequence[Trajectory]) -> dict[str, float]:
    """Return how many episodes, their success rate, returns, turns, output tokens, limits, and means of `workflow.NAME`.

    Success rate, returns, their parts and the figures by outcome are over the episodes that did not fail, and left out where
    all did; the rest is over all. Nothing but `episodes` when there are none.

    Example:
        >>> episode_metrics([])
        {'episodes': 0}
    """
    result: dict[str, float] = {"episodes": len(episodes)}
    if not episodes:
        return result
    if done := [e for e in episodes if e.failure is None]:
        returns = [e.episode_return for e in done]
        result["success_rate"] = float(np.mean([is_success(e) for e in done]))
        result["return_mean"], result["return_std"] = float(np.mean(returns)), float(np.std(returns))
        result |= _reward_parts(done) | _by_outcome(done)
    result["turns_mean"] = float(np.mean([len(e.turns) for e in episodes]))
    if any(e.num_output_tokens for e in episodes):  # the ids at an endpoint of others are not known
        result["output_tokens_mean"] = float(np.mean([e.num_output_tokens for e in episodes]))
    limits = Counter(f"limits.{e.stop_reason}" for e in episodes if e.failure is None and e.stop_reason in _LIMITS)
    result |= dict(sorted(limits.items()))
    recorded: dict[str, list[float]] = defaultdict(list)
    for episode in episodes:
        for name, value in episode.metrics.items():
            recorded[name].append(value)
    result |= {f"workflow.{name}": float(np.mean(values)) for name, values in sorted(recorded.items())}
    return result


def name_part(name: str) -> str:
    """Return a name that a workflow chose as the part of a key: what trackers refuse in a key becomes `_`.

    Example:
        >>> name_part("critic #1")
        'critic _1'
    """
    return re.sub(r"[^\w -]", "_", name, flags=re.ASCII)


def is_truncated(episode: Trajectory) -> bool:
    """Return whether a limit cut a turn of the episode, or the episode itself."""
    return episode.stop_reason in _LIMITS or any(turn.stop_reason == StopReason.LENGTH for turn in episode.turns)


def uniform_outcome(episodes: Sequence[Trajectory]) -> str | None:
    """Return `right` where all episodes succeeded, `wrong` where none did; else None."""
    verdicts = set(map(is_success, episodes))
    return None if len(verdicts) != 1 else "right" if verdicts == {True} else "wrong"


def _reward_parts(done: Sequence[Trajectory]) -> dict[str, float]:
    """Return the mean of each part of the return; an episode without a part counts as 0."""
    sums: dict[str, float] = defaultdict(float)
    for episode in done:
        for name, value in episode.reward_parts.items():
            sums[name_part(name)] += value
    return {f"reward_parts.{name}": total / len(done) for name, total in sorted(sums.items())}


def _by_outcome(done: Sequence[Trajectory]) -> dict[str, float]:
    """Return turns, output tokens and truncation of the episodes that succeeded, and of those that did not."""
    result: dict[str, float] = {}
    are_tokens_known = any(e.num_output_tokens for e in done)
    for outcome in ("right", "wrong"):
        if some := [episode for episode in done if is_success(episode) == (outcome == "right")]:
            result[f"turns_mean_by_outcome.{outcome}"] = float(np.mean([len(e.turns) for e in some]))
            if are_tokens_known:
                result[f"output_tokens_mean_by_outcome.{outcome}"] = float(np.mean([e.num_output_tokens for e in some]))
            result[f"truncated_share_by_outcome.{outcome}"] = float(np.mean([is_truncated(e) for e in some]))
    return result


def history_counts(episodes: Iterable[Trajectory]) -> dict[str, int]:
    """Return how many turns forked, as `forks.REASON`, and how many kept reasoning, as `kept_thinking_turns`."""
    counts: dict[str, int] = defaultdict(int)
    for episode in episodes:
        for turn in episode.turns:
            if turn.fork is not None:
                counts[f"forks.{turn.fork}"] += 1
            if turn.kept_thinking:
                counts["kept_thinking_turns"] += 1
    return dict(counts)


def staleness_metrics(staleness: Int32Array) -> dict[str, float]:
    """Return mean, p50, p99 and max of the staleness of trained tokens, [tokens] int32; empty without tokens."""
    if not len(staleness):
        return {}
    p50, p99 = np.percentile(staleness, [50, 99], method="higher")
    return {
        "staleness_mean": float(staleness.mean()),
        "staleness_p50": float(p50),
        "staleness_p99": float(p99),
        "staleness_max": float(staleness.max()),
    }


def version_range(episodes: Iterable[Trajectory]) -> tuple[int, int] | None:
    """Return the lowest and highest policy version among the sampled tokens; None when nothing was sampled."""
    versions = [span.version for e in episodes for turn in e.turns for span in turn.spans]
    return (min(versions), max(versions)) if versions else None


def prefixed(prefix: str, values: Mapping[str, float]) -> dict[str, float]:
    """Return `values` with `prefix.` before each key."""
    return {f"{prefix}.{key}": value for key, value in values.items()}
