"""SGLang's HTTP messages, the server's side: requests are checked and turned into engine calls, results into replies.

Invariant: a request that passes here can be served: its ids are within the vocabulary, prompt and output fit the context,
every sampling parameter is known and honoured. Whatever else is a `RequestRejected` that names the field. Pure, no I/O.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeVar, cast

import msgspec
import orjson

from agentrl.errors import RequestRejected
from agentrl.inference.engine import EngineInfo, EngineRequest, EngineSampling, Finish, Progress

_DEFAULT_MAX_NEW_TOKENS: Final = 128
_NonNegative = Annotated[int, msgspec.Meta(ge=0)]
_Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]


class _Sampling(msgspec.Struct, forbid_unknown_fields=True):
    """SGLang's `sampling_params`; null means the default, as there."""

    max_new_tokens: _NonNegative | None = None
    min_new_tokens: _NonNegative | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    frequency_penalty: _Penalty | None = None
    presence_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=2)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    sampling_seed: int | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=1024)] | None = None
    spaces_between_special_tokens: bool | None = None
    stream_interval: int | None = None
    stop_regex: object = None
    json_schema: object = None
    regex: object = None
    ebnf: object = None
    structural_tag: object = None
    choice: object = None
    logit_bias: object = None
    custom_params: object = None
    beam_width: object = None
    watermark: object = None


class _Generate(msgspec.Struct):
    """The body of `/generate`; unknown fields are ignored, as at SGLang."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: _Sampling | list[_Sampling] | None = None
    rid: str | list[str] | None = None
    stream: bool = False
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    return_prompt_token_ids: bool = False
    top_logprobs_num: int | None = None
    token_ids_logprob: object = None
    input_embeds: object = None
    image_data: object = None
    lora_path: str | None = None
    session_params: object = None
    return_hidden_states: bool = False
    return_routed_experts: bool = False
    return_entropy: bool = False
    return_sampling_mask: bool = False


_UNSUPPORTED_SAMPLING: Final = (
    "stop_regex", "json_schema", "regex", "ebnf", "structural_tag", "choice", "logit_bias", "custom_params", "beam_width",
    "watermark",
)  # fmt: skip
_UNSUPPORTED: Final = (
    "top_logprobs_num", "token_ids_logprob", "input_embeds", "image_data", "lora_path", "session_params",
    "return_hidden_states", "return_routed_experts", "return_entropy", "return_sampling_mask",
)  # fmt: skip
_generate_decoder = msgspec.json.Decoder(_Generate)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall:
    """A checked `/generate` request."""

    requests: tuple[EngineRequest, ...]
    batched: bool
    """The reply is a list, even of one."""
    stream: bool
    return_logprob: bool
    return_prompt_ids: bool


def decode_body(body: bytes, kind: type[_T]) -> _T:
    """Return the JSON `body` as `kind`; an empty body counts as `{}`.

    Raises:
        RequestRejected: naming the field that is wrong.
    """
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _rejected(str(error)) from None


def parse_generate(body: bytes, info: EngineInfo, encode: Callable[[str], list[int]]) -> GenerateCall:
    """Return the engine calls that `body` asks for.

    Args:
        body: JSON.
        info: what requests are validated against.
        encode: `Engine.encode`, for requests with `text`.

    Raises:
        RequestRejected: naming what is wrong.
    """
    try:
        sent = _generate_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _rejected(str(error)) from None
    for name in _UNSUPPORTED:
        if getattr(sent, name):
            raise _rejected(f"{name} is not supported by this server")
    prompts, batched = _prompts(sent, encode)
    params = sent.sampling_params
    each = params if isinstance(params, list) else [params or _Sampling()] * len(prompts)
    if len(each) != len(prompts):
        raise _rejected(f"{len(each)} sampling_params for {len(prompts)} prompts; send one, or one for each")
    count = (each[0].n or 1) if each else 1
    if any((one.n or 1) != count for one in each):
        raise _rejected("n must be the same for all prompts of a call")
    batched = batched or count > 1
    if sent.stream and batched:
        raise _rejected("stream is supported for one prompt with n=1 only; send several calls")
    rids = _rids(sent.rid, len(prompts), count)
    start = -1 if not sent.return_logprob or sent.logprob_start_len is None else sent.logprob_start_len
    requests: list[EngineRequest] = []
    for prompt, one in zip(prompts, each, strict=True):
        sampling = _check_prompt(prompt, one, info)
        if start >= len(prompt):
            raise _rejected(f"logprob_start_len {start} must be below the number of prompt tokens, {len(prompt)}")
        for _ in range(count):
            requests.append(
                EngineRequest(
                    rid=rids[len(requests)],
                    input_ids=prompt,
                    sampling=sampling,
                    logprob_start_len=max(start, -1),
                    stream=sent.stream,
                )
            )
    return GenerateCall(
        requests=tuple(requests),
        batched=batched,
        stream=sent.stream,
        return_logprob=bool(sent.return_logprob),
        return_prompt_ids=sent.return_prompt_token_ids,
    )


def _prompts(sent: _Generate, encode: Callable[[str], list[int]]) -> tuple[list[list[int]], bool]:
    """Return the prompts as lists of ids, and whether the call was batched."""
    if (sent.text is None) == (sent.input_ids is None):
        raise _rejected("send either text or input_ids")
    if sent.input_ids is None:
        if isinstance(sent.text, str):
            return [encode(sent.text)], False
        return [encode(text) for text in sent.text or ()], True
    ids = sent.input_ids
    if not ids:
        raise _rejected("input_ids is empty; a prompt needs at least one token")
    lists = sum(isinstance(item, list) for item in ids) if isinstance(ids[0], list) else 0
    if lists:
        if lists != len(ids):
            raise _rejected("input_ids must be a list of ids or a list of such lists, not a mixture")
        return cast("list[list[int]]", ids), True
    return [cast("list[int]", ids)], False


def _check_prompt(prompt: list[int], sent: _Sampling, info: EngineInfo) -> EngineSampling:
    length = len(prompt)
    if not length:
        raise _rejected("a prompt is empty; it needs at least one token")
    try:
        low, high = min(prompt), max(prompt)
    except TypeError:
        raise _rejected("input_ids must be a list of ids or a list of such lists, not a mixture") from None
    if low < 0 or high >= info.vocab_size:
        raise _rejected(f"input id {low if low < 0 else high} is outside the vocabulary of {info.vocab_size}")
    room = info.max_context_tokens - length
    if room < 0:
        raise _rejected(f"the prompt has {length} tokens, over the context of {info.max_context_tokens}")
    limit = min(_DEFAULT_MAX_NEW_TOKENS, room) if sent.max_new_tokens is None else sent.max_new_tokens
    if limit > room:
        raise _rejected(
            f"{length} prompt tokens and max_new_tokens {limit} make {length + limit}, "
            f"over the context of {info.max_context_tokens}"
        )
    return _sampling(sent, limit)


def _sampling(sent: _Sampling, limit: int) -> EngineSampling:
    for name in _UNSUPPORTED_SAMPLING:
        if getattr(sent, name) is not None:
            raise _rejected(f"sampling_params.{name} is not supported by this server")
    if sent.top_k == 0:
        raise _rejected("sampling_params.top_k must be -1 (off) or at least 1, got 0")
    if (sent.min_new_tokens or 0) > limit:
        raise _rejected(f"min_new_tokens {sent.min_new_tokens} is over max_new_tokens {limit}")
    stop = (sent.stop,) if isinstance(sent.stop, str) else tuple(sent.stop or ())
    return EngineSampling(
        max_new_tokens=limit,
        min_new_tokens=sent.min_new_tokens or 0,
        temperature=1.0 if sent.temperature is None else sent.temperature,
        top_p=1.0 if sent.top_p is None else sent.top_p,
        top_k=-1 if sent.top_k is None else sent.top_k,
        min_p=sent.min_p or 0.0,
        frequency_penalty=sent.frequency_penalty or 0.0,
        presence_penalty=sent.presence_penalty or 0.0,
        repetition_penalty=1.0 if sent.repetition_penalty is None else sent.repetition_penalty,
        stop=tuple(text for text in stop if text),
        stop_token_ids=tuple(sent.stop_token_ids or ()),
        ignore_eos=bool(sent.ignore_eos),
        skip_special_tokens=sent.skip_special_tokens is not False,
        no_stop_trim=bool(sent.no_stop_trim),
        seed=sent.sampling_seed,
    )


def _rids(sent: str | list[str] | None, prompts: int, count: int) -> list[str]:
    total = prompts * count
    if sent is None:
        return [uuid.uuid4().hex for _ in range(total)]
    if isinstance(sent, str):
        return [sent] if total == 1 else [f"{sent}_{index}" for index in range(total)]
    if len(sent) != prompts:
        raise _rejected(f"{len(sent)} rids for {prompts} prompts; send one for each")
    return list(sent) if count == 1 else [f"{rid}_{index}" for rid in sent for index in range(count)]


def reply(progress: Progress, text: str, *, call: GenerateCall, weight_version: str, seconds: float) -> dict[str, Any]:
    """Return the JSON object for what a request has produced so far; version spans only once it has finished."""
    request, finish = progress.request, progress.finish
    ids = progress.output_ids
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": None if finish is None else _finish_reason(finish, len(ids)),
        "weight_version": weight_version,
        "completion_tokens": len(ids),
        "e2e_latency": seconds,
    }
    if finish is None or not finish.reduced:
        meta["prompt_tokens"] = len(request.input_ids)
        meta["cached_tokens"] = progress.cached_tokens
        meta["cached_tokens_details"] = {"device": progress.cached_tokens, "host": 0}
        meta["reasoning_tokens"] = 0
        meta["num_retractions"] = progress.num_retractions
        meta["dp_rank"] = None
    if call.return_logprob:
        meta["output_token_logprobs"] = [
            (logprob, token, None) for logprob, token in zip(progress.output_logprobs, ids, strict=True)
        ]
        meta["output_token_logprobs_length"] = len(ids)
        meta["input_token_logprobs"] = _input_logprobs(progress)
        for name in ("input_top_logprobs", "output_top_logprobs", "input_token_ids_logprobs", "output_token_ids_logprobs"):
            meta[name] = []
    if finish is not None:
        meta["weight_versions"] = version_spans(progress)
    out: dict[str, Any] = {"text": text, "output_ids": ids, "meta_info": meta}
    if call.return_prompt_ids:
        out["prompt_token_ids"] = list(request.input_ids)
    return out


def version_spans(progress: Progress) -> list[dict[str, Any]]:
    """Return half-open `{version, start, end}` spans over the output ids."""
    spans: list[dict[str, Any]] = []
    end = len(progress.output_ids)
    for version, start in reversed(progress.versions):
        if end > start:
            spans.append({"version": version, "start": start, "end": end})
        end = start
    return spans[::-1]


def trimmed(progress: Progress) -> tuple[Sequence[int], str | None]:
    """Return the ids to decode for `text`, and the stop string to cut the text at, if any."""
    finish, ids = progress.finish, progress.output_ids
    if finish is None or finish.kind != "stop" or progress.request.sampling.no_stop_trim:
        return ids, None
    if isinstance(finish.matched, str):
        return ids, finish.matched
    return ids[:-1], None


def dumps(value: object) -> bytes:
    """Return JSON bytes."""
    return orjson.dumps(value)


def _input_logprobs(progress: Progress) -> list[tuple[float | None, int, None]]:
    values = progress.input_logprobs
    if values is None:
        return []
    start = progress.request.logprob_start_len
    ids = progress.request.input_ids[start : start + len(values)]
    return [(value, token, None) for value, token in zip(values, ids, strict=True)]


def _finish_reason(finish: Finish, length: int) -> dict[str, Any]:
    if finish.kind == "length":
        return {"type": "length", "length": length}
    if finish.kind == "stop":
        return {"type": "stop", "matched": finish.matched}
    if finish.reduced:
        return {"type": "abort", "message": finish.message}
    return {"type": "abort", "message": finish.message, "status_code": None, "err_type": None}


def _rejected(message: str) -> RequestRejected:
    return RequestRejected(message, status=400)
