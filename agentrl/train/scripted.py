"""A trainer without a model, for tests of engines and for users' own tests; no torch.

Invariant: what it returns depends only on its script and on the calls made so far, never on time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import anyio
import msgspec
import numpy as np

from agentrl.errors import TrainError
from agentrl.sync.disk import atomic_directory, publish, write_model
from agentrl.sync.tensors import RawTensor
from agentrl.train.base import StepReport, TrainBatch
from agentrl.train.scripted_channel import ScriptedChannel
from agentrl.types import Float32Array, Int32Array, Publication


class ScriptedTrainer:
    """A `Trainer` that records what it is given and does what it is told.

    Example:
        >>> trainer = ScriptedTrainer(skip_steps={1})
        >>> reports = [anyio.run(trainer.step, TrainBatch(samples=(), policy_version=v)) for v in (0, 1)]
        >>> [report.skipped for report in reports], len(trainer.batches)
        ([None, 'scripted'], 2)
    """

    def __init__(
        self,
        *,
        skip_steps: Collection[int] = (),
        fail_steps: Collection[int] = (),
        hold_steps: Mapping[int, anyio.Event] | None = None,
        hold_publish: Mapping[int, anyio.Event] | None = None,
        source: Path | None = None,
    ) -> None:
        """Write the script.

        Args:
            skip_steps: numbers of the steps (from 0) that report `skipped="scripted"`.
            fail_steps: numbers of the steps that raise `TrainError`.
            hold_steps: a step waits for its event before it answers.
            hold_publish: the publication of a version waits for its event.
            source: HF checkpoint whose config and tokenizer files are published with the tiny weights.
        """
        self.batches: list[TrainBatch] = []
        """Every batch given to `step`, in order."""
        self.publications: list[Publication] = []
        """Every publication, in order."""
        self.saved: list[str] = []
        """Directories of the checkpoints written, in order."""
        self.notes: list[str] = []
        """The notes in them."""
        self.channel = ScriptedChannel()
        """Its end of process groups; nothing is sent."""
        self.started = anyio.Event()
        """Set when the first step has begun."""
        self._skip = frozenset(skip_steps)
        self._fail = frozenset(fail_steps)
        self._hold_steps = dict(hold_steps or {})
        self._hold_publish = dict(hold_publish or {})
        self._source = source
        self._applied = 0

    async def step(self, batch: TrainBatch) -> StepReport:
        """Record `batch` and return the scripted report.

        Raises:
            TrainError: when the script says so.

        Cancellation: the batch stays recorded.
        """
        number = len(self.batches)
        self.batches.append(batch)
        self.channel.given_out = None
        self.started.set()
        if number in self._hold_steps:
            await self._hold_steps[number].wait()
        await anyio.lowlevel.checkpoint()
        if number in self._fail:
            raise TrainError(f"step {number} of the scripted trainer was told to fail")
        tokens = sum(int(item.sample.loss_mask.sum()) for item in batch.samples)
        metrics = {"loss": 0.0, "grad_norm": 0.0, "tokens": float(tokens), **_staleness(batch)}
        if number in self._skip:
            return StepReport(metrics=metrics, skipped="scripted")
        self._applied += 1
        return StepReport(metrics=metrics)

    async def publish(self, version: int, directory: str) -> Publication:
        """Write one tiny tensor, whose value is the number of steps applied, as policy `version`.

        Cancellation: the directory is complete or absent.
        """
        if version in self._hold_publish:
            await self._hold_publish[version].wait()
        await anyio.lowlevel.checkpoint()
        publication = publish(self._tensors(), version=version, directory=Path(directory), source=self._source)
        self.publications.append(publication)
        return publication

    async def logprobs(self, sequences: Sequence[Int32Array]) -> list[Float32Array]:
        """Return -1.0 for every token after the first of each sequence.

        Cancellation: nothing is left behind.
        """
        await anyio.lowlevel.checkpoint()
        return [np.full(max(0, len(ids) - 1), -1.0, np.float32) for ids in sequences]

    async def save(self, directory: str, note: str = "") -> None:
        """Write a tiny checkpoint that appears whole or not at all.

        Cancellation: the directory is complete or absent.
        """
        await anyio.lowlevel.checkpoint()
        with atomic_directory(Path(directory)) as folder:
            write_model(folder, self._tensors(), version=self._applied, source=self._source)
            (folder / "scripted.json").write_bytes(msgspec.json.encode({"steps": len(self.batches), "note": note}))
        self.saved.append(directory)
        self.notes.append(note)

    def _tensors(self) -> dict[str, RawTensor]:
        return {"steps_applied": RawTensor.of(np.array([self._applied], np.float32))}


def _staleness(batch: TrainBatch) -> dict[str, float]:
    versions = [item.sample.token_versions[item.sample.loss_mask] for item in batch.samples]
    oldest = min((int(trained.min()) for trained in versions if len(trained)), default=batch.policy_version)
    return {"max_staleness": float(batch.policy_version - oldest)}
