"""The trace that an episode keeps of a sandbox that does not isolate.

Invariant: an episode that ran a program without isolation has a trace of it, whether or not its workflow records one.
"""

from __future__ import annotations

from agentrl.env.faults import note_metric

UNSAFE_METRIC = "unsafe_sandbox"
"""1.0 in the metrics of each episode that ran a program in a sandbox without isolation."""


def note_use(*, is_isolated: bool) -> None:
    """Record that the running episode uses a sandbox."""
    if not is_isolated:
        note_metric(UNSAFE_METRIC, 1.0)
