"""Where a scripted reply ends: the first stop in it, as on a real server, or else its length.

Invariant: after each id a stop string is looked for before a stop token, and a stop token before the length; the id that
completes the stop is kept. Pure, no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from agentrl.errors import ConfigError
from agentrl.inference.base import SamplingParams
from agentrl.inference.engine import EngineSampling

Encode = Callable[[str], Sequence[int]]
Decode = Callable[[Sequence[int]], str]


class End(NamedTuple):
    """Why and where a reply ends."""

    num_ids: int
    """How many of the reply's ids are given."""
    kind: Literal["stop", "length"]
    matched: int | str | None
    """The stop token or stop string, for `stop`."""


class Words(NamedTuple):
    """What is known of the text of a reply's ids."""

    text: str | None = None
    """The script's, where it answers with text."""
    encode: Encode | None = None
    decode: Decode | None = None


def end_of(ids: Sequence[int], sampling: SamplingParams, *, eos_id: int | None, words: Words) -> End:
    """Return where a reply ends; one that no stop ends was cut off, `length`, be it by `max_new_tokens` or by its script.

    Args:
        ids: the whole reply, [T], T >= 1.
        sampling: `ignore_eos` silences `stop_token_ids` too, and no stop token counts before `min_new_tokens`, as at SGLang.
        eos_id: the model's own stop token.
        words: for stop strings.

    Raises:
        ConfigError: for stop strings and ids whose text is not known.

    Example:
        >>> sampling = SamplingParams(max_new_tokens=3, stop_token_ids=(7,))
        >>> end_of([5, 7, 9], sampling, eos_id=9, words=Words())
        End(num_ids=2, kind='stop', matched=7)
        >>> end_of([5, 6], sampling, eos_id=9, words=Words())
        End(num_ids=2, kind='length', matched=None)
    """
    least = sampling.min_new_tokens if isinstance(sampling, EngineSampling) else 0
    tokens = set[int | None]() if sampling.ignore_eos else {eos_id, *sampling.stop_token_ids}
    at = next((at for at, token in enumerate(ids, 1) if token in tokens and at > least), None)
    string = _string_end(ids, sampling.stop, words) if sampling.stop else None
    limit = min(len(ids), sampling.max_new_tokens)
    if string is not None and string.num_ids <= min(limit, at or limit):
        return string
    return End(limit, "length", None) if at is None or at > limit else End(at, "stop", ids[at - 1])


def _string_end(ids: Sequence[int], stops: Sequence[str], words: Words) -> End | None:
    if words.decode is not None:
        window = max(len(stop.encode()) for stop in stops) + 1
        for count in range(1, len(ids) + 1):
            tail = words.decode(ids[max(0, count - window) : count])
            if (found := _first(stops, tail)) is not None:
                return End(count, "stop", found)
        return None
    if words.text is None:
        raise ConfigError(
            f"the call has the stop strings {list(stops)} and the script answers with ids, whose text the scripted server "
            "does not know: give it decode=, or answer with text"
        )
    if words.encode is None:
        return None  # the text is empty, or could not be played at all
    for end in range(len(words.text) + 1):
        if (found := _first(stops, words.text[:end])) is not None:
            head = list(words.encode(words.text[:end]))
            if head == list(ids[: len(head)]):  # else the stop ends in the middle of an id
                return End(max(len(head), 1), "stop", found)
    return None


def _first(stops: Sequence[str], text: str) -> str | None:
    return next((stop for stop in stops if stop in text), None)
