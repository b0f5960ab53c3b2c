"""Errors and metrics of environments, tools and graders: attributed to them, and remembered for the episode.

Invariant: an error in the block of `environment_boundary` fails the episode even if the workflow catches it, unless the same
operation succeeds later.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

from agentrl.errors import EnvironmentFault
from agentrl.support.concurrency import outside_work
from agentrl.support.user_code import boundary

_faults: ContextVar[dict[str, EnvironmentFault] | None] = ContextVar("agentrl_environment_faults", default=None)
_metrics: ContextVar[dict[str, float] | None] = ContextVar("agentrl_noted_metrics", default=None)


@contextmanager
def watch_faults() -> Generator[dict[str, EnvironmentFault]]:
    """Yield the faults of environments and tools in the block, by operation; its tasks and threads are watched too."""
    faults: dict[str, EnvironmentFault] = {}
    token = _faults.set(faults)
    try:
        yield faults
    finally:
        _faults.reset(token)


@contextmanager
def watch_metrics() -> Generator[dict[str, float]]:
    """Yield the metrics that code in the block notes for its episode; its tasks and threads are watched too."""
    metrics: dict[str, float] = {}
    token = _metrics.set(metrics)
    try:
        yield metrics
    finally:
        _metrics.reset(token)


def note_metric(name: str, value: float) -> None:
    """Put a metric on the running episode, whether or not its workflow records it; outside of one do nothing."""
    metrics = _metrics.get()
    if metrics is not None:
        metrics[name] = value


@contextmanager
def environment_boundary(where: str) -> Generator[None]:
    """Turn an exception into an `EnvironmentFault`; agentrl's own errors and cancellation pass."""
    faults = _faults.get()
    try:
        with outside_work(), boundary(EnvironmentFault, where):
            yield
    except EnvironmentFault as fault:
        if faults is not None:
            faults[where] = fault
        raise
    if faults is not None:
        faults.pop(where, None)
