"""The architectures that can be imported: config.json from the keys of a file, and the names of the tensors.

Each key of an architecture is used, or is known to say nothing about the computation; any other is refused by name. The
tensors of a file must be those that the config makes, no more and no fewer.

Invariant: a model that is imported computes what the file's own program computes, but for the rounding of its type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from agentrl_gguf.header import GgufHeader
from agentrl_gguf.rotations import rope_parameters

ModelConfigFields: TypeAlias = dict[str, Any]
Change: TypeAlias = Literal["none", "unpermute_heads", "unpermute_kv_heads", "subtract_one"]
"""The change that a tensor needs: undo the order of rows in which llama.cpp rotates neighbours, or the one that it added."""

_DECODER: Final = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_PLAIN: Final = {**_DECODER, "ffn_norm.weight": "post_attention_layernorm.weight"}
_QKV_BIASES: Final = {f"attn_{each}.bias": f"self_attn.{each}_proj.bias" for each in "qkv"}
_ATTENTION_BIASES: Final = {**_QKV_BIASES, "attn_output.bias": "self_attn.o_proj.bias"}
_MLP_BIASES: Final = {f"ffn_{each}.bias": f"mlp.{each}_proj.bias" for each in ("gate", "up", "down")}
_HEAD_NORMS: Final = {"attn_q_norm.weight": "self_attn.q_norm.weight", "attn_k_norm.weight": "self_attn.k_norm.weight"}
_COMMON_KEYS: Final = frozenset({
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size", "expert_count",
    "expert_used_count", "attention.head_count", "attention.head_count_kv", "attention.key_length",
    "attention.value_length", "attention.layer_norm_rms_epsilon", "attention.causal", "rope.dimension_count",
    "rope.freq_base", "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.finetuned",
    "rope.scaling.original_context_length", "tensor_data_layout",
})  # fmt: skip
"""Keys after the name of the architecture that are used or checked."""
_GEMMA_3_LAYER: Final = {
    **_DECODER,
    **_HEAD_NORMS,
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
}
_GEMMA_3_FULL: Final = 6
"""Of so many layers of a Gemma 3 one attends to the whole context."""
_GEMMA_3_LOCAL_BASE: Final = 10_000.0
_GEMMA_3_LARGEST: Final = 62
"""Layers of Gemma 3 27B."""
_WINDOW_KEYS: Final = frozenset({
    "attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa", "final_logit_softcapping",
})  # fmt: skip
_LAYOUTS: Final = ("reference", "Meta AI original pth")


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What an architecture of GGUF is called by Hugging Face, and which tensors each of its layers has."""

    hf_class: str
    model_type: str
    layer: Mapping[str, str]
    """Names of a layer's tensors in the config's model by their names in a file."""
    permuted: bool = False
    """Whether rows of queries and keys are in the order in which llama.cpp rotates neighbours."""
    keys: frozenset[str] = _COMMON_KEYS
    extend: Callable[[GgufHeader, ModelConfigFields, dict[str, str]], None] | None = None
    """Adds fields of the config, and tensors that only some models of this architecture have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTensor:
    """A tensor of the model, where it stands in the file, and what is done to it."""

    name: str
    source: str
    shape: tuple[int, ...]
    change: Change = "none"

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model as config.json and a list of tensors."""

    config: ModelConfigFields
    """Without the ids of special tokens and the type of the weights."""
    tensors: tuple[NamedTensor, ...]

    @property
    def num_parameters(self) -> int:
        return sum(tensor.num_elements for tensor in self.tensors)


def describe(header: GgufHeader) -> Model:
    """Return the model that a header describes.

    Raises:
        ConfigError: the architecture or a key is unknown, or tensors are missing, too many or of another shape.
    """
    kind = _architecture(header)
    _check_model_keys(header, kind)
    config, layer = _config(header, kind)
    named = _named(header, kind, config, layer)
    _check_tensors(header, named, config)
    return Model(config=config, tensors=tuple(named))


def _architecture(header: GgufHeader) -> Architecture:
    name = header.architecture
    general = header.get("general.type", str)
    if general not in (None, "model"):
        raise header.error(f"general.type is {general!r}: expected a whole model; give the file of the model itself")
    if (header.get("split.count", int) or 0) > 1:
        raise header.error(
            "one of several pieces of a model; join them first: llama-gguf-split --merge FIRST.gguf WHOLE.gguf"
        )
    if name not in ARCHITECTURES:
        raise header.error(
            f"architecture {name!r} cannot be imported; known are {', '.join(sorted(ARCHITECTURES))}; for another one use "
            "the Hugging Face directory of the model"
        )
    return ARCHITECTURES[name]


def _check_model_keys(header: GgufHeader, kind: Architecture) -> None:
    prefix = f"{header.architecture}."
    if unknown := sorted(
        key for key in header.values if key.startswith(prefix) and key.removeprefix(prefix) not in kind.keys
    ):
        raise header.error(
            f"unknown keys {', '.join(unknown[:5])}: they may change what the model computes, so it is not imported; use "
            "the Hugging Face directory of the model"
        )
    if header.get(f"{prefix}expert_count", int):
        raise header.error("a mixture of experts, which agentrl does not train; use a dense model")
    if header.get(f"{prefix}attention.causal", bool) is False:
        raise header.error("its attention looks ahead, so it is no language model that writes; use a causal one")
    layout = header.get(f"{prefix}tensor_data_layout", str)
    if layout is not None and layout not in _LAYOUTS:
        raise header.error(
            f"{prefix}tensor_data_layout is {layout!r}: expected one of {', '.join(_LAYOUTS)}; convert it again"
        )


def _config(header: GgufHeader, kind: Architecture) -> tuple[ModelConfigFields, dict[str, str]]:
    name = header.architecture
    hidden, heads = header.need(f"{name}.embedding_length", int), _same(header, f"{name}.attention.head_count")
    kv_heads = _same(header, f"{name}.attention.head_count_kv", heads)
    if min(hidden, heads, kv_heads) < 1 or heads % kv_heads:
        raise header.error(f"embedding_length {hidden}, head_count {heads} and head_count_kv {kv_heads} do not fit together")
    head_dim = header.get(f"{name}.attention.key_length", int) or hidden // heads
    if (values := header.get(f"{name}.attention.value_length", int)) not in (None, head_dim):
        raise header.error(
            f"{name}.attention.value_length is {values}, and keys have {head_dim}: expected the same for both"
        )
    rotated = header.get(f"{name}.rope.dimension_count", int)
    if rotated not in (None, head_dim):
        raise header.error(f"{name}.rope.dimension_count is {rotated} of {head_dim}: only a part of each head is rotated")
    context = header.need(f"{name}.context_length", int)
    config: ModelConfigFields = {
        "architectures": [kind.hf_class],
        "model_type": kind.model_type,
        "vocab_size": _rows(header, "token_embd.weight"),
        "hidden_size": hidden,
        "intermediate_size": _same(header, f"{name}.feed_forward_length"),
        "num_hidden_layers": header.need(f"{name}.block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": _decimal(header.need(f"{name}.attention.layer_norm_rms_epsilon", float)),
        "max_position_embeddings": context,
        "rope_parameters": rope_parameters(header, head_dim),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_dropout": 0.0,
    }
    layer = dict(kind.layer)
    if kind.extend is not None:
        kind.extend(header, config, layer)
    return config, layer


def _decimal(value: float) -> float:
    """Return the shortest decimal number that is the same float32: 1e-05, where the file has 9.99999974e-06."""
    return float(str(np.float32(value)))


def _same(header: GgufHeader, key: str, default: int | None = None) -> int:
    """Return a value that is given once, or for each layer and the same for all."""
    found = header.values.get(key)
    if isinstance(found, list):
        distinct = set(header.integers(key) or ())
        if len(distinct) != 1:
            raise header.error(f"{key} differs between layers: {sorted(distinct)[:5]}; such a model cannot be imported")
        return distinct.pop()
    if found is None and default is not None:
        return default
    return header.need(key, int)


def _rows(header: GgufHeader, tensor: str) -> int:
    if tensor not in header.tensors:
        raise header.error(f"no tensor {tensor}; the file holds no weights, or not all of them: fetch it again")
    return header.tensors[tensor].shape[0]


def _named(header: GgufHeader, kind: Architecture, config: ModelConfigFields, layer: Mapping[str, str]) -> list[NamedTensor]:
    outer = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if not config["tie_word_embeddings"]:
        outer["output.weight"] = "lm_head.weight"
    names = dict(outer)
    for number in range(config["num_hidden_layers"]):
        names |= {f"blk.{number}.{source}": f"model.layers.{number}.{name}" for source, name in layer.items()}
    if missing := sorted(names.keys() - header.tensors.keys()):
        raise header.error(f"tensors are missing: {', '.join(missing[:5])}; fetch or convert the file again")
    if extra := sorted(header.tensors.keys() - names.keys() - {"rope_freqs.weight"}):
        raise header.error(
            f"unknown tensors {', '.join(extra[:5])}: a {config['model_type']} model has no place for them; use the Hugging "
            "Face directory of the model"
        )
    return [
        NamedTensor(name=name, source=source, shape=header.tensors[source].shape, change=_change(kind, name))
        for source, name in names.items()
    ]


def _change(kind: Architecture, name: str) -> Change:
    if kind.permuted and ".q_proj." in name:
        return "unpermute_heads"
    if kind.permuted and ".k_proj." in name:
        return "unpermute_kv_heads"
    return "subtract_one" if kind.model_type.startswith("gemma") and name.endswith("norm.weight") else "none"


def _check_tensors(header: GgufHeader, named: list[NamedTensor], config: ModelConfigFields) -> None:
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    vocabulary = config["vocab_size"]
    wide = {
        "q_proj.weight": (queries, hidden), "k_proj.weight": (keys, hidden), "v_proj.weight": (keys, hidden),
        "o_proj.weight": (hidden, queries), "gate_proj.weight": (inner, hidden), "up_proj.weight": (inner, hidden),
        "down_proj.weight": (hidden, inner), "q_proj.bias": (queries,), "k_proj.bias": (keys,), "v_proj.bias": (keys,),
        "o_proj.bias": (hidden,), "gate_proj.bias": (inner,), "up_proj.bias": (inner,), "down_proj.bias": (hidden,),
        "q_norm.weight": (head,), "k_norm.weight": (head,), "embed_tokens.weight": (vocabulary, hidden),
        "lm_head.weight": (vocabulary, hidden),
    }  # fmt: skip
    for tensor in named:
        expected = wide.get(".".join(tensor.name.split(".")[-2:]), (hidden,))
        if tensor.shape != expected:
            raise header.error(
                f"tensor {tensor.source} is {list(tensor.shape)}, and the keys of the file make it {list(expected)}; fetch "
                "or convert the file again"
            )


def _extend_llama(header: GgufHeader, config: ModelConfigFields, layer: dict[str, str]) -> None:
    for field, biases in (("attention_bias", _ATTENTION_BIASES), ("mlp_bias", _MLP_BIASES)):
        config[field] = any(f"blk.0.{name}" in header.tensors for name in biases)
        if config[field]:
            layer |= biases


def _extend_gemma3(header: GgufHeader, config: ModelConfigFields, layer: dict[str, str]) -> None:
    layers, rope = config["num_hidden_layers"], config["rope_parameters"]
    window = header.need("gemma3.attention.sliding_window", int)
    every = header.get("gemma3.attention.sliding_window_pattern", int) or _GEMMA_3_FULL
    local = header.get("gemma3.rope.freq_base_swa", float) or _GEMMA_3_LOCAL_BASE
    del config["hidden_act"]
    config |= {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": _gemma3_scalar(config),
        "sliding_window": window,
        "layer_types": ["sliding_attention" if number % every else "full_attention" for number in range(1, layers + 1)],
        "rope_parameters": {
            "full_attention": rope,
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
        "attn_logit_softcapping": None,
        "final_logit_softcapping": header.get("gemma3.final_logit_softcapping", float),
    }


def _gemma3_scalar(config: ModelConfigFields) -> int:
    """Return the number by whose root queries are divided: no file has it, and only the model of 27B differs."""
    largest = config["num_hidden_layers"] == _GEMMA_3_LARGEST
    return config["hidden_size"] // config["num_attention_heads"] if largest else config["head_dim"]


def _extend_qwen3(header: GgufHeader, config: ModelConfigFields, layer: dict[str, str]) -> None:
    config["attention_bias"] = False


ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "gemma3": Architecture(
        hf_class="Gemma3ForCausalLM",
        model_type="gemma3_text",
        layer=_GEMMA_3_LAYER,
        keys=_COMMON_KEYS | _WINDOW_KEYS,
        extend=_extend_gemma3,
    ),
    "llama": Architecture(
        hf_class="LlamaForCausalLM", model_type="llama", layer=_PLAIN, permuted=True, extend=_extend_llama
    ),
    "qwen2": Architecture(hf_class="Qwen2ForCausalLM", model_type="qwen2", layer={**_PLAIN, **_QKV_BIASES}),
    "qwen3": Architecture(
        hf_class="Qwen3ForCausalLM", model_type="qwen3", layer={**_PLAIN, **_HEAD_NORMS}, extend=_extend_qwen3
    ),
}
"""By their names in GGUF files. Mistral models are written as `llama`."""
