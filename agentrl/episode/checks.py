"""The checks of rewards, log-probs, version spans, declared branches and turns.

Invariant: a reward that passed is a finite number; a turn that passed agrees with itself and with its parent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np

from agentrl.episode.trajectory import Float32Array, Turn, VersionSpan
from agentrl.errors import InvariantError, RewardError

MAX_REWARD = 1e30
"""Largest absolute reward: sums over any episode and group then stay finite in float32."""


def check_reward(value: object, where: str) -> float:
    """Return `value`, a bool, int or float, as a finite float; `where` is the place that the message names.

    Raises:
        RewardError: the value has another type, is NaN, or is larger than `MAX_REWARD`.
    """
    # Sums and squares of rewards must stay finite, too; an int may be too large for a float.
    number = float(value) if isinstance(value, np.floating) else value  # as a float16 the limit would be infinite
    if isinstance(number, (bool, int, float, np.integer)) and abs(number) <= MAX_REWARD:
        return float(number)
    raise RewardError(
        f"{where}: a reward must be a finite number, got {type(value).__name__} {repr(value)[:40]}; "
        "return a float from run(), or call client.reward_final(value); raise if the episode has no result"
    )


def check_reward_parts(value: object, where: str) -> tuple[float, Mapping[str, float]]:
    """Return a reward and its named parts, numbers that add up to it; a plain number has none.

    Example:
        >>> check_reward_parts({"right": 1.0, "short": -0.25}, "run")
        (0.75, {'right': 1.0, 'short': -0.25})
    """
    if not isinstance(value, Mapping):
        return check_reward(value, where), {}
    given = cast("Mapping[object, object]", value)
    if not given or not all(isinstance(name, str) and name for name in given):
        raise RewardError(f"{where}: parts of a reward need names and numbers, got {repr(value)[:80]}")
    parts = {str(name): check_reward(part, f"{where}, part {name}") for name, part in given.items()}
    return check_reward(math.fsum(parts.values()), where), parts


def sound_logprobs(logprobs: Float32Array) -> bool:
    """Return whether all log-probs, at least one, are finite and at most 0 (up to rounding)."""
    # argmax and argmin return the place of a NaN if there is one, and take a third of the time of max and min.
    return logprobs.item(logprobs.argmax()) <= 1e-4 and logprobs.item(logprobs.argmin()) > -math.inf


def check_spans(spans: Sequence[VersionSpan], count: int, parent: Turn | None, where: object) -> None:
    """Check the version spans of an output of `count` tokens: contiguous, versions non-decreasing along the branch."""
    at = 0
    version = parent.spans[-1].version if parent is not None and parent.spans else -1
    for span in spans:
        if span.start != at or span.end <= span.start:
            raise InvariantError(f"{where}: version spans must be contiguous from 0, got {spans}")
        if span.version < version:
            raise InvariantError(f"{where}: policy version went back from {version} to {span.version} along a branch")
        at, version = span.end, span.version
    if at != count:
        raise InvariantError(f"{where}: version spans cover {at} of {count} output tokens")


def check_reward_time(turn: Turn, where: str) -> None:
    """Check that a turn's reward, if it has one, was set after its request was sent."""
    if (turn.reward is None) != (turn.rewarded_at is None) or not turn.sent_at >= 0:
        raise InvariantError(
            f"{where}: sent at {turn.sent_at}, with reward {turn.reward} set at {turn.rewarded_at}; expected a count of at "
            "least 0, and a time of the reward where there is a reward"
        )
    if turn.rewarded_at is not None and turn.rewarded_at <= turn.sent_at:
        raise InvariantError(f"{where}: its reward was set at {turn.rewarded_at}, before it was sent at {turn.sent_at}")


def check_turn(turn: Turn, parent: Turn | None, where: str) -> None:
    """Check the invariants of a turn: equal lengths, sound log-probs and spans, a finite reward set after the request."""
    count, logprobs = len(turn.output_ids), turn.output_logprobs
    if len(logprobs) != count:
        raise InvariantError(f"{where}: {count} output ids but {len(logprobs)} log-probs")
    if count and not sound_logprobs(logprobs):
        raise InvariantError(f"{where}: log-probs must be finite and at most 0, got {logprobs.tolist()[:8]}...")
    check_spans(turn.spans, count, parent, where)
    if turn.reward is not None and not math.isfinite(turn.reward):
        raise InvariantError(f"{where}: reward {turn.reward} is not finite")
    check_reward_time(turn, where)
