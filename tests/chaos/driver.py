"""The driver of a run under test: `agentrl train` as it is, with a display that announces the phases of the run.

Run: `python -m tests.chaos.driver RUN.yaml [--resume]`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import anyio

from agentrl.cli.main import run_command
from agentrl.config import load_config
from agentrl.jobs.train import train_run
from agentrl.observe.progress import PlainProgress, Snapshot
from agentrl.watchdog.signals import describe_results, interrupt_note
from tests.chaos.phases import Phase, announcer

LOOK_S = 0.002
"""Seconds between two looks at the waits of the run."""
WAITS: dict[str, Phase] = {
    "its worker to train batch": "step",
    "the servers to take version": "publication",
    "its worker to save the checkpoint": "checkpoint",
}
"""Part of a wait's line -> the phase that it is."""


class AnnouncingProgress(PlainProgress):
    """Plain lines, and announced phases."""

    async def show(self, snapshot: Callable[[], Snapshot]) -> None:
        """Announce each phase once until cancelled.

        Cancellation: nothing is left behind.
        """
        present: Phase | None = None
        while True:
            waits = "\n".join(snapshot().waits)
            phase: Phase | None = next((phase for part, phase in WAITS.items() if part in waits), None)
            if phase is not None and phase != present:
                announcer.announce(phase)
            present = phase
            await anyio.sleep(LOOK_S)

    def step(self, snapshot: Snapshot) -> None:
        """Write the line and count the step."""
        announcer.steps = snapshot.step
        super().step(snapshot)


def main() -> None:
    """Train as the run file says."""
    run = load_config(Path(sys.argv[1]), ())
    job = partial(
        train_run,
        run,
        existing="resume" if "--resume" in sys.argv else "error",
        progress=AnnouncingProgress(),
        may_exit=True,
    )
    with interrupt_note(partial(describe_results, run.run_dir)):
        anyio.run(job)


if __name__ == "__main__":
    run_command(main)
