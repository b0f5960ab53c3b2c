"""SGLang's messages as bytes: requests are assembled, replies are checked before anything of them is used.

Invariant: a `GenerateReply` has one finite log-prob for each id, ids within the vocabulary, and version spans that cover
every id in order. Anything else that a server sends becomes a `ReplyError` that names what was expected and what came.
Other backends have no such replies; `TokenGraph.record` checks what any backend returns. Pure, no I/O.
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

from agentrl.episode.checks import sound_logprobs
from agentrl.errors import InvariantError, ReplyError, RequestRejected
from agentrl.inference.backend import CONTEXT_HEADROOM, CONTEXT_RESERVE, GenerateRequest, SamplingParams
from agentrl.types import Float32Array, Int32Array, VersionSpan

_T = TypeVar("_T")
_UNTRAINED = "default"
"""SGLang's name for the weights that a server started with."""
_OLDEST = (0, 5, 21)
"""The first SGLang with `/model_info`, version spans, and weight updates inside a begin/end session."""
_OUR_ENGINES = frozenset({"embedded", "scripted"})
"""Values of `engine` in `/server_info` that tell agentrl's own servers from SGLang."""


class ServerInfo(msgspec.Struct, frozen=True):
    """The fields of `/server_info` that agentrl reads."""

    version: str
    """Of SGLang, also from a server of agentrl's own."""
    engine: str = "sglang"
    """`sglang`, `embedded` or `scripted`; SGLang itself does not send the field."""
    incremental_streaming_output: bool = False
    """A streamed event carries only the new ids; by default it carries all ids so far."""
    device: str | None = None
    dtype: str = "auto"
    """Type in which it holds weights, by torch's name; SGLang may say `auto`."""
    tp_size: int = 1
    """Ranks that each hold a part of every layer."""
    pp_size: int = 1
    dp_size: int = 1
    enable_lora: bool | None = None
    max_loaded_loras: int | None = None
    """LoRA adapters that it holds at once; None: it names no limit."""
    max_req_input_len: int | None = None
    """Longest prompt, tokens, as context and cache memory allow."""
    enable_session_radix_cache: bool = False
    """The server evicts the cached prefixes of open sessions after all others."""

    @property
    def max_context_tokens(self) -> int | None:
        """Longest context plus output, tokens, that the server grants every call; None where it reports no limit."""
        longest = self.max_req_input_len
        return None if longest is None else longest + CONTEXT_RESERVE - CONTEXT_HEADROOM

    @property
    def checksum_kind(self) -> str:
        return "agentrl" if self.engine in _OUR_ENGINES else f"{self.engine} {self.version}"


class ModelInfo(msgspec.Struct, frozen=True):
    """The fields of `/model_info` that agentrl reads."""

    weight_version: str | int | None = None
    lora_adapters: list[str] | None = None
    """Names of the loaded LoRA adapters; SGLang does not send the field."""


class AdapterModel(msgspec.Struct, frozen=True):
    """An entry of `/v1/models`: the model, or an adapter of it."""

    id: str
    parent: str | None = None
    """The model below an adapter; None: it is the model itself."""


class AdapterModels(msgspec.Struct, frozen=True):
    """The reply to `/v1/models`."""

    data: list[AdapterModel]


class Load(msgspec.Struct, frozen=True):
    """An entry of `/v1/loads`."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_used_tokens: int = 0
    max_total_num_tokens: int = 0
    token_usage: float = 0.0
    gen_throughput: float = 0.0
    cache_hit_rate: float = 0.0


class Loads(msgspec.Struct, frozen=True):
    """The reply to `/v1/loads`."""

    loads: list[Load]


class ControlOutcome(msgspec.Struct, frozen=True):
    """The reply to a control call."""

    success: bool = True
    message: str = ""
    error_message: str | None = None
    """The reason of a refusal, in the replies about LoRA adapters."""


class _Rank(msgspec.Struct):
    checksums: dict[str, str]


class Checksums(msgspec.Struct):
    """The reply to `/weights_checker`: one entry for each rank of the server."""

    ranks: list[_Rank]


def decode(body: bytes, kind: type[_T], what: str, url: str) -> _T:
    """Return `body` as `kind`."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        got = f"{error}; it begins with {body[:120].decode(errors='replace')!r}" if body else "expected JSON, got nothing"
        raise ReplyError(f"{url}: {what} breaks the protocol: {got}", url=url) from error


def parse_version(version: str | int | None, url: str) -> int:
    """Return the policy version that a server reports; "default", the weights it started with, is 0.

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
            "update); another program than agentrl updates this server's weights",
            url=url,
        )
    return number


def check_sglang_version(version: str, url: str) -> None:
    """Refuse an SGLang whose protocol agentrl does not speak."""
    match = re.match(r"v?(\d+)\.(\d+)\.(\d+)", version)
    if match is None:
        raise ReplyError(f"{url}: expected an SGLang version such as '0.5.23', got {version!r}", url=url)
    if tuple(int(part) for part in match.groups()) < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        raise ReplyError(f"{url}: expected SGLang {oldest} or newer, got {version}; upgrade that server", url=url)


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
    weight_versions: list[_Span] = []
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


class GenerateReply(NamedTuple):
    """A checked reply to `/generate`."""

    output_ids: Int32Array
    output_logprobs: Float32Array
    spans: tuple[VersionSpan, ...]
    """Policy versions of the output ids; they cover every id in order."""
    finish: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    message: str = ""
    """For `abort`: the server's reason."""
    status_code: int | None = None
    """For `abort`: the HTTP status of the failure behind it."""
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
    sampling: SamplingParams,
    *,
    rid: str,
    ids_json: Sequence[bytes],
    limit: int,
    stream: bool = False,
    cache_salt: str = "",
    adapter: str = "",
    session: str = "",
) -> bytes:
    """Return the body of a `/generate` call for at most `limit` tokens; `ids_json` is copied once, as it is.

    `adapter` names the LoRA adapter that computes it; empty: the weights alone. `session` is the id of a session, or empty.

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
    if adapter:
        parts += [b',"lora_path":', orjson.dumps(adapter)]
    if session:
        parts += [b',"session_id":', orjson.dumps(session)]
    parts.append(b"}")
    return b"".join(parts)


def score_body(token_ids: Int32Array, adapter: str = "") -> bytes:
    """Return the body of a `/generate` call that scores `token_ids`, by the named adapter, and samples nothing."""
    named = {"lora_path": adapter} if adapter else {}
    return orjson.dumps(
        named
        | {
            "input_ids": token_ids.tolist(),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
    )


def check_request(request: GenerateRequest, vocab_size: int) -> None:
    """Refuse a request that would kill a server or end other calls.

    An id outside the vocabulary ends SGLang's scheduler, not only the request. An abort ends every request whose id begins
    with the given one.

    Raises:
        InvariantError: the request id is not 32 lower-case hex digits.
        RequestRejected: the request has no ids, ids outside the vocabulary, no token to sample, or a seed of over 64 bits.
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
        raise RequestRejected(f"request {request.request_id}: seed {seed} does not fit into the 64 bits that servers accept")
    if context.bound > vocab_size and (largest := int(context.ids().max())) >= vocab_size:
        raise RequestRejected(
            f"request {request.request_id}: input id {largest} is outside the vocabulary of {vocab_size}; "
            "is the tokenizer that of the served model?"
        )


def parse_reply(body: bytes, *, vocab_size: int, url: str) -> GenerateReply:
    """Return the checked reply to a `/generate` call; `ReplyError` if it breaks the invariant of this module."""
    reply = decode(body, _Reply, "the reply to /generate", url)
    meta = reply.meta_info
    triples = meta.output_token_logprobs or []
    ids = [triple[1] for triple in triples]
    if reply.output_ids is not None and reply.output_ids != ids:
        raise _broken(url, f"{len(reply.output_ids)} output ids", f"{len(ids)} log-probs, or log-probs of other ids")
    logprobs = np.array([triple[0] for triple in triples], np.float32)
    if ids and max(ids) >= vocab_size:
        raise _broken(url, f"ids below the vocabulary size {vocab_size}", f"id {max(ids)}")
    if ids and not sound_logprobs(logprobs):
        worst = next(one for one in logprobs[:, None] if not sound_logprobs(one))
        raise _broken(url, "finite log-probs of at most 0", f"{worst.item()}")
    finish = meta.finish_reason
    if finish is None or finish.type not in ("stop", "length", "abort"):
        raise _broken(url, "finish reason stop, length or abort", "none" if finish is None else repr(finish.type))
    if not ids and finish.type != "abort":
        raise _broken(url, "at least one output id", f"an empty completion (finish reason {finish.type})")
    matched = finish.matched[0] if isinstance(finish.matched, list) and finish.matched else finish.matched
    return GenerateReply(
        output_ids=np.array(ids, np.int32),
        output_logprobs=logprobs,
        spans=_spans(meta.weight_versions, len(ids), url),
        finish=finish.type,
        matched=None if isinstance(matched, list) else matched,
        message=finish.message or "",
        status_code=finish.status_code,
        cached_tokens=meta.cached_tokens,
        num_retractions=meta.num_retractions,
    )


def _spans(spans: Sequence[_Span], count: int, url: str) -> tuple[VersionSpan, ...]:
    checked: list[VersionSpan] = []
    end = 0
    for span in spans:
        version = parse_version(span.version, url)
        if span.start != end or span.end < span.start or (checked and version < checked[-1].version):
            raise _broken(url, "version spans in order without gaps", f"{[(s.version, s.start, s.end) for s in spans]}")
        end = span.end
        if span.end == span.start:
            continue
        if checked and checked[-1].version == version:
            checked[-1] = VersionSpan(start=checked[-1].start, end=end, version=version)
        else:
            checked.append(VersionSpan(start=span.start, end=end, version=version))
    if end != count:
        raise _broken(url, f"version spans (weight_versions) over all {count} output ids", f"spans over {end}")
    return tuple(checked)


def parse_scores(body: bytes, token_ids: Int32Array, url: str) -> Float32Array:
    """Return the log-probs of `token_ids[1:]`, [L-1] float32, from the reply to a `score_body` call."""
    triples = decode(body, _Score, "the reply to a scoring call", url).meta_info.input_token_logprobs
    if [triple[1] for triple in triples] != token_ids.tolist():
        raise _broken(url, f"log-probs of the {len(token_ids)} ids sent", f"{len(triples)} of them, or of other ids")
    values = [triple[0] for triple in triples[1:]]
    logprobs = np.array([np.nan if value is None else value for value in values], np.float32)
    if not np.isfinite(logprobs).all():
        raise _broken(url, "finite log-probs of the probe", f"{values[:8]}")
    return logprobs


class StreamEvent(msgspec.Struct, frozen=True):
    """The fields of a streamed event before the last that agentrl reads."""

    output_ids: list[int]
    finished: bool


def parse_event(body: bytes, *, vocab_size: int, url: str) -> StreamEvent:
    """Return the ids of one event of a stream."""
    event = decode(body, _Event, "an event of the /generate stream", url)
    if event.error is not None:
        message = event.error.get("message", event.error) if isinstance(event.error, dict) else event.error
        raise RequestRejected(f"{url}: {message}", status=400, url=url)
    if event.output_ids and max(event.output_ids) >= vocab_size:
        raise _broken(url, f"ids below the vocabulary size {vocab_size}", f"id {max(event.output_ids)}")
    finished = event.meta_info is not None and event.meta_info.finish_reason is not None
    return StreamEvent(output_ids=event.output_ids, finished=finished)


def _broken(url: str, expected: str, got: str) -> ReplyError:
    return ReplyError(f"{url}: the reply to /generate breaks the protocol: expected {expected}, got {got}", url=url)
