"""The requests of `/generate`: SGLang's body, checked and turned into engine requests.

Invariant: an engine can serve every request that passes: its ids lie in the vocabulary, and prompt and output fit the
context. Each sampling parameter is honoured or refused by name, except for `spaces_between_special_tokens`, which changes
only `text`. Any other request raises a `RequestRejected` that names the field. Pure, no I/O.

This server also refuses requests that SGLang 0.5.23 answers arbitrarily or that crash it: an empty prompt, an id outside the
vocabulary, a `logprob_start_len` below -1, a list of `sampling_params` whose length is not the number of prompts.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Final, NamedTuple, TypeVar, cast

import msgspec
from msgspec import UNSET, UnsetType

from agentrl.errors import RequestRejected
from agentrl.inference.backend import CONTEXT_RESERVE, TEMPERATURE_RULE, is_temperature
from agentrl.servers.engine import EngineInfo, EngineRequest, EngineSampling
from agentrl.servers.http.errors import BadBody, BadSampling, decode_body

DEFAULT_MAX_NEW_TOKENS: Final = 128
MAX_STOP_STRINGS: Final = 32
MAX_REQUESTS: Final = 1024
"""Most samples of one call, over all its prompts."""
MAX_TEXT_CHARS: Final = 2**20
"""Most characters of the prompts of one call, together; encoding them blocks the server."""
_Seed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class _UnsupportedSampling(msgspec.Struct, kw_only=True):
    """Sampling parameters of SGLang that this server refuses."""

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


class Sampling(_UnsupportedSampling, kw_only=True, forbid_unknown_fields=True):
    """`sampling_params` as sent; null means the default, except for `max_new_tokens`."""

    max_new_tokens: int | UnsetType | None = UNSET
    """Null: as many as fit the context."""
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    sampling_seed: _Seed | None = None
    n: int | None = None
    spaces_between_special_tokens: bool | None = None
    stream_interval: int | None = None


_AS_SENT: Final = (
    "min_new_tokens", "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty",
    "repetition_penalty", "ignore_eos", "skip_special_tokens", "no_stop_trim",
)  # fmt: skip
"""Parameters that the engine takes as they are sent, by their own names and with their own defaults."""


def engine_sampling(sent: Sampling, *, room: int) -> EngineSampling:
    """Return the parameters in the engine's form, with at most `room` new tokens."""
    for name in _UnsupportedSampling.__struct_fields__:
        if getattr(sent, name) is not None:
            raise rejected(f"sampling_params.{name} is not supported by this server")
    stop = (sent.stop,) if isinstance(sent.stop, str) else tuple(sent.stop or ())
    if len(stop) > MAX_STOP_STRINGS:
        raise rejected(f"at most {MAX_STOP_STRINGS} stop strings are allowed, got {len(stop)}")
    wanted = DEFAULT_MAX_NEW_TOKENS if sent.max_new_tokens is UNSET else sent.max_new_tokens
    sampling = EngineSampling(
        max_new_tokens=room if wanted is None else min(wanted, room),
        stop=stop,
        stop_token_ids=tuple(sent.stop_token_ids or ()),
        seed=sent.sampling_seed,
        **{name: value for name in _AS_SENT if (value := getattr(sent, name)) is not None},
    )
    _check_ranges(sampling, wanted)
    return sampling


def _check_ranges(sampling: EngineSampling, wanted: int | None) -> None:
    top_k, minimum = sampling.top_k, sampling.min_new_tokens
    checks: tuple[tuple[bool, str, float | None], ...] = (
        (is_temperature(sampling.temperature), f"temperature must be {TEMPERATURE_RULE}", sampling.temperature),
        (0 < sampling.top_p <= 1, "top_p must be in (0, 1]", sampling.top_p),
        (0 <= sampling.min_p <= 1, "min_p must be in [0, 1]", sampling.min_p),
        (top_k == -1 or top_k >= 1, "top_k must be -1 (disable) or at least 1", top_k),
        (-2 <= sampling.frequency_penalty <= 2, "frequency_penalty must be in [-2, 2]", sampling.frequency_penalty),
        (-2 <= sampling.presence_penalty <= 2, "presence_penalty must be in [-2, 2]", sampling.presence_penalty),
        (0 < sampling.repetition_penalty <= 2, "repetition_penalty must be in (0, 2]", sampling.repetition_penalty),
        (wanted is None or wanted >= 0, "max_new_tokens must be at least 0", wanted),
        (minimum >= 0 and (wanted is None or minimum <= wanted), f"min_new_tokens must be in [0, {wanted}]", minimum),
    )
    for holds, rule, got in checks:
        if not holds:
            raise rejected(f"{rule}, got {got}")


_Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_Option = TypeVar("_Option")


class _UnsupportedOptions(msgspec.Struct, kw_only=True):
    """Options of SGLang's `/generate` that this server refuses."""

    top_logprobs_num: object = None
    token_ids_logprob: object = None
    return_text_in_logprobs: bool = False
    input_embeds: object = None
    image_data: object = None
    video_data: object = None
    audio_data: object = None
    session_params: object = None
    custom_logit_processor: object = None
    return_hidden_states: object = None
    return_routed_experts: bool = False
    return_indexer_topk: bool = False
    return_entropy: bool = False
    return_sampling_mask: object = None
    sampling_logprobs_mode: object = None
    watermark: object = None


class GenerateBody(_UnsupportedOptions, kw_only=True):
    """The body of `/generate`; unknown fields are ignored, as in SGLang."""

    text: str | list[str] | None = None
    input_ids: list[_Int64 | list[_Int64]] | None = None
    sampling_params: msgspec.Raw = msgspec.Raw(b"null")
    rid: str | list[str] | None = None
    stream: bool = False
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    return_prompt_token_ids: bool = False
    cache_salt: str | list[str] | None = None
    extra_key: str | list[str] | None = None
    lora_path: str | list[str | None] | None = None
    """Name of a loaded adapter, for all prompts or for each."""
    session_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall:
    """A checked `/generate` request."""

    requests: tuple[EngineRequest, ...]
    """Ordered by prompt, then by sample."""
    batched: bool
    """The reply is a list, and streamed events carry their index."""
    return_logprob: tuple[bool, ...]
    """A flag for each request."""
    return_prompt_ids: bool
    stream_interval: int
    """Tokens between two streamed events of a request."""


class _Prompts(NamedTuple):
    ids: list[list[int]]
    batched: bool


def decode_generate(body: bytes) -> tuple[GenerateBody, Sampling | list[Sampling]]:
    """Return the body of a `/generate` call and its sampling parameters: one set for all prompts, or one set for each."""
    sent = decode_body(body, GenerateBody)
    raw = bytes(sent.sampling_params)
    if raw == b"null":
        return sent, Sampling()
    if raw[:1] not in (b"{", b"["):
        raise BadBody(f"1 validation error:\n  sampling_params must be an object or a list of objects, got {raw[:40]!r}")
    try:
        return sent, msgspec.json.decode(raw, type=Sampling | list[Sampling])
    except (msgspec.ValidationError, RecursionError) as error:
        raise BadSampling(f"sampling_params: {error}") from None


def plan_generate(
    sent: GenerateBody, params: Sampling | list[Sampling], info: EngineInfo, encode: Callable[[str], list[int]]
) -> GenerateCall:
    """Return the engine requests of a body."""
    for name in _UnsupportedOptions.__struct_fields__:
        if getattr(sent, name):
            raise rejected(f"{name} is not supported by this server")
    prompts = _prompts(sent, encode)
    total = len(prompts.ids)
    sampled = params if isinstance(params, list) else [params] * total
    count = _samples(sampled, total)
    batched = prompts.batched or count > 1
    rids = _rids(sent.rid, total, count, batched=batched)
    scored = _each(sent.return_logprob, total, batched, "return_logprob", default=False)
    starts = _each(sent.logprob_start_len, total, batched, "logprob_start_len", default=-1)
    salts = _each(sent.cache_salt, total, batched, "cache_salt", default="")
    keys = _each(sent.extra_key, total, batched, "extra_key", default="")
    adapters = _each(sent.lora_path, total, batched, "lora_path", default=None)
    for name in {*adapters} - {None, *info.adapters}:
        loaded = ", ".join(info.adapters) or "none"
        raise rejected(f"the LoRA adapter {name!r} is not loaded; loaded: {loaded}")
    requests: list[EngineRequest] = []
    for at, prompt in enumerate(prompts.ids):
        sampling = _check_prompt(prompt, sampled[at], info)
        start = _check_start(starts[at], prompt) if scored[at] else -1
        requests += [
            EngineRequest(
                rid=rids[at * count + sample],
                input_ids=prompt,
                sampling=sampling,
                logprob_start_len=start,
                stream=sent.stream,
                cache_key=(keys[at], salts[at]),
                adapter=adapters[at],
                session=sent.session_id or "",
            )
            for sample in range(count)
        ]
    return GenerateCall(
        requests=tuple(requests),
        batched=batched,
        return_logprob=tuple(flag for flag in scored for _ in range(count)),
        return_prompt_ids=sent.return_prompt_token_ids,
        stream_interval=max(sampled[0].stream_interval or 1, 1) if sampled else 1,
    )


def _samples(sampled: list[Sampling], total: int) -> int:
    """Return the number of samples for each prompt; a number below 1 counts as 1, as in SGLang."""
    if len(sampled) != total:
        raise rejected(f"{len(sampled)} sampling_params for {total} prompts; send one, or a list with one for each")
    counts = {max(one.n or 1, 1) for one in sampled} or {1}
    if len(counts) > 1:
        raise rejected(f"n must be the same for all prompts of a call, got {sorted(counts)}")
    count = counts.pop()
    if total * count > MAX_REQUESTS:
        raise rejected(f"at most {MAX_REQUESTS} samples are allowed in a call, got {total} prompts with n = {count}")
    return count


def _prompts(sent: GenerateBody, encode: Callable[[str], list[int]]) -> _Prompts:
    ids = sent.input_ids
    if ids is None:
        if sent.text is None:
            raise rejected("either text, input_ids or input_embeds should be provided")
        texts = [sent.text] if isinstance(sent.text, str) else sent.text
        if (length := sum(map(len, texts))) > MAX_TEXT_CHARS or len(texts) > MAX_REQUESTS:
            raise rejected(
                f"at most {MAX_TEXT_CHARS} characters of text in {MAX_REQUESTS} prompts are allowed in a call, got {length} "
                f"characters in {len(texts)} prompts"
            )
        return _Prompts([encode(text) for text in texts], batched=not isinstance(sent.text, str))
    if not ids:
        raise rejected("input_ids cannot be empty; a prompt needs at least one token")
    lists = sum(isinstance(item, list) for item in ids)
    if lists not in (0, len(ids)):
        raise BadBody("1 validation error:\n  input_ids must be a list of ids or a list of such lists, not a mixture")
    return _Prompts(cast("list[list[int]]", ids), True) if lists else _Prompts([cast("list[int]", ids)], False)


def _check_prompt(prompt: list[int], sent: Sampling, info: EngineInfo) -> EngineSampling:
    length, context = len(prompt), info.max_context_tokens
    if not length:
        raise rejected("a prompt is empty; it needs at least one token")
    low, high = min(prompt), max(prompt)
    if low < 0 or high >= info.vocab_size:
        raise rejected(f"input id {low if low < 0 else high} is outside the vocabulary of {info.vocab_size}")
    if length >= context:
        raise rejected(f"the input ({length} tokens) is longer than the model's context length ({context} tokens)")
    wanted = sent.max_new_tokens
    if isinstance(wanted, int) and length + wanted > context:
        raise rejected(
            f"{length} prompt tokens and max_new_tokens {wanted} make {length + wanted}, over the context of {context}"
        )
    if length >= context - CONTEXT_RESERVE:
        raise rejected(
            f"the input length ({length} tokens) reaches the maximum allowed length ({context - CONTEXT_RESERVE} tokens), "
            f"{CONTEXT_RESERVE} below the context length"
        )
    return engine_sampling(sent, room=context - 2 - length)


def _check_start(start: int, prompt: list[int]) -> int:
    if not -1 <= start <= len(prompt):
        raise rejected(f"logprob_start_len must be from -1 to the number of prompt tokens, {len(prompt)}; got {start}")
    return start


def _each(value: _Option | list[_Option] | None, total: int, batched: bool, name: str, *, default: _Option) -> list[_Option]:
    """Return one value for each prompt."""
    if not isinstance(value, list):
        return [default if value is None else value] * total
    if not batched:
        raise rejected(f"{name} should not be a list for a single request")
    if len(value) != total:
        raise rejected(f"{len(value)} values of {name} for {total} prompts; send one, or one for each")
    return value


def _rids(sent: str | list[str] | None, prompts: int, count: int, *, batched: bool) -> list[str]:
    """Return the request ids; several samples of a prompt get new ids and ignore the sent ones, as in SGLang."""
    if isinstance(sent, list) and len(sent) != prompts:
        raise rejected(f"{len(sent)} rids for {prompts} prompts; send one for each")
    if isinstance(sent, list) and len(set(sent)) != len(sent):
        raise rejected(f"duplicate request ids within the request: {sent}")
    if sent is None or count > 1:
        return [uuid.uuid4().hex for _ in range(prompts * count)]
    if isinstance(sent, str):
        return [f"{sent}_{index}" for index in range(prompts)] if batched else [sent]
    return sent


def rejected(message: str) -> RequestRejected:
    """Return the error for a value that the server cannot serve."""
    return RequestRejected(message, status=400)
