"""The architectures that agentrl holds: a tiny random checkpoint of each, with the settings that it is known for."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support.tiny import build_tokenizer

WINDOW: Final = 8
"""Of the layers that attend within one: shorter than every sequence of the tests."""
_SMALL: Final[dict[str, Any]] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "pad_token_id": None,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """An architecture and its settings."""

    title: str
    model_type: str
    """As `AutoConfig.for_model` takes it."""
    fields: dict[str, Any] = field(default_factory=dict[str, Any])
    own: bool = False
    """The forward pass of the embedded server computes it."""
    recurrent: bool = False
    """Layers have a state in place of keys and values."""
    targets: str = "the usual seven"
    """Linear layers that take an adapter."""
    notes: str = ""
    difference: str
    """Largest difference of log-probs of the server and of the trainer, as measured once, nats; tests allow 1e-5."""


FAMILIES: Final[dict[str, Family]] = {
    "llama": Family(difference="1.9e-6", title="Llama", model_type="llama", own=True),
    "qwen2": Family(difference="1.9e-6", title="Qwen2, Qwen2.5", model_type="qwen2", own=True),
    "qwen3": Family(difference="3.8e-6", title="Qwen3", model_type="qwen3", own=True),
    "mistral": Family(
        difference="1.9e-6", notes="windows", title="Mistral", model_type="mistral", fields={"sliding_window": WINDOW}
    ),
    "gemma2": Family(
        difference="9.5e-7",
        notes="windows; capped scores and logits; the trainer's attention takes memory of length squared",
        title="Gemma 2",
        model_type="gemma2",
        fields={
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 24,
        },
    ),
    "gemma3": Family(
        difference="1.4e-6",
        notes="windows, two rotations; text checkpoints",
        title="Gemma 3, text",
        model_type="gemma3_text",
        fields={"sliding_window": WINDOW, "sliding_window_pattern": 2, "query_pre_attn_scalar": 24},
    ),
    "phi3": Family(
        difference="1.4e-6",
        targets="`qkv_proj`, `o_proj`, `gate_up_proj`, `down_proj`",
        notes="windows, fused matrices; of a longrope model, contexts up to the original length",
        title="Phi-3, Phi-4",
        model_type="phi3",
        fields={"sliding_window": WINDOW, "partial_rotary_factor": 0.5},
    ),
    "smollm3": Family(
        difference="1.9e-6",
        notes="layers without rotation",
        title="SmolLM3",
        model_type="smollm3",
        fields={"no_rope_layer_interval": 2, "tie_word_embeddings": True},
    ),
    "olmo2": Family(difference="1.9e-6", notes="norms after attention and MLP", title="OLMo 2", model_type="olmo2"),
    "granite": Family(
        difference="9.5e-7",
        notes="scaled embeddings, residuals and logits",
        title="Granite",
        model_type="granite",
        fields={
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.2,
        },
    ),
    "glm4": Family(
        difference="1.7e-6",
        targets="`q_proj`, `k_proj`, `v_proj`, `o_proj`, `gate_up_proj`, `down_proj`",
        notes="partial rotation, fused matrices",
        title="GLM-4",
        model_type="glm4",
        fields={"partial_rotary_factor": 0.5},
    ),
    "qwen3.5": Family(
        difference="9.5e-7",
        targets="the usual seven, of the layers that have them",
        notes="recurrent layers: each of a group computes its prompt; memory unknown to the plan; text checkpoints",
        title="Qwen3.5, text",
        model_type="qwen3_5_text",
        fields={
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "initializer_range": 0.05,  # chunks of a recurrence round otherwise than the whole, by 1e-5 in sharper models
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
        recurrent=True,
    ),
    "cohere2": Family(
        difference="9.5e-7",
        notes="windows, scaled logits, one norm for attention and MLP",
        title="Command R7B",
        model_type="cohere2",
        fields={"sliding_window": WINDOW, "logit_scale": 0.5},
    ),
    "olmo3": Family(
        difference="1.9e-6", notes="windows", title="OLMo 3", model_type="olmo3", fields={"sliding_window": WINDOW}
    ),
    "qwen3_moe": Family(
        difference="9.5e-7",
        targets="`q_proj`, `k_proj`, `v_proj`, `o_proj`",
        notes="experts, each token's own in trainer and server; weights of experts are published one by one",
        title="Qwen3, mixture of experts",
        model_type="qwen3_moe",
        fields={"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True},
    ),
}
_SHORT: Final = ("gemma2", "phi3", "qwen3.5")
"""Windows and caps, fused layers, recurrent states: what can go wrong in each way, for `make test`."""
HELD: Final = [
    pytest.param(name, marks=() if name in _SHORT else pytest.mark.long)
    for name, family in FAMILIES.items()
    if not family.own
]
"""Families that transformers' modules compute, as parameters of a test."""


def family_checkpoint(path: Path, name: str, *, seed: int = 0, spread: float | None = None, **fields: Any) -> Path:  # noqa: ANN401 - config fields
    """Write a random checkpoint of the family, with the tokenizer of all tiny models, to `path` and return it."""
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoConfig, AutoModelForCausalLM

    family = FAMILIES[name]
    vocab_size = build_tokenizer(path)
    end = Tokenizer.from_file(str(path / "tokenizer.json")).token_to_id("<|im_end|>")
    settings = {**_SMALL, "vocab_size": vocab_size, "eos_token_id": end, **family.fields, **fields}
    if spread is not None:
        settings["initializer_range"] = spread
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family.model_type, **settings))
        for parameter in model.parameters():  # norms that do nothing would hide a mistake
            if parameter.ndim == 1:
                with torch.no_grad():
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(path)
    return path


def families_table() -> str:
    """Return the table of docs/howto/models.md."""
    head = "| family | `model_type` | forward pass | server and trainer differ by | after an interruption | LoRA | notes |"
    rows = [head, "|---|---|---|---|---|---|---|"]
    for family in FAMILIES.values():
        engine, lora = "own", f"{family.targets}; merged or beside the weights"
        after = "continues from its cache"
        if not family.own:
            engine, lora = "transformers", f"{family.targets}; merged"
        if family.recurrent:
            after = "continues from its state; another prefix is computed again"
        cells = (family.title, f"`{family.model_type}`", engine, family.difference, after, lora, family.notes)
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)
