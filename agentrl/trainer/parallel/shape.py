"""The arithmetic of a trainer's mesh, and the models that it can split. No torch: the plan asks first.

Invariant: ranks are numbered row by row over the axes (replicate, dp, cp, tp), so the ranks of one cp x tp block, which get
the same samples, are consecutive. A model that passes the checks is split without a remainder in its heads and features; of
the vocabulary the last rank may hold fewer tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from agentrl.errors import ConfigError

SHARING_ARCHITECTURES: Final = ("llama", "qwen2", "qwen3")
"""Architectures, by their `model_type`, whose passes over trees are tested against those over single sequences."""

Axis: TypeAlias = Literal["replicate", "shards", "cp", "tp"]
"""`shards` is dp and cp, over which FSDP cuts weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshShape:
    """The number of ways in which each axis splits the trainer.

    Example:
        >>> shape = MeshShape(dp=2, cp=2)
        >>> shape.world, [shape.data_rank(rank) for rank in range(4)], shape.peers("cp")
        (4, [0, 0, 1, 1], [(0, 1), (2, 3)])
    """

    replicate: int = 1
    """Copies of the split weights, each for its own samples."""
    dp: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def world(self) -> int:
        return self.replicate * self.dp * self.cp * self.tp

    @property
    def shards(self) -> int:
        """Parts into which FSDP cuts each weight, over dp and cp together."""
        return self.dp * self.cp

    @property
    def averaged(self) -> int:
        """Ranks whose gradients FSDP averages."""
        return self.replicate * self.shards

    @property
    def data_world(self) -> int:
        """Number of groups of ranks that get different samples."""
        return self.replicate * self.dp

    def data_rank(self, rank: int) -> int:
        """Return the number, from 0, of the part of the samples that `rank` gets."""
        return rank // (self.cp * self.tp)

    def leads(self, rank: int) -> bool:
        """Return whether `rank` is the first of those that get its samples."""
        return rank % (self.cp * self.tp) == 0

    def peers(self, axis: Axis) -> list[tuple[int, ...]]:
        """Return the groups of ranks that differ in `axis` alone; each rank is in one, in the order of its parts."""
        strides = {"tp": 1, "cp": self.tp, "shards": self.tp, "replicate": self.tp * self.shards}
        stride, ways = strides[axis], getattr(self, axis)
        firsts = [rank for rank in range(self.world) if rank // stride % ways == 0]
        return [tuple(range(first, first + ways * stride, stride)) for first in firsts]

    def __str__(self) -> str:
        """Return the axes that split anything, such as `dp 4 x tp 2`."""
        axes = (("replicate", self.replicate), ("dp", self.dp), ("cp", self.cp), ("tp", self.tp))
        return " x ".join(f"{name} {ways}" for name, ways in axes if ways > 1) or "dp 1"


SPLIT_ARCHITECTURES: Final = ("llama", "qwen2", "qwen3")
"""The values of `model_type` in config.json whose matrices can be split."""


def check_tensor_fit(tp: int, *, architecture: str, heads: int, kv_heads: int, intermediate: int) -> None:
    """Raise ConfigError, which names the numbers that work, unless `tp` ranks can split each block of a model evenly.

    Example:
        >>> check_tensor_fit(16, architecture="qwen3", heads=32, kv_heads=8, intermediate=12288)
        Traceback (most recent call last):
        ...
        agentrl.errors.ConfigError: trainer.parallel.tp: 16 does not divide the model's 8 key-value heads; use 1, 2, 4 or 8
    """
    if tp == 1:
        return
    if architecture not in SPLIT_ARCHITECTURES:
        raise ConfigError(
            f"trainer.parallel.tp: {tp}, and the matrices of a {architecture} model cannot be split; expected one of "
            f"{', '.join(SPLIT_ARCHITECTURES)}; set tp to 1 and raise dp"
        )
    sizes = {"key-value heads": kv_heads, "query heads": heads, "features of the feed-forward": intermediate}
    for what, size in sizes.items():
        if size % tp:
            common = math.gcd(*sizes.values())
            raise ConfigError(
                f"trainer.parallel.tp: {tp} does not divide the model's {size} {what}; use {_divisors(common)}"
            )


def check_context_fit(cp: int, *, tp: int, heads: int) -> None:
    """Raise ConfigError unless `cp` ranks can share the query heads of attention, of which each of `tp` ranks has a part.

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


def reason_against_sharing(architecture: str, *, has_windows: bool, cp: int) -> str | None:
    """Return why passes compute a common prefix with each of its samples, in words; None: they compute it once."""
    if cp > 1:
        return "trainer.parallel.cp splits sequences"
    if has_windows:
        return "layers attend within a window"
    if architecture not in SHARING_ARCHITECTURES:
        return f"only {', '.join(SHARING_ARCHITECTURES)} models share, and this is {architecture or 'unknown'}"
    return None


def has_windows(config: object) -> bool:
    """Return whether layers of the architecture `config` attend within a window, and not to all tokens before."""
    layers: list[str] = getattr(config, "layer_types", None) or []
    if layers:
        return bool(set(layers) - {"full_attention"})
    return getattr(config, "sliding_window", None) is not None
