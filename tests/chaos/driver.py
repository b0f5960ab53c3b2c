"""The driver of a run under test: `agentrl train` as it is, with a display that announces the phases of the run.

Run: `python -m tests.chaos.driver RUN.yaml [--resume]`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import anyio

from agentrl.commands.running import run_command
from agentrl.commands.train import train_run
from agentrl.config import load_config
from agentrl.observe.progress import PlainProgress, Snapshot
from agentrl.processes.watchdog.signals import describe_results, interrupt_note
from agentrl.weights.disk import partial_directory
from tests.chaos.phases import Phase, announcer

LOOK_S = 0.001
"""Seconds between two looks at the run."""
WAITS: dict[str, Phase] = {
    "its worker to train batch": "step",
    "the servers to take version": "publication",
    "its worker to save the checkpoint": "checkpoint",
}
"""Part of a wait's line -> the phase that it is."""


class AnnouncingProgress(PlainProgress):
    """Plain lines, and announced phases. `checkpoint` lasts from the copy of what is saved to its last file."""

    def __init__(self, checkpoints: Path) -> None:
        """Look for incomplete checkpoints in the directory `checkpoints`."""
        super().__init__()
        self._partial = partial_directory(checkpoints / "step-*")

    async def show(self, snapshot: Callable[[], Snapshot]) -> None:
        """Announce each phase once until cancelled.

        Cancellation: nothing is left behind.
        """
        present: set[Phase] = set()
        while True:
            waits = "\n".join(snapshot().waits)
            phases: set[Phase] = {phase for part, phase in WAITS.items() if part in waits}
            if next(self._partial.parent.glob(self._partial.name), None) is not None:
                phases.add("checkpoint")
            for phase in phases - present:
                announcer.announce(phase)
            present = phases
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
        progress=AnnouncingProgress(run.run_dir / "checkpoints"),
        may_exit=True,
    )
    with interrupt_note(partial(describe_results, run.run_dir)):
        anyio.run(job)


if __name__ == "__main__":
    run_command(main)
