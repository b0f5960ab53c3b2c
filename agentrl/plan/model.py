"""The model of a run as its config.json describes it or, without that file, as the Qwen3 that its path names.

Invariant: config.json is read once, and no weight is loaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.config import ModelConfig
from agentrl.config.names import local_file, model_file
from agentrl.errors import ConfigError
from agentrl.weights.architectures import OWN_FORWARD, decoder_fields, reason_to_refuse, rotation_bound
from agentrl.weights.model_files import weight_files

_FOUR_NORMS = ("gemma2", "gemma3_text", "glm4")
"""Families, by `model_type`, whose layers norm what enters and leaves attention and MLP."""
_KEY_NORMS = ("qwen3", "qwen3_moe", "gemma3_text")
"""Families that norm queries and keys of each head."""
_TIED = ("gemma2", "gemma3_text", "cohere2", "smollm3")
"""Families whose output head is tied where config.json does not say it."""
_WIDE_KEY_NORMS = ("olmo2", "olmo3")
"""Families that norm queries and keys of all heads together."""
_FUSED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "phi3": {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")},
    "glm4": {"gate_up_proj": ("gate_proj", "up_proj")},
}
"""Linear layers that a family has in place of several."""
_PREFIX = "model."
"""Beginning of the names of weights within the decoder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The shape of a decoder whose layers are alike: dense, or a mixture of experts in each.

    Example:
        >>> read_model("/models/Qwen3-4B").shape.num_parameters
        4022468096
    """

    hidden: int
    intermediate: int
    """Of the MLP, or of one expert."""
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    query_key_norm: bool = True
    wide_query_key_norm: bool = False
    """Queries and keys are normed over all heads together."""
    attention_bias: bool = False
    norms: int = 2
    """Norms of a layer over its hidden size."""
    experts: int = 0
    """Experts of each layer; 0: it is dense."""
    experts_per_token: int = 1
    """MLPs that a token goes through in each layer."""
    kind: str = "qwen3"

    @property
    def num_parameters(self) -> int:
        """P: embeddings, output head where it is not tied, attention, MLP or experts with their router, and norms."""
        return self.outside + self.layers * self.layer + self.hidden

    @property
    def outside(self) -> int:
        """Parameters of the embeddings, and of the output head where it is not tied."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def layer(self) -> int:
        """Parameters of one layer."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * self.hidden * queries + 2 * self.hidden * keys
        attention += 2 * self.head_dim * self.query_key_norm + (queries + 2 * keys) * self.attention_bias
        attention += (queries + keys) * self.wide_query_key_norm
        mlp = self.hidden * (3 * self.intermediate * max(1, self.experts) + self.experts)
        return attention + mlp + self.norms * self.hidden

    @property
    def linear_sizes(self) -> Mapping[str, tuple[int, int]]:
        """Outputs and inputs of the linear layers of each block that an adapter can be added to."""
        queries, keys, hidden = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.hidden
        attention = {"q_proj": (queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden)}
        inner = {"gate_proj": (self.intermediate, hidden), "up_proj": (self.intermediate, hidden)}
        sizes = attention | {"o_proj": (hidden, queries)}
        if not self.experts:  # those of a layer are one tensor
            sizes |= inner | {"down_proj": (hidden, self.intermediate)}
        for name, parts in _FUSED.get(self.kind, {}).items():
            sizes[name] = (sum(sizes.pop(part)[0] for part in parts), hidden)
        return sizes

    def adapter_layer(self, rank: int, targets: Sequence[str]) -> int:
        """Return the parameters of an adapter in one layer; targets that it does not have count nothing."""
        return rank * sum(sum(self.linear_sizes.get(target, ())) for target in targets)

    def kv_bytes(self, element_bytes: int) -> int:
        """Return the bytes of one token's keys and values in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * element_bytes

    def saved_bytes(self, dtype: str, *, checkpointing: bool, tp: int = 1) -> int:
        """Return the bytes of activations that autograd keeps for one token, without the weights.

        The factors count the tensors that transformers' Qwen3 layer saves, for bfloat16 with copies of the weights. A
        checkpointed layer keeps its input only; one layer at a time is recomputed. Tensor parallelism splits what is within
        attention and MLP, not the inputs of layers and norms. A token's input is copied for each of its experts.
        """
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        wide = dtype == "float32"
        hidden, inner, query, key = (24, 16, 16.5, 16.25) if wide else (16, 8, 10.5, 10.25)
        copies = self.experts_per_token * (12 if wide else 6) if self.experts else 0
        within = inner * self.intermediate * self.experts_per_token + query * queries + key * keys
        layer = (hidden + copies) * self.hidden + within / tp
        return int(self.layers * (4 if wide else 2) * self.hidden + layer) if checkpointing else int(self.layers * layer)


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, *, tied: bool = False, experts: int = 0) -> ModelShape:
    return ModelShape(
        hidden=hidden,
        intermediate=intermediate,
        layers=layers,
        heads=heads,
        kv_heads=4 if experts else 8,
        head_dim=128,
        vocabulary=151_936,
        tied=tied,
        experts=experts,
        experts_per_token=8 if experts else 1,
        kind="qwen3_moe" if experts else "qwen3",
    )


_PUBLISHED = {
    "0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "1.7b": _qwen3(2048, 6144, 28, 16, tied=True),
    "4b": _qwen3(2560, 9728, 36, 32, tied=True),
    "8b": _qwen3(4096, 12_288, 36, 32),
    "14b": _qwen3(5120, 17_408, 40, 40),
    "32b": _qwen3(5120, 25_600, 64, 64),
    "30b-a3b": _qwen3(2048, 768, 48, 32, experts=128),
    "235b-a22b": _qwen3(4096, 1536, 94, 64, experts=128),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The facts about a model that decide whether and how it is trained."""

    name: str
    """As the run file gives it."""
    shape: ModelShape | None
    """None: neither config.json nor the name tells, or its layers are not alike."""
    refusal: str | None = None
    """Why it is neither trained nor served, such as images, with a fix."""
    own_forward: bool = True
    """Whether the embedded server computes it itself, and not with transformers' module; or nothing is known."""
    caps_attention: bool = False
    """Whether attention caps its scores, which no fused kernel of the trainer computes."""
    has_windows: bool = False
    """Whether a layer attends within a window."""
    architecture: str = ""
    """`model_type` of config.json; empty: nothing is known."""
    rotation_bound: int | None = None
    """Tokens up to which rotations do not depend on the longest sequence of a pass; None: they never do."""

    def problems(self, context: int | None) -> list[str]:
        """Return the reasons why it cannot be trained on `context` tokens, each with a fix; None: as many as it takes."""
        if self.rotation_bound is not None and (context is None or context > self.rotation_bound):
            return [
                f"model.path: beyond {self.rotation_bound} tokens, {self.name} rotates positions by the longest sequence of "
                "a pass (rope_type dynamic or longrope), so a log-prob would depend on the samples beside it; set "
                f"inference.max_context_tokens to at most {self.rotation_bound}"
            ]
        return [] if self.refusal is None else [f"model.path: {self.refusal}"]


def read_model(path: str, name: str | None = None) -> ModelFacts:
    """Return the facts about the model in `path`, which the run file calls `name`."""
    name = path if name is None else name
    try:
        return facts_of(json.loads((Path(path) / "config.json").read_bytes()), name)
    except (OSError, ValueError):
        named = re.match(rf"qwen3-({'|'.join(map(re.escape, _PUBLISHED))})(?![\w.])", Path(path).name.lower())
        shape = None if named is None else _PUBLISHED[named[1]]
        if shape is None:
            return ModelFacts(name=name, shape=None)
        return ModelFacts(name=name, shape=shape, own_forward=not shape.experts, architecture=shape.kind)


def facts_of(config: Mapping[str, Any], name: str) -> ModelFacts:
    """Return the facts in a config.json about the model that the run file calls `name`."""
    text: Mapping[str, Any] = decoder_fields(config)
    try:
        shape = _from_config(text)
    except KeyError:
        shape = None
    kinds = config.get("architectures") or OWN_FORWARD
    return ModelFacts(
        name=name,
        shape=shape,
        refusal=reason_to_refuse(config, name),
        own_forward=kinds[0] in OWN_FORWARD,
        caps_attention=text.get("attn_logit_softcapping") is not None,
        has_windows=_has_windows(config),
        architecture=text.get("model_type", ""),
        rotation_bound=rotation_bound(config),
    )


def model_of(config: ModelConfig) -> ModelFacts:
    """Return the facts about the model of a run file; a single file is not imported for them."""
    form = model_file(config.path)
    if form is not None:
        try:
            return facts_of(form.config(local_file(config.path)), config.path)
        except ConfigError:
            return ModelFacts(name=config.path, shape=None)  # `missing_here` says what is wrong with it
    return read_model(config.local_path or config.path, config.path)


def pattern_problems(trainable: str | None, config: ModelConfig) -> list[str]:
    """Return an error where `trainer.trainable` matches no weight of a model that is on the disk; its headers are read."""
    if trainable is None:
        return []
    try:
        names = sorted(name for tensors in weight_files(Path(config.local_path or config.path)).values() for name in tensors)
    except ConfigError:
        return []  # it is not here, or the trainer says what is wrong with it
    # A checkpoint of the decoder alone leaves out the prefix of the names by which its weights are trained.
    if not names or any(re.search(trainable, each) for name in names for each in (name, f"{_PREFIX}{name}")):
        return []
    return [f"trainer.trainable: {trainable!r} matches no weight of {config.path}; it has such as {', '.join(names[:3])}"]


def _from_config(config: Mapping[str, Any]) -> ModelShape | None:
    heads, kind = config["num_attention_heads"], config.get("model_type", "")
    if "linear_attention" in (config.get("layer_types") or ()):
        return None
    mixed = kind == "qwen3_moe" and config.get("decoder_sparse_step", 1) == 1 and not config.get("mlp_only_layers")
    if not mixed and any(config.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        return None
    return ModelShape(
        hidden=config["hidden_size"],
        intermediate=config["moe_intermediate_size" if mixed else "intermediate_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocabulary=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", kind in _TIED)),
        query_key_norm=kind in _KEY_NORMS,
        wide_query_key_norm=kind in _WIDE_KEY_NORMS,
        attention_bias=kind == "qwen2" or (kind == "glm4" and bool(config.get("attention_bias"))),
        norms=4 if kind in _FOUR_NORMS else 1 if kind == "cohere2" else 2,
        experts=(config.get("num_experts") or config["num_local_experts"]) if mixed else 0,
        experts_per_token=config["num_experts_per_tok"] if mixed else 1,
        kind=kind,
    )


def _has_windows(config: Mapping[str, Any]) -> bool:
    layers = config.get("layer_types")
    if layers is not None:
        return any(kind != "full_attention" for kind in layers)
    return config.get("sliding_window") is not None and config.get("use_sliding_window", True)
