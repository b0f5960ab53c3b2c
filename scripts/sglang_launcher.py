"""Start a real SGLang server on a CPU: run with the Python of `.sglang-venv`, arguments as for `sglang.launch_server`.

SGLang 0.5.23 imports two compiled packages that have no CPU build; this script gives both just enough to be imported. The
dense CPU path never calls them. SGLang's child processes import the main script again, so each of them has the placeholders.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable

import torch

# torchvision's operators are linked against CUDA torch and do not load; its import asks for these two by name.
_TORCHVISION = torch.library.Library("torchvision", "DEF")
for _operator in ("nms", "qnms"):
    _TORCHVISION.define(f"{_operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


class _MissingKernels(types.ModuleType):
    """Stands for `sgl_kernel`: every name imports, and calling it says what is missing."""

    def __getattr__(self, name: str) -> Callable[..., object]:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_args: object, **_kwargs: object) -> object:
            raise RuntimeError(
                f"sgl_kernel.{name} has no CPU build; this SGLang runs dense models on the torch_native backend only"
            )

        return missing


sys.modules["sgl_kernel"] = _MissingKernels("sgl_kernel")


def main() -> None:
    """Run the server until it is stopped, then end its whole process tree."""
    from sglang.launch_server import run_server  # pyright: ignore[reportMissingImports] - lives in its own environment
    from sglang.srt.server_args import prepare_server_args  # pyright: ignore[reportMissingImports]
    from sglang.srt.utils import kill_process_tree  # pyright: ignore[reportMissingImports]

    try:
        run_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
