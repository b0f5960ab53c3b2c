"""The checkpoints of a run: begun when they are due, recorded once they are on the disk, and saved a last time at its end.

Invariant: a checkpoint holds the weights of a whole step, and its note accounts for every group and evaluation that was
asked for. At most one is being written.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import anyio.to_thread

from agentrl.engine.config import CHECKPOINT_AGE_S
from agentrl.engine.journal import LoopState
from agentrl.engine.parts import EngineParts
from agentrl.errors import AgentRLError, TrainError
from agentrl.support.folders import make_private

logger = logging.getLogger(__name__)


class HeldStep(NamedTuple):
    """The step whose weights the trainer holds."""

    step: int
    """The last step that changed them."""
    version: int
    """Version under which they are, or will be, published."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _BegunSave:
    """A checkpoint that is being written."""

    step: int
    path: Path
    held_s: float
    """Seconds that the trainer copied its state."""


class Checkpoints:
    """Saves the trainer's weights while a run trains."""

    def __init__(self, parts: EngineParts, state: LoopState, *, note: Callable[[HeldStep], str]) -> None:
        """Save with the `note` of a step, from which a run continues."""
        self._trainer, self._engine = parts.trainer, parts.engine
        self._journal, self._board, self._watchdog = state.journal, state.board, state.watchdog
        self._directory = parts.run_dir / "checkpoints"
        self._note = note
        self.held: HeldStep | None = HeldStep(parts.resume.step, state.clock.version)
        """None while a batch is in the trainer, whose weights then belong to no step."""
        self._saved_step, self._saved_at = parts.resume.step, time.perf_counter()
        self._writing: _BegunSave | None = None

    def start(self) -> None:
        """Count the age of the last checkpoint from now."""
        self._saved_at = time.perf_counter()

    async def save_if_due(self, step: int) -> None:
        """Begin to write a checkpoint, after the one before is on the disk, where the run file wants one after `step`."""
        every = self._engine.checkpoint_every
        by_time = time.perf_counter() - self._saved_at >= CHECKPOINT_AGE_S
        if step == self._engine.steps or bool(every and step % every == 0) or by_time:
            await self._save()

    async def save_last(self) -> None:
        """Save the weights of the last whole step on the way to the end of the run, which an error does not change."""
        await self.finish_last()  # if it failed, the present step is saved in its place
        if self.held is not None and self.held.step != self._saved_step:
            try:
                await self._save()
            except AgentRLError as error:
                logger.warning("no checkpoint of step %d could be saved: %s", self.held.step, error)
        await self.finish_last()

    async def finish_last(self) -> None:
        """Wait for the checkpoint that is being written; on the way to the end of the run, an error is a warning."""
        try:
            await self.finish()
        except AgentRLError as error:
            logger.warning("the last checkpoint could not be saved: %s", error)

    async def finish(self, *, wait: bool = True) -> None:
        """Record the checkpoint that is being written, if it is on the disk; `wait` until it is.

        Raises:
            TrainError: it could not be written.
        """
        save = self._writing
        if save is None:
            return
        try:
            with self._board.waiting("the trainer", f"its worker to save the checkpoint of step {save.step}"):
                report = await self._trainer.finish_save(wait=wait)
        except TrainError:
            self._writing = None
            raise
        if report is None:
            return
        await anyio.to_thread.run_sync(self._prune)
        self._watchdog.progress()
        self._writing, self._saved_step = None, save.step
        self._journal.checkpoint(save.step, save.path, seconds=save.held_s + report.seconds, held_s=save.held_s)

    async def _save(self) -> None:
        assert self.held is not None
        await self.finish()
        step = self.held.step
        # A checkpoint never knows of more than the records do.
        await self._journal.flush()
        path = self._directory / f"step-{step:06d}"
        begin = time.perf_counter()
        with self._board.waiting("the trainer", f"its worker to save the checkpoint of step {step}"):
            make_private(self._directory)
            await self._trainer.save(str(path), self._note(self.held))
        self._watchdog.progress()
        self._saved_at = time.perf_counter()
        self._writing = _BegunSave(step=step, path=path, held_s=self._saved_at - begin)
        self._journal.checkpoint_begun(step, self._writing.held_s)

    def _prune(self) -> None:
        saved = sorted(path for path in self._directory.glob("step-*") if path.is_dir())
        for path in saved[: -self._engine.keep_checkpoints]:
            shutil.rmtree(path, ignore_errors=True)
