"""A forward pass in bfloat16 of a module whose weights are float32."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn


def compute_in_bfloat16(module: nn.Module) -> None:
    """Make each part of `module` that has its own weights compute with bfloat16 copies of them, as FSDP does.

    A part and not a whole block: transformers checkpoints the inside of a block, without the hooks of the block.
    """
    for part in module.modules():
        if any(True for _ in part.parameters(recurse=False)):
            _Copies(part)


class _Copies:
    def __init__(self, part: nn.Module) -> None:
        self._masters: dict[str, Tensor | None] = {}
        part.register_forward_pre_hook(self._enter)
        part.register_forward_hook(self._leave, always_call=True)  # an error, or a recomputation that stops early

    def _enter(self, part: nn.Module, inputs: tuple[object, ...]) -> None:
        held = cast("dict[str, Tensor | None]", vars(part)["_parameters"])
        self._masters = dict(held)
        for name, master in self._masters.items():
            held[name] = None if master is None else master.to(torch.bfloat16)

    def _leave(self, part: nn.Module, inputs: tuple[object, ...], output: object) -> None:
        cast("dict[str, Tensor | None]", vars(part)["_parameters"]).update(self._masters)
