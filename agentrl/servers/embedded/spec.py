"""The shape of a model, read from a HF `config.json`.

Invariant: a `ModelSpec` describes a model that `Transformer` computes exactly; any other model (another architecture, rope
variant, sliding windows) raises `BeyondOwnForward` before weights are read, and quantized weights are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

import msgspec
import orjson

from agentrl.errors import ConfigError
from agentrl.weights.architectures import OWN_FORWARD

_Struct = TypeVar("_Struct")
_PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
_PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]
_TokenId = Annotated[int, msgspec.Meta(ge=0)]


class _Ends(msgspec.Struct, kw_only=True):
    """The fields read from both generation_config.json and config.json."""

    eos_token_id: _TokenId | list[_TokenId] | None = None

    @property
    def eos_ids(self) -> list[int]:
        ids = self.eos_token_id
        return ids if isinstance(ids, list) else [] if ids is None else [ids]


class _Rope(msgspec.Struct, kw_only=True):
    """`rope_parameters`; older files name it `rope_scaling`, and its `rope_type` `type`."""

    rope_theta: _PositiveFloat | None = None
    rope_type: str | None = None
    type: str | None = None
    factor: _PositiveFloat = 1.0
    low_freq_factor: _PositiveFloat = 1.0
    high_freq_factor: _PositiveFloat = 4.0
    original_max_position_embeddings: _PositiveInt = 8192


class _Config(_Ends, kw_only=True):
    """The fields read from config.json, for an architecture that this engine supports."""

    model_type: str | None = None
    vocab_size: _PositiveInt
    hidden_size: _PositiveInt
    intermediate_size: _PositiveInt
    num_hidden_layers: _PositiveInt
    num_attention_heads: _PositiveInt
    num_key_value_heads: _PositiveInt | None = None
    head_dim: _PositiveInt | None = None
    rms_norm_eps: _PositiveFloat
    max_position_embeddings: _PositiveInt
    rope_theta: _PositiveFloat | None = None
    rope_parameters: _Rope | None = None
    rope_scaling: _Rope | None = None
    partial_rotary_factor: _PositiveFloat | None = None
    tie_word_embeddings: bool | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    hidden_act: str | None = None
    use_sliding_window: bool | None = None
    layer_types: list[str] | None = None
    quantization_config: object = None


class _Kind(msgspec.Struct):
    architectures: list[str] | None = None


class BeyondOwnForward(ConfigError):
    """`Transformer` does not compute the model of a config.json; transformers' own module may."""


class ServedSpec(Protocol):
    """The facts about a model that the engine around it needs."""

    @property
    def architecture(self) -> str: ...
    @property
    def model_type(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_positions(self) -> int: ...
    @property
    def eos_ids(self) -> frozenset[int]: ...
    @property
    def num_layers(self) -> int:
        """Layers that have keys and values."""
        ...

    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Llama 3's frequency scaling, and linear scaling, of rotary position embeddings."""

    kind: str
    """`default`, `linear` or `llama3`."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Dimensions and switches of a decoder-only transformer."""

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_positions: int
    rope_theta: float
    rope: RopeScaling
    tied: bool
    """The output projection is the embedding matrix."""
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """Queries and keys are normalized per head (Qwen3)."""
    eos_ids: frozenset[int]

    @property
    def groups(self) -> int:
        """Return how many query heads share a key/value head."""
        return self.num_heads // self.num_kv_heads


def read_json(path: Path) -> Mapping[str, Any]:
    """Return the JSON object in `path`."""
    try:
        value = orjson.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; expected a local HF model directory") from error
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value  # pyright: ignore[reportUnknownVariableType]


def read_as(path: Path, kind: type[_Struct]) -> _Struct:
    """Return the JSON object in `path` as a struct, which ignores unknown fields."""
    try:
        return msgspec.convert(read_json(path), kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from error


def read_spec(path: str | Path) -> ModelSpec:
    """Return the spec of the HF model directory `path`."""
    directory = Path(path)
    file = directory / "config.json"
    architecture = (read_as(file, _Kind).architectures or ["none"])[0]
    if architecture not in OWN_FORWARD:
        raise BeyondOwnForward(f"{file}: architecture {architecture} is not supported by the own forward pass")
    fields = read_json(file)
    for field in msgspec.structs.fields(_Config):
        if field.required and field.name not in fields:
            raise ConfigError(f"{file} has no field {field.name!r}, which {architecture} needs")
    config = read_as(file, _Config)
    _refuse_unsupported(config, file)
    return _build(config, architecture, read_ends(directory), file)


def read_ends(directory: Path) -> frozenset[int]:
    """Return the tokens that end a sequence of the model in `directory`."""
    generation = directory / "generation_config.json"
    ends = read_as(generation, _Ends).eos_ids if generation.exists() else []
    return frozenset([*read_as(directory / "config.json", _Ends).eos_ids, *ends])


def _build(config: _Config, architecture: str, eos_ids: frozenset[int], file: Path) -> ModelSpec:
    hidden, heads = config.hidden_size, config.num_attention_heads
    attention_bias = bool(config.attention_bias)
    theta, rope = _rope(config, file)
    qwen2 = architecture == "Qwen2ForCausalLM"
    kv_heads = config.num_key_value_heads or heads
    head_dim = config.head_dim or hidden // heads
    if heads % kv_heads or head_dim % 2:
        raise ConfigError(f"{file}: {heads} heads, {kv_heads} key/value heads, head_dim {head_dim} do not fit together")
    return ModelSpec(
        architecture=architecture,
        model_type=config.model_type or "",
        vocab_size=config.vocab_size,
        hidden_size=hidden,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=config.rms_norm_eps,
        max_positions=config.max_position_embeddings,
        rope_theta=theta,
        rope=rope,
        tied=bool(config.tie_word_embeddings),
        qkv_bias=qwen2 or attention_bias,
        out_bias=attention_bias and not qwen2,
        mlp_bias=bool(config.mlp_bias),
        qk_norm=architecture == "Qwen3ForCausalLM",
        eos_ids=eos_ids,
    )


def _refuse_unsupported(config: _Config, file: Path) -> None:
    """Raise ConfigError for quantized weights, and `BeyondOwnForward` for settings that `Transformer` does not implement."""
    if config.hidden_act not in (None, "silu"):
        raise BeyondOwnForward(f"{file}: hidden_act {config.hidden_act!r} is not supported; expected 'silu'")
    if config.quantization_config:
        raise ConfigError(f"{file}: quantized weights are not supported by the embedded server")
    if config.use_sliding_window or "sliding_attention" in (config.layer_types or ()):
        raise BeyondOwnForward(f"{file}: sliding-window attention is not supported by the own forward pass")
    if config.partial_rotary_factor not in (None, 1.0):
        raise BeyondOwnForward(f"{file}: partial_rotary_factor {config.partial_rotary_factor} is not supported; expected 1")


def _rope(config: _Config, file: Path) -> tuple[float, RopeScaling]:
    """Return theta and scaling from `rope_parameters`, or from `rope_theta` and `rope_scaling` in older files."""
    settings = config.rope_parameters or config.rope_scaling or _Rope()
    kind = settings.rope_type or settings.type or "default"
    if kind not in ("default", "linear", "llama3"):
        raise BeyondOwnForward(f"{file}: rope type {kind!r} is not supported; expected default, linear or llama3")
    return settings.rope_theta or config.rope_theta or 10000.0, RopeScaling(
        kind=kind,
        factor=settings.factor,
        low_freq_factor=settings.low_freq_factor,
        high_freq_factor=settings.high_freq_factor,
        original_context=settings.original_max_position_embeddings,
    )
