"""Which models tensor and context parallelism can split, and into how many parts. No torch: the plan asks first.

Invariant: a model that passes here is split without a remainder in its heads and features. The vocabulary may have one:
the last rank then holds fewer tokens.
"""

from __future__ import annotations

import math
from typing import Final

from agentrl.errors import ConfigError

ARCHITECTURES: Final = ("llama", "qwen2", "qwen3")
"""The values of `model_type` in config.json whose matrices can be split."""


def check_tensor_fit(tp: int, *, architecture: str, heads: int, kv_heads: int, intermediate: int) -> None:
    """Check that `tp` ranks can split each block of a model evenly.

    Args:
        tp: `trainer.parallel.tp`.
        architecture: `model_type` of config.json.
        heads: query heads.
        kv_heads: key-value heads.
        intermediate: features of the feed-forward.

    Raises:
        ConfigError: they cannot; it names the numbers that they can.

    Example:
        >>> check_tensor_fit(16, architecture="qwen3", heads=32, kv_heads=8, intermediate=12288)
        Traceback (most recent call last):
        ...
        agentrl.errors.ConfigError: trainer.parallel.tp: 16 does not divide the model's 8 key-value heads; use 1, 2, 4 or 8
    """
    if tp == 1:
        return
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"trainer.parallel.tp: {tp}, and the matrices of a {architecture} model cannot be split; expected one of "
            f"{', '.join(ARCHITECTURES)}; set tp to 1 and raise dp"
        )
    sizes = {"key-value heads": kv_heads, "query heads": heads, "features of the feed-forward": intermediate}
    for what, size in sizes.items():
        if size % tp:
            common = math.gcd(*sizes.values())
            raise ConfigError(
                f"trainer.parallel.tp: {tp} does not divide the model's {size} {what}; use {_divisors(common)}"
            )


def check_context_fit(cp: int, *, tp: int, heads: int) -> None:
    """Check that `cp` ranks can share the query heads of attention, of which each of `tp` ranks has a part.

    Raises:
        ConfigError: they cannot; it names the numbers that they can.

    Example:
        >>> check_context_fit(8, tp=8, heads=32)
        Traceback (most recent call last):
        ...
        agentrl.errors.ConfigError: trainer.parallel.cp: 8 does not divide the 4 query heads of a rank; use 1, 2 or 4
    """
    own = heads // tp
    if own % cp:
        raise ConfigError(f"trainer.parallel.cp: {cp} does not divide the {own} query heads of a rank; use {_divisors(own)}")


def _divisors(number: int) -> str:
    every = [str(way) for way in range(1, number + 1) if number % way == 0]
    return every[0] if len(every) == 1 else f"{', '.join(every[:-1])} or {every[-1]}"
