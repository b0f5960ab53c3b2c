"""Read the weights of a model from the files of a checkpoint.

Invariant: of a tensor that files hold as the model does, a process reads the part that it holds, and nothing else. What is
made of several tensors is made whole, one at a time, and cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightTransform

from agentrl.trainer.loading.names import plan_reading
from agentrl.trainer.parallel.held import held_box
from agentrl.trainer.tensors import torch_tensor
from agentrl.weights.parts import StoredTensor


def read_weights(
    module: PreTrainedModel, conversions: Sequence[WeightTransform], stored: Mapping[str, StoredTensor], where: object
) -> None:
    """Replace the weights of `module`, or this rank's parts of them, by those of a checkpoint; no collective.

    Args:
        module: the model, split or not.
        conversions: `conversions_of` the model before it was split.
        stored: the tensors of the checkpoint, in any type of floating-point numbers.
        where: the checkpoint, for messages.

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
