"""A model without weights: what config.json describes, on torch's meta device, and the memory for what a process holds.

Invariant: between the two steps the model may be split, so no process ever has memory for all of it. Buffers that no file
holds, such as the frequencies of rotary embeddings, have their values from the beginning.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from agentrl.errors import ConfigError


def empty_model(path: Path) -> PreTrainedModel:
    """Return the float32 model of the HF directory `path` without weights.

    Raises:
        ConfigError: there is no config.json of a causal language model, or its weights are quantized.
    """
    if not (path / "config.json").is_file():
        raise ConfigError(f"{path}: expected a local Hugging Face model directory with a config.json")
    try:
        config = AutoConfig.from_pretrained(str(path), local_files_only=True)
        if getattr(config, "quantization_config", None) is not None:
            raise ConfigError(f"{path}: the weights are quantized, and training needs them in float32, bfloat16 or float16")
        with torch.device("meta"):
            module: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation="sdpa"
            )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: cannot be loaded as a causal language model: {error}") from error
    _fill_buffers(module)
    # HF keeps the gradient of the padding row at zero; here padding never reaches the loss, and the row may be a real token.
    embedding = module.get_input_embeddings()
    if isinstance(embedding, nn.Embedding):
        embedding.padding_idx = None
    return module


def _fill_buffers(module: PreTrainedModel) -> None:
    """Compute the buffers that are in no file, in host memory, as transformers does after it has loaded a model."""
    kept = module.state_dict(keep_vars=True)
    for tensor in kept.values():
        _mark(tensor, is_initialized=True)
    for path, owner in module.named_modules():
        for name, buffer in owner.named_buffers(recurse=False):
            if f"{path}.{name}".removeprefix(".") not in kept:
                setattr(owner, name, torch.empty_like(buffer, device="cpu"))
                _mark(owner, is_initialized=False)
    module.initialize_weights()


def _mark(thing: Tensor | nn.Module, *, is_initialized: bool) -> None:
    """Tell transformers whether to compute the initial values of a tensor, or of the tensors of a module."""
    object.__setattr__(thing, "_is_hf_initialized", is_initialized)


def materialize(module: nn.Module, device: torch.device) -> None:
    """Give the tensors of `module`, or this rank's parts of them, memory on `device`; tied ones stay tied.

    The values of tensors without memory are undefined afterwards; the others are moved.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if parameter not in made:
                made[parameter] = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
            owner.register_parameter(name, made[parameter])
        for name, buffer in owner.named_buffers(recurse=False):
            setattr(owner, name, torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device))
