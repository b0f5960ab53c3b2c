"""The arithmetic of a trainer's mesh: how many processes there are, and which of them get the same samples. No torch.

Invariant: ranks are numbered row by row over the axes (replicate, dp, cp, tp), so tp peers are neighbours, and the ranks of
one cp x tp block, which get the same samples, are consecutive.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshShape:
    """How many ways each axis splits the trainer.

    Example:
        >>> shape = MeshShape(dp=2, cp=2)
        >>> shape.world, [shape.data_rank(rank) for rank in range(4)], [shape.cp_peers(rank) for rank in (0, 3)]
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

    def cp_rank(self, rank: int) -> int:
        """Return which part of each sequence `rank` gets, from 0."""
        return rank // self.tp % self.cp

    def cp_peers(self, rank: int) -> tuple[int, ...]:
        """Return the ranks, `rank` among them, that together hold the sequences of `rank`, in the order of the parts."""
        first = rank - self.cp_rank(rank) * self.tp
        return tuple(first + part * self.tp for part in range(self.cp))

    def __str__(self) -> str:
        """Return the axes that split anything, such as `dp 4 x tp 2`."""
        axes = (("replicate", self.replicate), ("dp", self.dp), ("cp", self.cp), ("tp", self.tp))
        return " x ".join(f"{name} {ways}" for name, ways in axes if ways > 1) or "dp 1"
