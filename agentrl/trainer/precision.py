"""A forward pass in bfloat16 of a module whose weights are float32.

On a CPU that multiplies bfloat16 slowly, linear layers can compute with the same values in float32, and round what they
return: forward and backward, a product is the float32 sum of products of bfloat16 values, rounded once, as it is elsewhere.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn


def compute_in_bfloat16(module: nn.Module, *, widened: bool = False) -> None:
    """Make each part of `module` that has its own weights compute with bfloat16 copies of them, as FSDP does.

    A part and not a whole block: transformers checkpoints the inside of a block, without the hooks of the block.
    With `widened`, linear layers compute with the values of those copies in float32.
    """
    for part in module.modules():
        if any(True for _ in part.parameters(recurse=False)):
            _Copies(part, widened=widened and isinstance(part, nn.Linear))


class _Copies:
    def __init__(self, part: nn.Module, *, widened: bool) -> None:
        self._masters: dict[str, Tensor | None] = {}
        self._widened = widened
        part.register_forward_pre_hook(self._enter)
        part.register_forward_hook(self._leave, always_call=True)  # an error, or a recomputation that stops early

    def _enter(self, part: nn.Module, inputs: tuple[object, ...]) -> tuple[object, ...]:
        held = cast("dict[str, Tensor | None]", vars(part)["_parameters"])
        self._masters = dict(held)
        for name, master in self._masters.items():
            held[name] = None if master is None else self._as_computed(master.to(torch.bfloat16))
        return tuple(self._as_computed(each) if isinstance(each, Tensor) else each for each in inputs)

    def _leave(self, part: nn.Module, inputs: tuple[object, ...], output: object) -> Tensor | None:
        cast("dict[str, Tensor | None]", vars(part)["_parameters"]).update(self._masters)
        return output.to(torch.bfloat16) if self._widened and isinstance(output, Tensor) else None

    def _as_computed(self, tensor: Tensor) -> Tensor:
        return tensor.float() if self._widened else tensor
