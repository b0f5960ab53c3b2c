"""The logits that a module of transformers makes of hidden states, with whatever it does after its output head.

Granite and Cohere scale their logits, Gemma 2 caps them: none of it is repeated here. The module's own forward pass runs
with its decoder replaced by one that gives the hidden states at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast, MoeModelOutputWithPast


class _Given(nn.Module):
    """A decoder that returns its input embeddings as last hidden states."""

    def forward(self, *_: object, inputs_embeds: Tensor, **more: object) -> MoeModelOutputWithPast:
        del more
        return MoeModelOutputWithPast(last_hidden_state=inputs_embeds)  # pyright: ignore[reportArgumentType] - declared for CUDA


def logits_of(module: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """Return what makes the logits, [n, V], of last hidden states, [n, hidden], as `module` does.

    It shares the head of `module`, so it follows its weights; hooks of `module` itself do not run.
    """
    return _forward_with(module, {module.base_model_prefix: _Given()})


def head_is_last(module: PreTrainedModel) -> bool:
    """Return whether logits are what the output head alone makes of hidden states; no weight is read."""
    head = module.get_output_embeddings()
    [*names] = [name for name, child in module.named_children() if child is head]
    if len(names) != 1:
        return False
    rest = _forward_with(module, {module.base_model_prefix: _Given(), names[0]: nn.Identity()})
    values = torch.linspace(-1e4, 1e4, 64)[None]  # far beyond any soft cap
    return torch.equal(rest(values), values)


def _forward_with(module: PreTrainedModel, parts: Mapping[str, nn.Module]) -> Callable[[Tensor], Tensor]:
    changed = copy(module)
    inside = cast("dict[str, nn.Module | None]", vars(module)["_modules"])
    vars(changed)["_modules"] = {**inside, **parts}

    def logits(hidden: Tensor) -> Tensor:
        # Not by a call: a sharded module shares its hooks with the copy, and they belong to whole passes.
        output: CausalLMOutputWithPast = changed.forward(inputs_embeds=hidden[None], use_cache=False)
        assert output.logits is not None
        return output.logits[0]

    return logits
