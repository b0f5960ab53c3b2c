"""The sandboxes that an episode used, for its trajectory.

Invariant: an episode that ran a program without isolation has a trace of it, whether or not its workflow records one.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

UNSAFE_METRIC = "unsafe_sandbox"
"""1.0 in the metrics of each episode that ran a program in a sandbox without isolation."""

_used: ContextVar[dict[str, bool] | None] = ContextVar("agentrl_sandboxes_used", default=None)


@contextmanager
def watch_sandboxes() -> Generator[dict[str, bool]]:
    """Yield whether each sandbox used in the block isolates, by its name. Tasks and threads of the block count too."""
    used: dict[str, bool] = {}
    token = _used.set(used)
    try:
        yield used
    finally:
        _used.reset(token)


def note_use(name: str, *, is_isolated: bool) -> None:
    """Remember for the running episode that it uses a sandbox."""
    used = _used.get()
    if used is not None:
        used[name] = is_isolated


def sandbox_metrics(used: dict[str, bool]) -> dict[str, float]:
    """Return the metrics of an episode that used these sandboxes.

    Example:
        >>> sandbox_metrics({"bubblewrap": True}), sandbox_metrics({"unsafe_process": False})
        ({}, {'unsafe_sandbox': 1.0})
    """
    return {} if all(used.values()) else {UNSAFE_METRIC: 1.0}
