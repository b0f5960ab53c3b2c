"""The words of a script: what a scripted server is asked, what it answers, and how it fails on demand.

Invariant: everything here is data; the same script gives the same ids, log-probs and failures every time.

Where a scripted reply ends: the first stop in it, as on a real server, or else its length.

Invariant: after each id a stop string is looked for before a stop token, and a stop token before the length; the id that
completes the stop is kept. Pure, no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import anyio
import numpy as np

from agentrl.errors import ConfigError
from agentrl.inference.backend import SamplingParams
from agentrl.servers.engine import EngineSampling
from agentrl.types import Float32Array, Int32Array

TextEncoder = Callable[[str], Sequence[int]]
TextDecoder = Callable[[Sequence[int]], str]


class End(NamedTuple):
    """Why and where a reply ends."""

    num_ids: int
    """How many of the reply's ids are given."""
    kind: Literal["stop", "length"]
    matched: int | str | None
    """The stop token or stop string, for `stop`."""


class ReplyText(NamedTuple):
    """What is known of the text of a reply's ids."""

    text: str | None = None
    """The script's, where it answers with text."""
    encode: TextEncoder | None = None
    decode: TextDecoder | None = None


def end_of(ids: Sequence[int], sampling: SamplingParams, *, eos_id: int | None, text: ReplyText) -> End:
    """Return where a reply ends; one that no stop ends was cut off, `length`, be it by `max_new_tokens` or by its script.

    Args:
        ids: the whole reply, [T], T >= 1.
        sampling: `ignore_eos` silences `stop_token_ids` too, and no stop token counts before `min_new_tokens`, as at SGLang.
        eos_id: the model's own stop token.
        text: for stop strings.

    Raises:
        ConfigError: for stop strings and ids whose text is not known.

    Example:
        >>> sampling = SamplingParams(max_new_tokens=3, stop_token_ids=(7,))
        >>> end_of([5, 7, 9], sampling, eos_id=9, text=ReplyText())
        End(num_ids=2, kind='stop', matched=7)
        >>> end_of([5, 6], sampling, eos_id=9, text=ReplyText())
        End(num_ids=2, kind='length', matched=None)
    """
    least = sampling.min_new_tokens if isinstance(sampling, EngineSampling) else 0
    tokens = set[int | None]() if sampling.ignore_eos else {eos_id, *sampling.stop_token_ids}
    at = next((at for at, token in enumerate(ids, 1) if token in tokens and at > least), None)
    string = _string_end(ids, sampling.stop, text) if sampling.stop else None
    limit = min(len(ids), sampling.max_new_tokens)
    if string is not None and string.num_ids <= min(limit, at or limit):
        return string
    return End(limit, "length", None) if at is None or at > limit else End(at, "stop", ids[at - 1])


def _string_end(ids: Sequence[int], stops: Sequence[str], text: ReplyText) -> End | None:
    if text.decode is not None:
        window = max(len(stop.encode()) for stop in stops) + 1
        for count in range(1, len(ids) + 1):
            tail = text.decode(ids[max(0, count - window) : count])
            if (found := _first(stops, tail)) is not None:
                return End(count, "stop", found)
        return None
    if text.text is None:
        raise ConfigError(
            f"the call has the stop strings {list(stops)} and the script answers with ids, whose text the scripted server "
            "does not know: give it decode=, or answer with text"
        )
    if text.encode is None:
        return None  # the text is empty, or could not be played at all
    for end in range(len(text.text) + 1):
        if (found := _first(stops, text.text[:end])) is not None:
            head = list(text.encode(text.text[:end]))
            if head == list(ids[: len(head)]):  # else the stop ends in the middle of an id
                return End(max(len(head), 1), "stop", found)
    return None


def _first(stops: Sequence[str], text: str) -> str | None:
    return next((stop for stop in stops if stop in text), None)


class Fault(StrEnum):
    """A way to fail. Each ends in a named error at the client, never in a hang."""

    REFUSE = "refuse"
    """The connection is refused."""
    DIE = "die"
    """The connection is closed after the first token."""
    HANG = "hang"
    """No answer comes, until the call is cancelled or its deadline passes."""
    BAD_REQUEST = "bad_request"
    """HTTP 400."""
    SERVER_ERROR = "server_error"
    """HTTP 500."""
    NOT_JSON = "not_json"
    """HTTP 200 with a web page."""
    SHORT_LOGPROBS = "short_logprobs"
    """One log-prob fewer than ids."""
    MISMATCHED_IDS = "mismatched_ids"
    """The log-probs belong to other ids."""
    OUTSIDE_VOCABULARY = "outside_vocabulary"
    """The last id is the vocabulary size."""
    NAN_LOGPROB = "nan_logprob"
    """The last log-prob is not a number; on the wire that is null."""
    POSITIVE_LOGPROB = "positive_logprob"
    """The last log-prob is above 0."""
    EMPTY = "empty"
    """No ids, though the call stopped by itself."""
    SPAN_GAP = "span_gap"
    """The version spans miss the last id."""
    NO_FINISH = "no_finish"
    """No finish reason."""
    ABORT = "abort"
    """The server aborts the request half-way; the client sends the rest again."""
    WRONG_WEIGHTS = "wrong_weights"
    """Control calls only: checksums and scores are those of other weights."""
    RESET_MID_BODY = "reset_mid_body"
    """HTTP only: the connection breaks in the middle of the reply's body. In process: as DIE."""
    SLOW_DRIP = "slow_drip"
    """HTTP only: half of the body comes, and then nothing. In process: as HANG."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Hold:
    """Stops a reply before its token `at`, until `release` is set.

    Example: swap weights in the middle of a sequence.
        hold = Hold(at=3)
        ...  # a call whose reply has holds=(hold,)
        await hold.reached.wait()
        await server.update_weights(publication)
        hold.release.set()
    """

    at: int = 0
    reached: anyio.Event = field(default_factory=anyio.Event)
    """Set when the reply has come this far."""
    release: anyio.Event = field(default_factory=anyio.Event)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedCall:
    """What the script is asked to answer."""

    index: int
    """How many calls the server got before; failed ones count."""
    turn: int
    """How many calls of this episode were answered before; over HTTP, where episodes are unknown, how many answers the
    context contains."""
    episode_id: str
    """Empty over HTTP."""
    request_id: str
    input_ids: Int32Array
    """[N] int32."""
    sampling: SamplingParams
    version: int
    """Of the server's weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedReply:
    """What the server answers."""

    output: str | Sequence[int] = ""
    """The ids, or text for the server's `encode`; text is followed by the end-of-turn id.

    It is cut as a real server's: after the first stop string or stop token of the call, or end-of-turn id, and at
    `max_new_tokens`. What no stop ends, such as ids without an end-of-turn id, was cut off: `StopReason.LENGTH`.
    """
    fault: Fault | None = None
    holds: tuple[Hold, ...] = ()
    logprobs: Sequence[float] | None = None
    """Nats, one for each id; `scripted_logprobs` by default."""


Script: TypeAlias = Callable[[ScriptedCall], "ScriptedReply | str | Sequence[int]"]


def scripted_logprobs(ids: Int32Array, version: int) -> Float32Array:
    """Return the log-probs a scripted server gives `ids[1:]`, [L-1] float32: a fixed function of id, predecessor, version.

    Example:
        >>> scripted_logprobs(np.array([1, 2, 3], np.int32), version=0).tolist() == [np.float32(-2.61), np.float32(-0.65)]
        True
    """
    mixed = (ids[:-1].astype(np.int64) * 31 + ids[1:].astype(np.int64) * 17 + version * 7) % 97
    return (-0.01 - mixed / 25).astype(np.float32)


def corrupt(body: dict[str, Any], fault: Fault | None, vocab_size: int) -> dict[str, Any]:
    """Return a reply to `/generate` with `fault` in it; faults that are not about its content leave it as it is."""
    meta = cast("dict[str, Any]", body["meta_info"])
    triples = cast("list[list[object]]", meta["output_token_logprobs"])
    ids = cast("list[int]", body["output_ids"])
    match fault:
        case Fault.SHORT_LOGPROBS:
            triples.pop()
        case Fault.MISMATCHED_IDS:
            triples[-1][1] = (ids[-1] + 1) % vocab_size
        case Fault.OUTSIDE_VOCABULARY:
            ids[-1] = vocab_size
            triples[-1][1] = vocab_size
        case Fault.NAN_LOGPROB:
            triples[-1][0] = None
        case Fault.POSITIVE_LOGPROB:
            triples[-1][0] = 0.5
        case Fault.EMPTY:
            ids.clear()
            triples.clear()
            meta["weight_versions"] = []
        case Fault.SPAN_GAP:
            meta["weight_versions"][-1]["end"] -= 1
        case Fault.NO_FINISH:
            meta["finish_reason"] = None
        case _:
            pass
    return body
