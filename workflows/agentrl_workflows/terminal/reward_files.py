"""The reward that the tests of a task wrote, in `reward.json` or in `reward.txt`, as Harbor reads it.

Invariant: a reward here is the one that Harbor takes, where Harbor takes one. Two files that name different rewards are an
error, although Harbor takes `reward.json`: a program of the agent that the tests run could have written it. So are named
numbers without a name for the reward: a mean of counts rewards nothing that an agent does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Final, NamedTuple, cast

REWARD_TEXT: Final = "/logs/verifier/reward.txt"
REWARD_JSON: Final = "/logs/verifier/reward.json"
REWARD_NAME: Final = "reward"
_NEXT_NAMES: Final = ("score", "accuracy")
"""Names of a number that is the reward where no other file and no other name says it."""


class NamedReward(NamedTuple):
    """What reward files say."""

    reward: float
    parts: Mapping[str, float]
    """All named numbers."""


def read_reward(text: bytes | None, structure: bytes | None) -> NamedReward:
    """Return the reward in the contents of `reward.txt` and `reward.json`; None: there is no such file.

    An empty file says nothing. A JSON file holds a number, or named ones; true is 1, and what is neither number nor boolean
    is a remark. The reward is the number called `reward`, or else that of `reward.txt`, or else `score` or `accuracy`.

    Raises:
        ValueError: there is no such number, one is not finite, or the files name two.

    Example:
        >>> read_reward(b"0.5", None).reward, read_reward(b"", b'{"reward": true, "style": 0.2}').reward
        (0.5, 1.0)
    """
    written = _number_of_text(text) if text is not None and text.strip() else None
    if structure is None or not structure.strip():
        if written is None:
            raise ValueError(f"it wrote no number to {REWARD_TEXT} or {REWARD_JSON}")
        return NamedReward(written, {})
    named, parts = _named_reward(structure)
    if named is not None and written is not None and named != written:
        raise ValueError(f"{REWARD_TEXT} says {written:g} and {REWARD_JSON} {named:g}; let tests/test.sh write one of them")
    for reward in (named, written, *(parts.get(name) for name in _NEXT_NAMES)):
        if reward is not None:
            return NamedReward(reward, parts)
    got = repr(structure.decode(errors="replace"))[:200]
    raise ValueError(
        f"{REWARD_JSON}: expected a number called reward, score or accuracy, got {got}; a mean "
        f"of others would be no reward: let tests/test.sh write one as `reward`, or to {REWARD_TEXT}"
    )


def _named_reward(structure: bytes) -> tuple[float | None, dict[str, float]]:
    """Return the number of `reward.json` that is the reward, if one is, and all that have names."""
    try:
        value: object = json.loads(structure)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{REWARD_JSON}: expected JSON, got {structure[:80]!r}: {error}") from None
    if not isinstance(value, dict):
        return _finite_number(value, REWARD_JSON), {}
    values = cast("dict[str, object]", value)
    if REWARD_NAME in values:
        _finite_number(values[REWARD_NAME], f"{REWARD_JSON}: {REWARD_NAME}")
    parts = {name: _finite_number(part, REWARD_JSON) for name, part in values.items() if isinstance(part, (int, float))}
    return parts.get(REWARD_NAME), parts


def _number_of_text(text: bytes) -> float:
    said = text.decode(errors="replace").strip()
    try:
        number = float(said)
    except ValueError:
        raise ValueError(f"{REWARD_TEXT}: expected a number, got {said!r:.80}") from None
    return _finite_number(number, REWARD_TEXT)


def _finite_number(value: object, where: str) -> float:
    try:
        number = float(value) if isinstance(value, (int, float)) else None
    except OverflowError:
        number = math.inf
    if number is None:
        raise ValueError(f"{where}: expected a number, got {value!r:.80}")
    if not math.isfinite(number):
        raise ValueError(f"{where}: expected a finite number, got {value!r:.80}")
    return number
