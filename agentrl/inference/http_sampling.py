"""SGLang's `sampling_params`: their names, types and ranges, and what of them an engine needs.

Invariant: a parameter is honoured or refused by name; none is ignored. The one exception is
`spaces_between_special_tokens`, which changes `text` only, and only for tokenizers without byte-level decoding.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import UNSET, UnsetType

from agentrl.errors import RequestRejected
from agentrl.inference.engine import EngineSampling

DEFAULT_MAX_NEW_TOKENS: Final = 128
MAX_STOP_STRINGS: Final = 32
_Seed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class Sampling(msgspec.Struct, forbid_unknown_fields=True):
    """`sampling_params` as sent; null means the default, but for `max_new_tokens`."""

    max_new_tokens: int | UnsetType | None = UNSET
    """Null: as many as the context has room for."""
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


_UNSUPPORTED: Final = (
    "stop_regex", "json_schema", "regex", "ebnf", "structural_tag", "choice", "logit_bias", "custom_params", "beam_width",
    "watermark",
)  # fmt: skip


def engine_sampling(sent: Sampling, *, room: int) -> EngineSampling:
    """Return what an engine needs of the parameters, with at most `room` new tokens.

    Raises:
        RequestRejected: for a value out of range, or a parameter this server does not support.
    """
    for name in _UNSUPPORTED:
        if getattr(sent, name) is not None:
            raise _rejected(f"sampling_params.{name} is not supported by this server")
    stop = (sent.stop,) if isinstance(sent.stop, str) else tuple(sent.stop or ())
    if len(stop) > MAX_STOP_STRINGS:
        raise _rejected(f"at most {MAX_STOP_STRINGS} stop strings are allowed, got {len(stop)}")
    wanted = DEFAULT_MAX_NEW_TOKENS if sent.max_new_tokens is UNSET else sent.max_new_tokens
    sampling = EngineSampling(
        max_new_tokens=room if wanted is None else min(wanted, room),
        min_new_tokens=sent.min_new_tokens or 0,
        temperature=1.0 if sent.temperature is None else sent.temperature,
        top_p=1.0 if sent.top_p is None else sent.top_p,
        top_k=-1 if sent.top_k is None else sent.top_k,
        min_p=sent.min_p or 0.0,
        frequency_penalty=sent.frequency_penalty or 0.0,
        presence_penalty=sent.presence_penalty or 0.0,
        repetition_penalty=1.0 if sent.repetition_penalty is None else sent.repetition_penalty,
        stop=stop,
        stop_token_ids=tuple(sent.stop_token_ids or ()),
        ignore_eos=bool(sent.ignore_eos),
        skip_special_tokens=sent.skip_special_tokens is not False,
        no_stop_trim=bool(sent.no_stop_trim),
        seed=sent.sampling_seed,
    )
    _check_ranges(sampling, wanted)
    return sampling


def _check_ranges(sampling: EngineSampling, wanted: int | None) -> None:
    top_k, minimum = sampling.top_k, sampling.min_new_tokens
    checks: tuple[tuple[bool, str, float | None], ...] = (
        (sampling.temperature >= 0, "temperature must be a non-negative finite number", sampling.temperature),
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
            raise _rejected(f"{rule}, got {got}")


def _rejected(message: str) -> RequestRejected:
    return RequestRejected(message, status=400)
