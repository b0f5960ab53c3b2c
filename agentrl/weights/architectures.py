"""The models that agentrl trains and serves, as their config.json describes them: decoders of text. No torch.

Invariant: what is refused is refused by name, with a fix, before a weight is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

import orjson

from agentrl.errors import ConfigError

OWN_FORWARD: Final = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM")
"""Architectures that the embedded server computes with a forward pass of its own; others with transformers' modules."""
_EXPERT_KEYS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Fields that give the number of experts, by family."""
WITH_EXPERTS: Final = ("Qwen3MoeForCausalLM",)
"""Mixtures of experts that are trained and served."""
_OTHER_INPUTS: Final = ("vision_config", "audio_config", "speech_config", "perception_config")
_BOUNDED_ROTATIONS: Final = ("dynamic", "longrope")
"""Types of rotary embeddings whose angles depend on the longest sequence of a pass, beyond a length."""


def decoder_fields(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of the decoder: those of `text_config` where there is one."""
    inner: object = config.get("text_config")
    return cast("Mapping[str, Any]", inner) if isinstance(inner, dict) and inner else config


def number_of_experts(config: Mapping[str, Any]) -> int:
    """Return the experts of a layer; 0 or 1: it is dense."""
    counts = [decoder_fields(config).get(key) for key in _EXPERT_KEYS]
    return max((count for count in counts if isinstance(count, int)), default=0)


def rotation_bound(config: Mapping[str, Any]) -> int | None:
    """Return the tokens up to which rotations do not depend on the longest sequence of a pass; None: they never do."""
    fields = decoder_fields(config)
    given: Mapping[str, Any] = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if (given.get("rope_type") or given.get("type")) not in _BOUNDED_ROTATIONS:
        return None
    name = "original_max_position_embeddings"
    return given.get(name) or fields.get(name) or fields.get("max_position_embeddings")


def reason_to_refuse(config: Mapping[str, Any], name: object) -> str | None:
    """Return why the model `name` is neither trained nor served, with a fix; None: it is a decoder of text that is."""
    kinds: object = config.get("architectures")
    kind = str(cast("list[object]", kinds)[0]) if isinstance(kinds, list) and kinds else config.get("model_type", "unknown")
    experts = number_of_experts(config)
    if experts > 1 and kind not in WITH_EXPERTS:
        return (
            f"{name} ({kind}) is a mixture of {experts} experts; of such models agentrl trains {', '.join(WITH_EXPERTS)}; "
            "use one of these, or a dense model, such as Qwen3, Llama, Mistral or Gemma"
        )
    if config.get("is_encoder_decoder"):
        return f"{name} ({kind}) is an encoder with a decoder, and agentrl trains decoders; use a causal language model"
    if any(config.get(key) for key in _OTHER_INPUTS):
        return (
            f"{name} ({kind}) takes images or sound besides text, which agentrl does not train; use the checkpoint of a "
            "text model, or save the language model of this one by itself with transformers (`save_pretrained`)"
        )
    return None


def check_dense_decoder(path: Path) -> None:
    """Raise ConfigError where there is a `reason_to_refuse` the model in `path`; one that cannot be read is not judged."""
    try:
        config: object = orjson.loads((path / "config.json").read_bytes())
    except (OSError, ValueError):
        return
    reason = reason_to_refuse(cast("dict[str, Any]", config), path) if isinstance(config, dict) else None
    if reason is not None:
        raise ConfigError(reason)
