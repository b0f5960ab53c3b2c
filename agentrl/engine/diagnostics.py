"""Statistics of groups: how often K episodes of a task succeed, what a majority answers, and how advantages are spread.

Invariant: a failed episode has no result and counts nowhere. A statistic over nothing has no key. Right is what
`agentrl.episode.summary.is_success` says.

`pass_at.K` is the unbiased estimate of the chance that at least one of K episodes of a task succeeds, 1 - C(n - c, K) /
C(n, K) for c successes among n episodes (Chen et al. 2021, arXiv 2107.03374, equation 1), averaged over the tasks with at
least K results. `majority_rate` is the share of tasks whose most frequent answer is right (Wang et al. 2022, arXiv
2203.11171), over the tasks for which a workflow named answers by `client.final_answer`.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np

from agentrl.episode.answers import normal_text, read_number
from agentrl.episode.summary import is_success, name_part
from agentrl.types import StopReason, Trajectory, Turn

MOST_NAMES = 32
"""Roles, and players, with figures of their own; the less frequent ones are `others` together."""
_Named: TypeAlias = tuple[str, float]


def pass_at(k: int, episodes: int, right: int) -> float:
    """Return the unbiased estimate of the chance that one of `k` episodes succeeds, from `right` among `episodes` >= k."""
    return 1.0 - math.comb(episodes - right, k) / math.comb(episodes, k)


def majority(episodes: Sequence[Trajectory]) -> float | None:
    """Return the rightness of the most frequent answer, 0 to 1; None where no episode that ended has an answer.

    Answers are compared as numbers, or else as text without case, white space and punctuation. Where answers are equally
    frequent, and where episodes with one answer differ in their success, it is the mean.
    """
    verdicts: dict[object, list[bool]] = defaultdict(list)
    for episode in episodes:
        if episode.failure is None and episode.answer is not None:
            verdicts[_comparable(episode.answer)].append(is_success(episode))
    if not verdicts:
        return None
    votes = max(map(len, verdicts.values()))
    return float(np.mean([np.mean(each) for each in verdicts.values() if len(each) == votes]))


def task_outcomes(groups: Iterable[Sequence[Trajectory]]) -> dict[str, float]:
    """Return `majority_rate`, and `pass_at.K` for powers of two up to the largest group, if one has 2 results."""
    played = [[episode for episode in group if episode.failure is None] for group in groups]
    largest = max(map(len, played), default=0)
    if largest < 2:
        return {}
    counts = [(len(group), sum(map(is_success, group))) for group in played]
    found: dict[str, float] = {}
    for k in (1 << power for power in range(largest.bit_length())):
        found[f"pass_at.{k}"] = float(np.mean([pass_at(k, n, right) for n, right in counts if n >= k]))
    votes = [vote for group in played if (vote := majority(group)) is not None]
    return found | ({"majority_rate": float(np.mean(votes))} if votes else {})


def advantage_metrics(episodes: Iterable[Trajectory], advantages: Iterable[Sequence[float]]) -> dict[str, float]:
    """Return mean, standard deviation and share above 0 of the turns' advantages, of all and by role and player.

    Turns that are never trained do not count: those at temperature 0, and those that the run file leaves out.
    """
    every: list[float] = []
    roles: list[_Named] = []
    players: list[_Named] = []
    for episode, values in zip(episodes, advantages, strict=True):
        for turn, value in zip(episode.turns, values, strict=True):
            if turn.in_loss:
                every.append(float(value))
                roles.append((turn.role, float(value)))
                players.append((turn.player, float(value)))
    return _spread(every, "") | _by_name(roles, "role") | _by_name(players, "player")


def speaker_metrics(episodes: Sequence[Trajectory]) -> dict[str, float]:
    """Return figures of turns: by role and program, from prefix caches, left out, given up, and sampled in part."""
    turns = [turn for episode in episodes for turn in episode.turns]
    figures: dict[str, float] = {}
    for name, tokens in _values_by_name([(turn.role, float(len(turn.output_ids))) for turn in turns]).items():
        figures[f"turns_mean_by_role.{name}"] = len(tokens) / len(episodes)
        if any(tokens):  # the ids at an endpoint of others are not known
            figures[f"output_tokens_mean_by_role.{name}"] = math.fsum(tokens) / len(episodes)
    forks = _values_by_name([(turn.client, float(turn.fork is not None)) for turn in turns])
    figures |= {f"forks_by_client.{name}": math.fsum(found) for name, found in forks.items() if any(found)}
    figures |= _cached_shares(episodes)
    given_up = [turn for turn in turns if turn.stop_reason == StopReason.ABORT]
    counts = {
        "left_out_turns": sum(turn.left_out for turn in turns),
        "aborted_turns": len(given_up),
        "aborted_tokens": sum(len(turn.output_ids) for turn in given_up),
        "truncated_sampling_tokens": sum(len(turn.output_ids) for turn in turns if turn.truncated_by),
    }
    return figures | {name: float(count) for name, count in counts.items() if count}


def _cached_shares(episodes: Sequence[Trajectory]) -> dict[str, float]:
    """Return the share of prompt tokens that prefix caches held, of all turns and by their number, and the lost caches."""
    cached, prompts, lost = Counter[str](), Counter[str](), 0
    for episode in episodes:
        ends: list[int] = []
        for number, turn in enumerate(episode.turns):
            prompt = len(turn.context_ids) + (0 if turn.parent is None else ends[turn.parent])
            ends.append(prompt + len(turn.output_ids))
            if turn.cached_tokens is not None and prompt:
                lost += _lost_cache(episode, turn, ends)
                first = 1 << max(0, number.bit_length() - 1) if number else 0
                label = f"{first}" if first < 2 else f"{first}_to_{2 * first - 1}"
                for name in ("cached_share", f"cached_share_by_turn.{label}"):
                    cached[name] += turn.cached_tokens
                    prompts[name] += prompt
    shares = {name: cached[name] / prompts[name] for name in prompts}
    return shares | ({"lost_caches": float(lost)} if shares else {})


def _lost_cache(episode: Trajectory, turn: Turn, ends: Sequence[int]) -> bool:
    """Return whether the cache held less than half of what the turn continues, although the weights were the same."""
    if turn.parent is None or not turn.spans or not (spans := episode.turns[turn.parent].spans):
        return False
    return turn.spans[0].version == spans[-1].version and 2 * (turn.cached_tokens or 0) < ends[turn.parent]


def _by_name(named: Sequence[_Named], kind: str) -> dict[str, float]:
    """Return the figures of each name; nothing where no turn has one."""
    figures: dict[str, float] = {}
    for name, values in _values_by_name(named).items():
        figures |= _spread(values, f"_by_{kind}.{name}")
    return figures


def _values_by_name(named: Sequence[_Named]) -> dict[str, list[float]]:
    """Return the values of each name as a part of a key, the less frequent ones together; none where no turn has one."""
    values: dict[str, list[float]] = defaultdict(list)
    for name, value in named:
        values[name_part(name) or "unnamed"].append(value)
    if set(values) <= {"unnamed"}:
        return {}
    kept = sorted(values, key=lambda name: (-len(values[name]), name))[:MOST_NAMES]
    others = [value for name, some in values.items() if name not in kept for value in some]
    return {name: values[name] for name in sorted(kept)} | ({"others": others} if others else {})


def _spread(values: Sequence[float], suffix: str) -> dict[str, float]:
    if not values:
        return {}
    numbers = np.array(values)
    return {
        f"advantage_mean{suffix}": float(numbers.mean()),
        f"advantage_std{suffix}": float(numbers.std()),
        f"advantage_positive_share{suffix}": float((numbers > 0).mean()),
    }


def _comparable(answer: str) -> object:
    number = read_number(answer)
    return number if number is not None else normal_text(answer) or answer.strip()
