"""The vocabulary of scripts: the calls that a script answers, its replies, their faults, and where a reply ends.

Invariant: the same script gives the same ids, log-probs and failures every time. A reply ends at its first stop, as on a
real server: after each id a stop string wins over a stop token, a stop token wins over the length, and the id that completes
the stop is kept. Pure, no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NamedTuple, TypeAlias, TypedDict, cast

import anyio

from agentrl.errors import ConfigError
from agentrl.inference.backend import SamplingParams
from agentrl.servers.engine import EngineSampling
from agentrl.types import Int32Array

TextEncoder = Callable[[str], Sequence[int]]
TextDecoder = Callable[[Sequence[int]], str]


class ScriptSettings(TypedDict, total=False):
    """The settings of a script's playback that have defaults."""

    encode: TextEncoder | None
    """Turns the script's text into ids; needed only for scripts that answer with text."""
    decode: TextDecoder | None
    """Turns ids into text, control tokens included; needed only to find stop strings in a script's ids."""
    eos_id: int | None
    """The model's end token: it ends a reply wherever it occurs, and is appended to text."""
    version: int
    """Policy version of the initial weights."""


class End(NamedTuple):
    """The place and the cause of a reply's end."""

    num_ids: int
    """Number of the reply's ids that are returned."""
    kind: Literal["stop", "length"]
    matched: int | str | None
    """The stop token or stop string, for `stop`."""


class ReplyText(NamedTuple):
    """The known relations between a reply's ids and their text."""

    text: str | None = None
    """The script's answer, if it is text."""
    encode: TextEncoder | None = None
    decode: TextDecoder | None = None


def end_of(ids: Sequence[int], sampling: SamplingParams, *, eos_id: int | None, text: ReplyText) -> End:
    """Return where a reply ends; without a stop it ends with `length`, at `max_new_tokens` or after the script's last id.

    Args:
        ids: the whole reply, [T], T >= 1.
        sampling: as in SGLang, `ignore_eos` disables `stop_token_ids` too, and no stop token counts before `min_new_tokens`.
        eos_id: the model's own stop token.
        text: needed for stop strings.

    Raises:
        ConfigError: for stop strings, if the text of the ids is not known.

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
            f"the call has the stop strings {list(stops)}, but the script answers with ids and the scripted server cannot "
            "decode them: pass decode=, or answer with text"
        )
    if text.encode is None:
        return None  # the text is empty: the player refuses any other text without encode
    for end in range(len(text.text) + 1):
        if (found := _first(stops, text.text[:end])) is not None:
            head = list(text.encode(text.text[:end]))
            if head == list(ids[: len(head)]):  # else the stop ends in the middle of an id
                return End(max(len(head), 1), "stop", found)
    return None


def _first(stops: Sequence[str], text: str) -> str | None:
    return next((stop for stop in stops if stop in text), None)


class Fault(StrEnum):
    """A way to fail. Each leads to a named error in the client, never to a hang."""

    REFUSE = "refuse"
    """The connection is refused."""
    DIE = "die"
    """The connection is closed after the first token."""
    HANG = "hang"
    """The server does not answer; the call ends when it is cancelled or its deadline passes."""
    BAD_REQUEST = "bad_request"
    """HTTP 400."""
    SERVER_ERROR = "server_error"
    """HTTP 500."""
    NOT_JSON = "not_json"
    """HTTP 200 with a web page."""
    SHORT_LOGPROBS = "short_logprobs"
    """The last log-prob is missing."""
    MISMATCHED_IDS = "mismatched_ids"
    """The log-probs belong to other ids."""
    OUTSIDE_VOCABULARY = "outside_vocabulary"
    """The last id is the vocabulary size."""
    NAN_LOGPROB = "nan_logprob"
    """The last log-prob is not a number; on the wire that is null."""
    POSITIVE_LOGPROB = "positive_logprob"
    """The last log-prob is above 0."""
    EMPTY = "empty"
    """No ids, although the finish reason is a stop."""
    SPAN_GAP = "span_gap"
    """The version spans miss the last id."""
    NO_FINISH = "no_finish"
    """No finish reason."""
    ABORT = "abort"
    """The server aborts the request half-way; the client then requests the rest."""
    WRONG_WEIGHTS = "wrong_weights"
    """Control calls only: checksums and scores belong to other weights."""
    RESET_MID_BODY = "reset_mid_body"
    """Over HTTP the connection breaks in the middle of the reply's body; in process as DIE."""
    SLOW_DRIP = "slow_drip"
    """Over HTTP the server sends half of the body and then nothing; in process as HANG."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Hold:
    """Holds a reply before its token `at` until `release` is set.

    Example: swap weights in the middle of a sequence.
        hold = Hold(at=3)
        ...  # start a call whose reply has holds=(hold,)
        await hold.reached.wait()
        await server.update_weights(publication)
        hold.release.set()
    """

    at: int = 0
    reached: anyio.Event = field(default_factory=anyio.Event)
    """Set when the reply reaches the hold."""
    release: anyio.Event = field(default_factory=anyio.Event)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedCall:
    """A model call, as the script sees it."""

    index: int
    """Number of earlier calls to the server, failed ones included."""
    turn: int
    """Number of this episode's calls answered so far; over HTTP, which carries no episode, number of earlier answers in the
    context."""
    episode_id: str
    """Empty over HTTP."""
    request_id: str
    input_ids: Int32Array
    """[N] int32."""
    sampling: SamplingParams
    version: int
    """Policy version of the server's weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedReply:
    """The script's reply to one call."""

    output: str | Sequence[int] = ""
    """The ids, or text that the server encodes and to which it appends the end-of-turn id.

    As on a real server, the output ends at `max_new_tokens`, or after the first end-of-turn id, stop token or stop string of
    the call. Output without a stop, such as ids without an end-of-turn id, ends with `StopReason.LENGTH`.
    """
    fault: Fault | None = None
    holds: tuple[Hold, ...] = ()
    logprobs: Sequence[float] | None = None
    """Log-prob of each id, nats; by default `scripted_logprobs` gives them."""


Script: TypeAlias = Callable[[ScriptedCall], "ScriptedReply | str | Sequence[int]"]


def corrupt(body: dict[str, Any], fault: Fault | None, vocab_size: int) -> dict[str, Any]:
    """Return a reply to `/generate` with `fault` in it; faults outside its content leave it unchanged."""
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
