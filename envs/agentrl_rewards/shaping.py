r"""Rewards for length and form, to be added to a reward for being right.

Invariant: every function is pure, bounded as its docstring says, and linear in the length of the text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from agentrl.errors import ConfigError
from agentrl_rewards.extract import boxed


def overlong_penalty(length: int, *, max_length: int, buffer: int) -> float:
    """Return 0 up to `max_length - buffer`, then less and less, down to -1 at `max_length`, in any unit, mostly tokens.

    The soft overlong punishment of DAPO (arXiv 2503.14476, equation 13).

    Example:
        >>> [overlong_penalty(length, max_length=100, buffer=20) for length in (80, 90, 100, 500)]
        [0.0, -0.5, -1.0, -1.0]
    """
    if not 1 <= buffer <= max_length:
        raise ConfigError(f"overlong_penalty: buffer must be from 1 to max_length = {max_length}, got {buffer}")
    return max(-1.0, min(0.0, (max_length - buffer - length) / buffer))


def cosine_length_reward(
    correct: bool,
    length: int,
    *,
    max_length: int,
    right: tuple[float, float] = (1.0, 0.5),
    wrong: tuple[float, float] = (-1.0, -0.5),
) -> float:
    """Return a reward that moves with the length along half a cosine wave, from its first to its second value.

    `right` and `wrong` are the values at length 0 and from `max_length` on (arXiv 2502.03373, section 3.1).

    Example:
        >>> [round(cosine_length_reward(True, length, max_length=100), 2) for length in (0, 50, 100, 500)]
        [1.0, 0.75, 0.5, 0.5]
    """
    if max_length <= 0:
        raise ConfigError(f"cosine_length_reward: max_length must be positive, got {max_length}")
    first, last = right if correct else wrong
    share = min(1.0, max(0.0, length / max_length))
    return last + (first - last) * (1 + math.cos(math.pi * share)) / 2


def repetition_penalty(units: Sequence[object], *, size: int = 4) -> float:
    """Return minus the share of n-grams of `size` words or token ids that stood in the text before.

    Example:
        >>> repetition_penalty("a b a b a b".split(), size=2)
        -0.6
    """
    if size < 1:
        raise ConfigError(f"repetition_penalty: size must be positive, got {size}")
    count = len(units) - size + 1
    if count < 1:
        return 0.0
    different = len({tuple(units[start : start + size]) for start in range(count)})
    return -(1 - different / count) if different < count else 0.0


def has_sections(response: str, *names: str) -> bool:
    """Return whether a response is exactly these tagged sections, once each and in this order, none of them empty.

    Example:
        >>> has_sections("<think>2 + 2</think> <answer>4</answer>", "think", "answer")
        True
    """
    tags = [f"<{slash}{name}>" for name in names for slash in ("", "/")]
    tags_in_response = re.findall("|".join(re.escape(tag) for tag in tags), response)
    if not tags or tags_in_response != tags:
        return False
    parts = re.split("|".join(re.escape(tag) for tag in tags), response)
    return all(bool(part.strip()) == (at % 2 == 1) for at, part in enumerate(parts))


def has_one_box(response: str) -> bool:
    r"""Return whether a response gives exactly one complete answer in `\boxed{...}`."""
    return response.count("\\boxed") == 1 and boxed(response) is not None
