"""The shape of a model, read from a HF `config.json`.

Invariant: a `ModelSpec` describes a model that `Transformer` computes exactly; whatever it could not compute (other
architectures, rope variants, sliding windows, quantized weights) is refused here, before weights are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from agentrl.errors import ConfigError

ARCHITECTURES: Final = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM")


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
    """Return the JSON object in `path`.

    Raises:
        ConfigError: when it is missing, unreadable or not an object.
    """
    try:
        value = orjson.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; expected a local HF model directory") from error
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value  # pyright: ignore[reportUnknownVariableType]


def read_spec(path: str | Path) -> ModelSpec:
    """Return the spec of the HF model directory `path`.

    Raises:
        ConfigError: naming the file and the field that is missing or that this engine cannot compute.
    """
    directory = Path(path)
    file = directory / "config.json"
    config = read_json(file)
    architecture = (config.get("architectures") or ["none"])[0]
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"{file}: architecture {architecture} is not supported; the embedded server runs {', '.join(ARCHITECTURES)}; "
            "use inference.backend: sglang"
        )
    _refuse_unsupported(config, file)
    try:
        return _build(config, architecture, _eos_ids(config, directory), file)
    except KeyError as error:
        raise ConfigError(f"{file} has no field {error}, which {architecture} needs") from None


def _build(config: Mapping[str, Any], architecture: str, eos_ids: frozenset[int], file: Path) -> ModelSpec:
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    attention_bias = bool(config.get("attention_bias", False))
    theta, rope = _rope(config, file)
    qwen2 = architecture == "Qwen2ForCausalLM"
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or hidden // heads)
    if heads % kv_heads or head_dim % 2:
        raise ConfigError(f"{file}: {heads} heads, {kv_heads} key/value heads, head_dim {head_dim} do not fit together")
    return ModelSpec(
        architecture=architecture,
        model_type=str(config.get("model_type", "")),
        vocab_size=int(config["vocab_size"]),
        hidden_size=hidden,
        intermediate_size=int(config["intermediate_size"]),
        num_layers=int(config["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(config["rms_norm_eps"]),
        max_positions=int(config["max_position_embeddings"]),
        rope_theta=theta,
        rope=rope,
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=qwen2 or attention_bias,
        out_bias=attention_bias and not qwen2,
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=architecture == "Qwen3ForCausalLM",
        eos_ids=eos_ids,
    )


def _refuse_unsupported(config: Mapping[str, Any], file: Path) -> None:
    """Raise ConfigError for settings that change the computation in ways `Transformer` does not follow."""
    if config.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"{file}: hidden_act {config['hidden_act']!r} is not supported; expected 'silu'")
    if config.get("quantization_config"):
        raise ConfigError(f"{file}: quantized weights are not supported by the embedded server")
    if config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or ()):
        raise ConfigError(f"{file}: sliding-window attention is not supported by the embedded server")
    if float(config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ConfigError(f"{file}: partial_rotary_factor {config['partial_rotary_factor']} is not supported; expected 1")


def _rope(config: Mapping[str, Any], file: Path) -> tuple[float, RopeScaling]:
    """Read rotary settings from `rope_parameters`, or from `rope_theta` and `rope_scaling` of older files."""
    settings: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = settings.get("rope_theta", config.get("rope_theta"))
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise ConfigError(f"{file}: rope type {kind!r} is not supported; expected default, linear or llama3")
    return float(10000.0 if theta is None else theta), RopeScaling(
        kind=kind,
        factor=float(settings.get("factor", 1.0)),
        low_freq_factor=float(settings.get("low_freq_factor", 1.0)),
        high_freq_factor=float(settings.get("high_freq_factor", 4.0)),
        original_context=int(settings.get("original_max_position_embeddings", 8192)),
    )


def _eos_ids(config: Mapping[str, Any], directory: Path) -> frozenset[int]:
    found: set[int] = set()
    sources = [config]
    generation = directory / "generation_config.json"
    if generation.exists():
        sources.append(read_json(generation))
    for source in sources:
        value = source.get("eos_token_id")
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    return frozenset(int(token) for token in found)
