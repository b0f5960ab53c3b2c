"""Errors of environments, tools and graders: attributed to them, and remembered for the episode.

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
