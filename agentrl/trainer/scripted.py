"""A trainer and its weight channel without a model or a process, for tests of engines and pools and for users' own tests.

Invariant: the results depend only on the script and on the calls so far, never on time. The trainer and its channel record
each call in order and refuse what a real trainer refuses. No torch is loaded and no weights are sent.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.lowlevel
import msgspec
import numpy as np

from agentrl.errors import InvariantError, TrainError, UpdatePending
from agentrl.trainer.base import SaveReport, StepReport, TrainBatch
from agentrl.types import Float32Array, Int32Array
from agentrl.weights.disk import atomic_directory, publish, write_model
from agentrl.weights.tensors import RawTensor
from agentrl.weights.types import (
    GroupAddress,
    GroupRequest,
    Manifest,
    Publication,
    TensorSpec,
    scripted_checksums,
    scripted_logprobs,
)


class ScriptedSending:
    """The sending of one version; a `Sending` that sends nothing."""

    def __init__(self, version: int, groups: Sequence[str]) -> None:
        buckets = ((TensorSpec("steps_applied", "float32", (1,)),),)
        self.manifest = Manifest(version, buckets, scripted_checksums(version, buckets))
        self.groups = tuple(groups)
        self.started: list[str] = []
        self.abandoned: tuple[str, ...] | None = None
        """Groups that `finish` was called with; None before."""
        self.failures: dict[str, str] = {}
        """Error messages by group, for `finish` to return."""

    async def start(self, groups: Sequence[str]) -> None:
        await anyio.lowlevel.checkpoint()
        self.started += groups

    async def finish(self, abandoned: Collection[str]) -> Mapping[str, str]:
        self.abandoned = tuple(abandoned)
        with anyio.CancelScope(shield=True):
            await anyio.lowlevel.checkpoint()
        return self.failures


class ScriptedChannel:
    """A `WeightChannel` that records its calls.

    Example:
        >>> channel = ScriptedChannel()
        >>> [address] = anyio.run(channel.open, [GroupRequest("a", ranks=2, nccl=False, flat=True)], ())
        >>> address.world_size, sorted(channel.groups)
        (3, ['a'])
    """

    def __init__(self) -> None:
        """Start without groups and with weights that no server has."""
        self.groups: set[str] = set()
        self.sendings: list[ScriptedSending] = []
        self.published_version: int | None = None
        """Version under which servers got the present weights; None after a step."""
        self.held_version: int | None = None
        """Version that the trainer's `hold` took to be sent."""
        self.stepping = False
        """Set it to refuse calls as a trainer without a snapshot does in a step."""
        self.failures: dict[str, str] = {}
        """`ScriptedSending.failures` of the sendings to come."""

    async def open(self, requests: Sequence[GroupRequest], close: Collection[str]) -> Sequence[GroupAddress]:
        await anyio.lowlevel.checkpoint()
        self.groups = (self.groups - set(close)) | {request.name for request in requests}
        return [GroupAddress(request.name, "scripted", 1, 1 + request.ranks, "gloo") for request in requests]

    @asynccontextmanager
    async def sending(
        self, version: int, groups: Sequence[str], *, dtype: str, again: bool
    ) -> AsyncGenerator[ScriptedSending]:
        again = again or version == self.held_version
        if again and self.stepping:
            raise UpdatePending("the trainer is in a step; the server gets weights with the next update")
        if again and self.published_version != version:
            raise UpdatePending(f"the trainer's weights are past version {version}; the server gets weights later")
        if not self.groups >= set(groups):
            raise InvariantError(f"expected open groups, got {groups}; open are {sorted(self.groups)}")
        sending = ScriptedSending(version, groups)
        sending.failures = dict(self.failures)
        self.sendings.append(sending)
        self.published_version = version
        try:
            yield sending
        finally:
            if sending.abandoned is None:
                await sending.finish(groups)
            self.groups -= {*(sending.abandoned or ()), *sending.failures}


@dataclass(frozen=True, slots=True, kw_only=True)
class _ScriptedSave:
    number: int
    directory: str
    note: str
    steps: int
    applied: int


class ScriptedTrainer:
    """A `Trainer` that records its batches and follows a script.

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
        hold_saves: Mapping[int, anyio.Event] | None = None,
        fail_saves: Collection[int] = (),
        steps_while_sending: bool = False,
        source: Path | None = None,
    ) -> None:
        """Write the script.

        Args:
            skip_steps: numbers of the steps (from 0) that report `skipped="scripted"`.
            fail_steps: numbers of the steps that raise `TrainError`.
            hold_steps: events that steps wait for before they return, by number.
            hold_publish: events that publications wait for, by version.
            hold_saves: events that the writing of checkpoints waits for, by number (from 0).
            fail_saves: numbers of the checkpoints that cannot be written.
            steps_while_sending: whether it keeps a copy of the weights that it holds.
            source: HF checkpoint whose config and tokenizer files are published with the tiny weights.
        """
        self.batches: list[TrainBatch] = []
        self.publications: list[Publication] = []
        self.saved: list[str] = []
        self.notes: list[str] = []
        self.channel = ScriptedChannel()
        self.steps_while_sending = steps_while_sending
        """Whether steps leave the held version as it is, and so do not end its sendings."""
        self.held: list[int] = []
        self.started = anyio.Event()
        self._skip = frozenset(skip_steps)
        self._fail = frozenset(fail_steps)
        self._hold_steps = dict(hold_steps or {})
        self._hold_publish = dict(hold_publish or {})
        self._hold_saves = dict(hold_saves or {})
        self._fail_saves = frozenset(fail_saves)
        self._num_saves = 0
        self._writing: _ScriptedSave | None = None
        self._source = source
        self._applied = 0
        self._to_write: tuple[int, int] | None = None
        """Version that `hold` took to be written, and the steps applied to it."""

    async def step(self, batch: TrainBatch) -> StepReport:
        """Record `batch` and return the scripted report."""
        number = len(self.batches)
        self.batches.append(batch)
        if not self.steps_while_sending:
            self.channel.published_version = None
        self.started.set()
        if number in self._hold_steps:
            await self._hold_steps[number].wait()
        await anyio.lowlevel.checkpoint()
        if number in self._fail:
            raise TrainError(f"step {number} of the scripted trainer fails by its script")
        tokens = sum(int(item.sample.loss_mask.sum()) for item in batch.samples)
        metrics = {"loss": 0.0, "grad_norm": 0.0, "tokens": float(tokens), **_staleness_metrics(batch)}
        if number in self._skip:
            return StepReport(metrics=metrics, skipped="scripted")
        self._applied += 1
        return StepReport(metrics=metrics)

    async def hold(self, version: int, *, dtype: str | None) -> None:
        """Remember the steps applied, for `publish`, or let the channel send `version`, also again."""
        await anyio.lowlevel.checkpoint()
        self.held.append(version)
        if dtype is None:
            self._to_write = version, self._applied
        else:
            self.channel.held_version = self.channel.published_version = version

    async def publish(self, version: int, directory: str) -> Publication:
        """Write one tiny tensor, whose value is the number of steps applied, as policy `version`."""
        applied, self._to_write = self._applied_to(version), None
        if version in self._hold_publish:
            await self._hold_publish[version].wait()
        await anyio.lowlevel.checkpoint()
        publication = publish(_tensors(applied), version=version, directory=Path(directory), source=self._source)
        self.publications.append(publication)
        return publication

    def _applied_to(self, version: int) -> int:
        held, applied = self._to_write or (version, self._applied)
        if held != version:
            return self._applied
        if applied != self._applied and not self.steps_while_sending:
            raise UpdatePending(f"the scripted trainer has stepped since it held version {version}, and keeps no copy")
        return applied

    async def logprobs(
        self, sequences: Sequence[Int32Array], temperatures: Sequence[float] | None = None
    ) -> list[Float32Array]:
        """Return, for each sequence, the `scripted_logprobs` of the version held or sent last, at any temperature."""
        await anyio.lowlevel.checkpoint()
        versions = [publication.version for publication in self.publications[-1:]]
        versions += [sending.manifest.version for sending in self.channel.sendings[-1:]]
        versions += self.held[-1:]
        return [scripted_logprobs(ids, max(versions, default=0)) for ids in sequences]

    async def values(self, sequences: Sequence[Int32Array]) -> list[Float32Array]:
        """Return, for each sequence, numbers from 0 to 1 that depend on its ids and the steps applied."""
        await anyio.lowlevel.checkpoint()
        return [np.exp(scripted_logprobs(ids, self._applied)).astype(np.float32) for ids in sequences]

    async def reference_logprobs(
        self, sequences: Sequence[Int32Array], temperatures: Sequence[Float32Array]
    ) -> list[Float32Array]:
        """Return, for each sequence, the `scripted_logprobs` of version 0, at any temperature."""
        await anyio.lowlevel.checkpoint()
        return [scripted_logprobs(ids, 0) for ids in sequences]

    async def save(self, directory: str, note: str = "") -> None:
        """Begin to write a tiny checkpoint that appears whole or not at all, after the one before is on the disk."""
        await self.finish_save(wait=True)
        steps, number = len(self.batches), self._num_saves
        self._writing = _ScriptedSave(number=number, directory=directory, note=note, steps=steps, applied=self._applied)
        self._num_saves += 1

    async def finish_save(self, *, wait: bool) -> SaveReport | None:
        """Return the checkpoint that `save` began; it is on the disk once its event of `hold_saves` is set."""
        await anyio.lowlevel.checkpoint()
        if self._writing is None:
            return None
        held = self._hold_saves.get(self._writing.number)
        if held is not None and not held.is_set() and not wait:
            return None
        if held is not None:
            await held.wait()
        save, self._writing = self._writing, None
        if save.number in self._fail_saves:
            raise TrainError(f"cannot write {save.directory}: checkpoint {save.number} fails by the script of its trainer")
        with atomic_directory(Path(save.directory)) as folder:
            write_model(folder, _tensors(save.applied), version=save.applied, source=self._source)
            (folder / "scripted.json").write_bytes(msgspec.json.encode({"steps": save.steps, "note": save.note}))
        self.saved.append(save.directory)
        self.notes.append(save.note)
        return SaveReport(directory=save.directory, seconds=0.0)


def _tensors(applied: int) -> dict[str, RawTensor]:
    return {"steps_applied": RawTensor.of(np.array([applied], np.float32))}


def _staleness_metrics(batch: TrainBatch) -> dict[str, float]:
    versions = [item.sample.token_versions[item.sample.loss_mask] for item in batch.samples]
    oldest = min((int(trained.min()) for trained in versions if len(trained)), default=batch.policy_version)
    return {"max_staleness": float(batch.policy_version - oldest)}
