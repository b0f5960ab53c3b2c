"""The words of a script: what a scripted server is asked, what it answers, and how it fails on demand.

Invariant: everything here is data; the same script gives the same ids, log-probs and failures every time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias, cast

import anyio
import numpy as np

from agentrl.inference.base import SamplingParams
from agentrl.types import Float32Array, Int32Array


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
