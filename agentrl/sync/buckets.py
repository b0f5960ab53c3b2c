"""Which tensors travel together.

Invariant: every tensor is in exactly one bucket, in the order given; a bucket has one dtype, so that each tensor in it is
aligned, and more bytes than the limit only if it holds a single tensor.
"""

from __future__ import annotations

from collections.abc import Iterable

from agentrl.transfer import Bucket, TensorSpec


def plan_buckets(specs: Iterable[TensorSpec], max_bytes: int) -> tuple[Bucket, ...]:
    """Return `specs` cut into buckets of at most `max_bytes`.

    Example:
        >>> norm, head = TensorSpec("norm", "float32", (8,)), TensorSpec("head", "float32", (8, 8))
        >>> [[spec.name for spec in bucket] for bucket in plan_buckets([norm, norm, head, norm], 64)]
        [['norm', 'norm'], ['head'], ['norm']]
    """
    buckets: list[list[TensorSpec]] = []
    room = -1
    for spec in specs:
        if not buckets or spec.num_bytes > room or spec.dtype != buckets[-1][0].dtype:
            buckets.append([])
            room = max_bytes
        buckets[-1].append(spec)
        room -= spec.num_bytes
    return tuple(tuple(bucket) for bucket in buckets)
