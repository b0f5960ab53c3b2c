"""The arithmetic of a trainer's mesh: how many processes there are, and which of them get the same samples. No torch.

Invariant: ranks are numbered row by row over the axes (replicate, dp, cp, tp), so tp peers are neighbours, and the ranks of
one cp x tp block, which get the same samples, are consecutive.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Axis: TypeAlias = Literal["replicate", "shards", "cp", "tp"]
"""What a group of ranks splits together; `shards` is dp and cp, over which FSDP cuts weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshShape:
    """How many ways each axis splits the trainer.

    Example:
        >>> shape = MeshShape(dp=2, cp=2)
        >>> shape.world, [shape.data_rank(rank) for rank in range(4)], shape.peers("cp")
        (4, [0, 0, 1, 1], [(0, 1), (2, 3)])
    """

    replicate: int = 1
    """Whole copies of the split weights, each for its own samples."""
    dp: int = 1
    """Ways in which samples are split within a copy."""
    cp: int = 1
    """Ways in which each sequence is cut."""
    tp: int = 1
    """Ways in which each matrix product is split."""

    @property
    def world(self) -> int:
        """Number of processes."""
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
        """Return which samples `rank` gets, from 0."""
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
