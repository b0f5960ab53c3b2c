"""SGLang's messages as bytes: requests are assembled, replies are checked before anything of them is used.

Invariant: a `Reply` has one finite log-prob for each id, ids within the vocabulary and spans that cover every id in
order; whatever else a server sends becomes a `ReplyError` that says what was expected and what came. Pure, no I/O.

The messages of SGLang's control endpoints, with declared types.

Invariant: a message that lacks what is read of it, or has it with another type, becomes a `ReplyError` naming the field.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Annotated, Literal, NamedTuple, TypeVar, cast

import msgspec
import numpy as np
import orjson

from agentrl.errors import InvariantError, ReplyError, RequestRejected
from agentrl.inference.backend import CONTEXT_HEADROOM, CONTEXT_RESERVE, GenerateRequest, SamplingParams
from agentrl.types import Float32Array, Int32Array, VersionSpan
from agentrl.validation import sound_logprobs

_T = TypeVar("_T")
_UNTRAINED = "default"
"""What SGLang calls the weights it was started with."""


class ServerInfo(msgspec.Struct, frozen=True):
    """What is read of `/server_info`."""

    version: str
    engine: str | None = None
    incremental_streaming_output: bool = False
    """Streamed ids are the new ones only; by default they are all so far."""
    device: str | None = None
    tp_size: int = 1
    """Ranks that each hold a part of every layer."""
    pp_size: int = 1
    dp_size: int = 1
    max_req_input_len: int | None = None
    """Longest prompt, tokens, as context and cache memory allow."""

    @property
    def max_context_tokens(self) -> int | None:
        """Longest context plus output that a call is sure to get; None from servers that do not tell."""
        longest = self.max_req_input_len
        return None if longest is None else longest + CONTEXT_RESERVE - CONTEXT_HEADROOM


class ModelInfo(msgspec.Struct, frozen=True):
    """What is read of `/model_info`."""

    model_path: str = ""
    weight_version: str | int | None = None


class Load(msgspec.Struct, frozen=True):
    """One entry of `/v1/loads`."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_used_tokens: int = 0
    max_total_num_tokens: int = 0
    token_usage: float = 0.0
    gen_throughput: float = 0.0
    cache_hit_rate: float = 0.0


class Loads(msgspec.Struct, frozen=True):
    """The reply of `/v1/loads`."""

    loads: list[Load]


class Outcome(msgspec.Struct, frozen=True):
    """The reply of a control call."""

    success: bool = True
    message: str = ""


class _Rank(msgspec.Struct):
    checksums: dict[str, str]


class Checksums(msgspec.Struct):
    """The reply of `/weights_checker`: one entry for each rank of the server."""

    ranks: list[_Rank]


def decode(body: bytes, kind: type[_T], what: str, url: str) -> _T:
    """Return `body` as `kind`.

    Raises:
        ReplyError: naming the field that is missing or of another type; also for no body at all.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        got = f"{error}; it begins with {body[:120].decode(errors='replace')!r}" if body else "expected JSON, got nothing"
        raise ReplyError(f"{url}: {what} breaks the protocol: {got}", url=url) from error


def parse_version(version: str | int | None, url: str) -> int:
    """Return the policy version a server reports; "default", the weights it started with, is 0.

    Raises:
        ReplyError: for anything but a whole number.

    Example:
        >>> parse_version("default", "http://a"), parse_version("12", "http://a")
        (0, 12)
    """
    if version == _UNTRAINED:
        return 0
    try:
        number = int(str(version))
    except ValueError:
        number = -1
    if number < 0:
        raise ReplyError(
            f"{url}: weight version {version!r} is not a policy version (a whole number, or 'default' before the first "
            "update); something else than agentrl updates this server's weights",
            url=url,
        )
    return number


_Id = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_REQUEST_ID = re.compile("[0-9a-f]{32}")


class _Finish(msgspec.Struct):
    type: str
    matched: int | str | list[int] | None = None
    message: str | None = None
    status_code: int | None = None


class _Span(msgspec.Struct):
    version: str | int
    start: int
    end: int


class _Meta(msgspec.Struct):
    finish_reason: _Finish | None = None
    output_token_logprobs: list[tuple[float, _Id, str | None]] | None = None
    weight_versions: list[_Span] | None = None
    cached_tokens: int = 0
    num_retractions: int = 0


class _Reply(msgspec.Struct):
    meta_info: _Meta
    output_ids: list[_Id] | None = None


class _ScoreMeta(msgspec.Struct):
    input_token_logprobs: list[tuple[float | None, _Id, str | None]]


class _Score(msgspec.Struct):
    meta_info: _ScoreMeta


class _EventMeta(msgspec.Struct):
    finish_reason: _Finish | None = None


class _Event(msgspec.Struct):
    output_ids: list[_Id] = []
    meta_info: _EventMeta | None = None
    error: dict[str, object] | str | None = None


class Reply(NamedTuple):
    """A checked reply to `/generate`."""

    output_ids: Int32Array
    output_logprobs: Float32Array
    spans: tuple[VersionSpan, ...] | None
    """None where the server reports no versions."""
    finish: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    message: str = ""
    """For `abort`: the server's reason."""
    status_code: int | None = None
    """For `abort`: the HTTP status the server would have answered with."""
    cached_tokens: int = 0
    num_retractions: int = 0


_DEFAULTS = {field.name: field.default for field in fields(SamplingParams)}
_WIRE_NAMES = {"seed": "sampling_seed"}


@lru_cache(maxsize=256)
def _sampling_json(sampling: SamplingParams, max_new_tokens: int) -> bytes:
    values: dict[str, object] = {"max_new_tokens": max_new_tokens, "temperature": sampling.temperature}
    for name, default in _DEFAULTS.items():
        value = cast("object", getattr(sampling, name))
        if name not in ("max_new_tokens", "temperature") and value != default:
            values[_WIRE_NAMES.get(name, name)] = (
                list(cast("tuple[object, ...]", value)) if isinstance(value, tuple) else value
            )
    return orjson.dumps(values)


def generate_body(
    sampling: SamplingParams, *, rid: str, ids_json: Sequence[bytes], limit: int, stream: bool = False, cache_salt: str = ""
) -> bytes:
    """Return the body of a `/generate` call for `limit` tokens at most; `ids_json` goes in as it is, which costs one copy.

    Example:
        >>> generate_body(SamplingParams(max_new_tokens=4), rid="a", ids_json=[b"5", b",6"], limit=4)
        b'{"rid":"a","input_ids":[5,6],"sampling_params":{"max_new_tokens":4,"temperature":1.0},"return_logprob":true}'
    """
    parts = [b'{"rid":"', rid.encode(), b'","input_ids":[', *ids_json, b'],"sampling_params":']
    parts += [_sampling_json(sampling, limit), b',"return_logprob":true']
    if stream:
        parts.append(b',"stream":true')
    if cache_salt:
        parts += [b',"cache_salt":', orjson.dumps(cache_salt)]
    parts.append(b"}")
    return b"".join(parts)


def score_body(token_ids: Int32Array) -> bytes:
    """Return the body of a `/generate` call that only scores `token_ids`."""
    return orjson.dumps(
        {
            "input_ids": token_ids.tolist(),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
    )


def check_request(request: GenerateRequest, vocab_size: int) -> None:
    """Check what would kill a server or end other calls.

    An id outside the vocabulary ends SGLang's scheduler, not only the request; an abort ends every request whose id begins
    with the given one.

    Raises:
        InvariantError: for a request id that is not 32 lower-case hex digits.
        RequestRejected: for no ids, ids outside the vocabulary, no token to sample, or a seed of more than 64 bits.
    """
    if not _REQUEST_ID.fullmatch(request.request_id):
        raise InvariantError(
            f"request id {request.request_id!r} of episode {request.episode_id!r}: expected 32 lower-case hex digits, as of "
            "uuid4().hex; a server aborts every request whose id begins with that of the aborted one"
        )
    context = request.context
    if not context.size or request.sampling.max_new_tokens < 1:
        raise RequestRejected(
            f"request {request.request_id}: {context.size} input ids and max_new_tokens {request.sampling.max_new_tokens}; "
            "a model call needs at least one of each"
        )
    seed = request.sampling.seed
    if seed is not None and not -(2**63) <= seed < 2**63:
        raise RequestRejected(f"request {request.request_id}: seed {seed} does not fit the 64 bits that servers take")
    if context.bound > vocab_size and (largest := int(context.ids().max())) >= vocab_size:
        raise RequestRejected(
            f"request {request.request_id}: input id {largest} is outside the vocabulary of {vocab_size}; "
            "is the tokenizer that of the served model?"
        )


def parse_reply(body: bytes, *, vocab_size: int, url: str) -> Reply:
    """Return the checked reply to a `/generate` call.

    Raises:
        ReplyError: for lengths that differ, ids outside the vocabulary, log-probs that are not finite or above 0, spans
            that do not cover the ids in order, no or an unknown finish reason.
    """
    reply = decode(body, _Reply, "the reply to /generate", url)
    meta = reply.meta_info
    triples = meta.output_token_logprobs or []
    ids = [triple[1] for triple in triples]
    if reply.output_ids is not None and reply.output_ids != ids:
        raise _bad(url, f"{len(reply.output_ids)} output ids", f"{len(ids)} log-probs, or log-probs of other ids")
    logprobs = np.array([triple[0] for triple in triples], np.float32)
    if ids and max(ids) >= vocab_size:
        raise _bad(url, f"ids below the vocabulary size {vocab_size}", f"id {max(ids)}")
    if ids and not sound_logprobs(logprobs):
        worst = next(one for one in logprobs[:, None] if not sound_logprobs(one))
        raise _bad(url, "finite log-probs of at most 0", f"{worst.item()}")
    finish = meta.finish_reason
    if finish is None or finish.type not in ("stop", "length", "abort"):
        raise _bad(url, "finish reason stop, length or abort", "none" if finish is None else repr(finish.type))
    matched = finish.matched[0] if isinstance(finish.matched, list) and finish.matched else finish.matched
    return Reply(
        output_ids=np.array(ids, np.int32),
        output_logprobs=logprobs,
        spans=None if meta.weight_versions is None else _spans(meta.weight_versions, len(ids), url),
        finish=finish.type,
        matched=None if isinstance(matched, list) else matched,
        message=finish.message or "",
        status_code=finish.status_code,
        cached_tokens=meta.cached_tokens,
        num_retractions=meta.num_retractions,
    )


def _spans(spans: Sequence[_Span], count: int, url: str) -> tuple[VersionSpan, ...]:
    checked: list[VersionSpan] = []
    at = 0
    for span in spans:
        version = parse_version(span.version, url)
        if span.start != at or span.end < span.start or (checked and version < checked[-1].version):
            raise _bad(url, "version spans in order without gaps", f"{[(s.version, s.start, s.end) for s in spans]}")
        at = span.end
        if span.end == span.start:
            continue
        if checked and checked[-1].version == version:
            checked[-1] = VersionSpan(start=checked[-1].start, end=at, version=version)
        else:
            checked.append(VersionSpan(start=span.start, end=at, version=version))
    if at != count:
        raise _bad(url, f"version spans over all {count} output ids", f"spans over {at}")
    return tuple(checked)


def parse_scores(body: bytes, token_ids: Int32Array, url: str) -> Float32Array:
    """Return the log-probs of `token_ids[1:]`, [L-1] float32, from the reply to a `score_body` call.

    Raises:
        ReplyError: for other ids, another count, or log-probs that are not finite.
    """
    triples = decode(body, _Score, "the reply to a scoring call", url).meta_info.input_token_logprobs
    if [triple[1] for triple in triples] != token_ids.tolist():
        raise _bad(url, f"log-probs of the {len(token_ids)} ids sent", f"{len(triples)} of them, or of other ids")
    values = [triple[0] for triple in triples[1:]]
    logprobs = np.array([np.nan if value is None else value for value in values], np.float32)
    if not np.isfinite(logprobs).all():
        raise _bad(url, "finite log-probs of the probe", f"{values[:8]}")
    return logprobs


class StreamEvent(msgspec.Struct, frozen=True):
    """What is read of one streamed event before the last."""

    output_ids: list[int]
    finished: bool


def parse_event(body: bytes, *, vocab_size: int, url: str) -> StreamEvent:
    """Return the ids of one event of a stream.

    Raises:
        ReplyError: for ids outside the vocabulary, or what is not an event.
        RequestRejected: when the event is the server's error message.
    """
    event = decode(body, _Event, "an event of the /generate stream", url)
    if event.error is not None:
        message = event.error.get("message", event.error) if isinstance(event.error, dict) else event.error
        raise RequestRejected(f"{url}: {message}", status=400, url=url)
    if event.output_ids and max(event.output_ids) >= vocab_size:
        raise _bad(url, f"ids below the vocabulary size {vocab_size}", f"id {max(event.output_ids)}")
    finished = event.meta_info is not None and event.meta_info.finish_reason is not None
    return StreamEvent(output_ids=event.output_ids, finished=finished)


def _bad(url: str, expected: str, got: str) -> ReplyError:
    return ReplyError(f"{url}: the reply to /generate breaks the protocol: expected {expected}, got {got}", url=url)
