"""Checks at the door: what becomes part of a trajectory is right, or is refused by name.

Invariant: a reward that passed is a finite number; a turn that passed agrees with itself and with its parent.
"""

from __future__ import annotations

import math

import numpy as np

from agentrl.errors import InvariantError, RewardError
from agentrl.types import Turn

MAX_REWARD = 1e30
"""Largest size of a reward."""


def check_reward(value: object, where: str) -> float:
    """Return `value` as a finite float.

    Args:
        value: what a workflow returned or passed to `client.reward`; bool, int and float are rewards.
        where: names the place in the message.

    Raises:
        RewardError: for anything else, and for NaN and infinities.

    Example:
        >>> check_reward(True, "run")
        1.0
        >>> check_reward("1.0", "run")
        Traceback (most recent call last):
        ...
        agentrl.errors.RewardError: run: a reward must be a finite number, got str '1.0'; ...
    """
    # Sums and squares of rewards must stay finite too; an int may be too large to be a float at all.
    number = float(value) if isinstance(value, np.floating) else value  # a limit is not a limit as a float16
    if isinstance(number, (bool, int, float, np.integer)) and abs(number) <= MAX_REWARD:
        return float(number)
    raise RewardError(
        f"{where}: a reward must be a finite number, got {type(value).__name__} {repr(value)[:40]}; "
        "return a float from run(), or raise if the episode has no result"
    )


def check_turn(turn: Turn, parent: Turn | None, where: str) -> None:
    """Check the invariants of a turn as it is appended.

    Lengths equal, log-probs finite and not positive, spans contiguous, versions non-decreasing along the branch, reward
    finite. Cost: two vectorized passes over the new tokens.

    Raises:
        InvariantError: naming `where` and the first thing that does not hold.
    """
    count, logprobs = len(turn.output_ids), turn.output_logprobs
    if len(logprobs) != count:
        raise InvariantError(f"{where}: {count} output ids but {len(logprobs)} log-probs")
    # NaN is neither above nor below anything.
    if count and not (np.minimum.reduce(logprobs) > -math.inf and np.maximum.reduce(logprobs) <= 1e-4):
        head = logprobs.tolist()[:8]
        raise InvariantError(f"{where}: log-probs must be finite and at most 0, got {head}...")
    at = 0
    version = parent.spans[-1].version if parent is not None and parent.spans else -1
    for span in turn.spans:
        if span.start != at or span.end <= span.start:
            raise InvariantError(f"{where}: version spans must be contiguous from 0, got {turn.spans}")
        if span.version < version:
            raise InvariantError(f"{where}: policy version went back from {version} to {span.version} along a branch")
        at, version = span.end, span.version
    if at != count:
        raise InvariantError(f"{where}: version spans cover {at} of {count} output tokens")
    if turn.reward is not None and not math.isfinite(turn.reward):
        raise InvariantError(f"{where}: reward {turn.reward} is not finite")
