"""Worker processes that all instances of an environment share; they end with the last instance.

Invariant: a function that workers run has one pool for each number of processes.
"""

from __future__ import annotations

from typing import Final
from weakref import WeakValueDictionary

from agentrl_rewards.workers import GraderLimits, GraderPool

_POOLS: Final[WeakValueDictionary[tuple[str, int], GraderPool]] = WeakValueDictionary()


def shared_workers(loader: str, num_workers: int, limits: GraderLimits) -> GraderPool:
    """Return the pool of a function, which the caller keeps; `loader` and the others as for `GraderPool`."""
    pool = _POOLS.get((loader, num_workers))
    if pool is None:
        _POOLS[loader, num_workers] = pool = GraderPool(loader, num_workers=num_workers, limits=limits)
    return pool
