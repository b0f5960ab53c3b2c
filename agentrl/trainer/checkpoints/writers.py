"""Which rank writes which part of a checkpoint.

Invariant: every rank comes to the same answer from the same list, and each part has one writer.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from agentrl.weights.parts import Index


class HeldPart(msgspec.Struct, frozen=True, array_like=True):
    """A part that a rank could write."""

    name: str
    """Name of the tensor."""
    offset: Index
    num_bytes: int


def names_to_write(held: Sequence[Sequence[HeldPart]], rank: int) -> frozenset[str]:
    """Return the names of the tensors whose part `rank` writes, of those that it holds.

    Of the ranks that hold the same part, the one with the least to write so far is chosen, the largest parts first.

    Args:
        held: the parts of each rank, at most one of each tensor.
        rank: one of them.

    Example:
        >>> norm, head = HeldPart("norm", (0,), 8), HeldPart("head", (0, 0), 64)
        >>> [sorted(names_to_write([[norm, head], [norm, head]], rank)) for rank in range(2)]
        [['head'], ['norm']]
    """
    holders: dict[HeldPart, list[int]] = {}
    for number, parts in enumerate(held):
        for part in parts:
            holders.setdefault(part, []).append(number)
    load = [0] * len(held)
    chosen: set[str] = set()
    for part in sorted(holders, key=lambda part: (-part.num_bytes, part.name, part.offset)):
        writer = min(holders[part], key=lambda number: (load[number], number))
        load[writer] += part.num_bytes
        if writer == rank:
            chosen.add(part.name)
    return frozenset(chosen)
