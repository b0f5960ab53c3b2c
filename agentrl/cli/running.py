"""Runs the async job of a command to its end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from agentrl.watchdog.signals import interrupt_note


def run_job(
    job: Callable[[], Awaitable[object]], results: Callable[[], str], *, stall_timeout_s: float | None = None
) -> None:
    """Run an async job to its end; the job itself ends what it started.

    Args:
        job: an async function.
        results: returns where the results are, for the message after an interrupt.
        stall_timeout_s: seconds the job may block the event loop; None for a job that watches the loop itself.
    """
    from agentrl.watchdog.loop import run_watched
    from agentrl.watchdog.threads import run_without_waiting

    with interrupt_note(results):
        if stall_timeout_s is None:
            run_without_waiting(job)
        else:
            run_watched(job, stall_timeout_s=stall_timeout_s, on_exit=lambda _ending: results())
