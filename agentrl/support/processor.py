"""What the processor of this machine can do."""

from __future__ import annotations

import platform


def multiplies_bfloat16_slowly() -> bool:
    """Return whether torch multiplies bfloat16 on this CPU by general code, which takes four times as long as float32.

    It has fast products where an x86 processor has AVX-512, with or without instructions for bfloat16.
    """
    import torch

    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return x86 and not torch.backends.cpu.get_cpu_capability().startswith("AVX512")
