"""Python's garbage collector in the process that drives a run.

Invariant: an import sets nothing; what the block sets is restored when it ends, however it ends.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager

THRESHOLDS = (20_000, 10, 10)
"""New objects per collection of the youngest generation; such collections per one of the second; those per full one."""
_FROZEN_AT_START = 1_000
"""More objects than an interpreter has frozen by itself; Python 3.12 starts with some hundred."""


@contextmanager
def tuned_garbage_collector() -> Generator[None]:
    """Collect rarely, and pass over what is alive when the block begins; enter it when all is loaded and started.

    Each pass stops every episode (`benchmarks/garbage_collector.py`). A process that has frozen objects or set higher
    thresholds keeps its settings.
    """
    thresholds = gc.get_threshold()
    freezes = gc.get_freeze_count() < _FROZEN_AT_START
    gc.collect()
    if freezes:
        gc.freeze()
    gc.set_threshold(*map(max, thresholds, THRESHOLDS))
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        if freezes:
            gc.unfreeze()
