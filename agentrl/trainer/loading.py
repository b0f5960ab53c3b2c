"""Load a Hugging Face checkpoint into the trained model; each process reads only the parts that it holds.

A model begins on torch's meta device and may be split there, so no process ever has memory for all of it. Tensors that
transformers makes of several are made whole, one at a time, and cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightTransform

from agentrl.trainer.parallel.shard import held_box
from agentrl.trainer.parallel.snapshot import torch_tensor
from agentrl.weights.modules import plan_reading
from agentrl.weights.tensors import StoredTensor


def read_weights(
    module: PreTrainedModel, conversions: Sequence[WeightTransform], stored: Mapping[str, StoredTensor], where: object
) -> None:
    """Load the weights of a checkpoint into `module`, or this rank's parts of them; no collective.

    Raises:
        ConfigError: it is the checkpoint of another model; nothing has changed.
    """
    plan = plan_reading(module, conversions, stored, where)
    tensors: dict[str, Tensor] = module.state_dict(keep_vars=True)
    with torch.no_grad():
        for target, name in plan.same.items():
            offset, elements = held_box(tensors[target])
            elements.copy_(torch_tensor(stored[name].box(offset, tuple(elements.shape))))
        for conversion in plan.converted:
            sources = {name: torch_tensor(stored[name].whole()).float() for _, name in conversion.sources}
            for target, value in conversion.made(module, sources).items():
                offset, elements = held_box(tensors[target])
                ends = zip(offset, elements.shape, strict=True)
                elements.copy_(value[tuple(slice(begin, begin + size) for begin, size in ends)])


def set_for_training(module: PreTrainedModel, *, gradient_checkpointing: bool) -> None:
    """Switch dropout off, and have `module` recompute activations in the backward pass if that is wanted."""
    for part in module.modules():
        _switch_dropout_off(part)
    if gradient_checkpointing:  # transformers 5.20 renamed the method and deprecated the former name
        enable = getattr(module, "activation_checkpointing_enable", module.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
    module.train(gradient_checkpointing)


def _switch_dropout_off(module: nn.Module) -> None:
    # The behavior policy samples without dropout, so the proximal and current log-probs must be computed without it.
    if isinstance(module, nn.Dropout):
        module.p = 0.0
    if isinstance(getattr(module, "attention_dropout", None), float):
        object.__setattr__(module, "attention_dropout", 0.0)
