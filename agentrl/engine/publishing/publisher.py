"""Publish trained weights to the servers, and save checkpoints.

Invariant: when `send` of version v returns, every serving server holds exactly the weights that the trainer had when v was
held, proved by checksums and by a probe.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import anyio.to_thread
import numpy as np

from agentrl.engine.config import PROBE_TOLERANCE, EngineConfig
from agentrl.errors import WeightSyncError
from agentrl.folders import make_private
from agentrl.inference.backend import Inference, Probe, UpdateReport, WeightSource
from agentrl.trainer.base import SaveReport, Trainer
from agentrl.weights.disk import WEIGHTS_FILE, prune
from agentrl.weights.types import WeightFeed

PROBE_TEXT = "The quick brown fox jumps over the lazy dog. 0 1 2 3 4 5 6 7 8 9 + - * ( ) = ?"
"""The default probe, encoded with the run's tokenizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishReport:
    """The cost of one publication, seconds."""

    publish_s: float
    """Until the trainer had its weights ready: copied, and, where it waits for the servers, written."""
    update_s: float
    """From then on, until every serving server held them."""
    pause_after_s: float
    """From the beginning of the update to the first pause."""
    pause_s: float
    probe_difference: float | None
    """Nats."""
    num_bytes: int
    """Size of the weights as each server read or received them."""


class SyncCost(NamedTuple):
    """The cost of publications between two training steps."""

    published: PublishReport | None
    """The publication that ended; None: none did."""
    waited_s: float
    """Time that the trainer waited for publications."""


class HeldVersion(NamedTuple):
    """Weights of the trainer that are about to be published."""

    version: int
    probe: Probe
    """With the trainer's log-probs under these weights."""
    stays: bool
    """Whether steps of the trainer leave them as they are."""
    seconds: float
    """Time that the trainer was busy with it."""


class _Source(NamedTuple):
    source: WeightSource
    num_bytes: int


class WeightPublisher:
    """Moves weights from the trainer to the servers and to the checkpoint directory."""

    def __init__(
        self,
        *,
        trainer: Trainer,
        inference: Inference,
        run_dir: Path,
        config: EngineConfig,
        probe_ids: Sequence[int],
        send_dtype: str | None = None,
    ) -> None:
        """Move weights between `trainer` and `inference`.

        Args:
            trainer: owns the weights.
            inference: receives them.
            run_dir: directory of checkpoints, and of published files unless `config` names another.
            config: the directory of published files, the number that stay, and the probe's tolerance.
            probe_ids: at least two token ids.
            send_dtype: send weights from the trainer's memory, in this type; None: publish files.
        """
        self._send_dtype = send_dtype
        self._trainer = trainer
        self._inference = inference
        self._directory = Path(config.publish_dir) if config.publish_dir else run_dir / "weights"
        self._checkpoints = run_dir / "checkpoints"
        self._keep_published = config.keep_published
        self._keep_checkpoints = config.keep_checkpoints
        self._probe_ids = np.asarray(probe_ids, np.int32)
        self._tolerance = config.probe_tolerance or PROBE_TOLERANCE["float32"]

    async def hold(self, version: int) -> HeldVersion:
        """Hold the trainer's weights as `version`, for `send`.

        Raises:
            TrainError: when the trainer fails.

        Cancellation: the trainer cannot be used again.
        """
        begin = time.perf_counter()
        await self._trainer.hold(version, dtype=self._send_dtype)
        [logprobs] = await self._trainer.logprobs([self._probe_ids])
        probe = Probe(token_ids=self._probe_ids, logprobs=logprobs, tolerance=self._tolerance)
        return HeldVersion(version, probe, self._trainer.steps_while_sending, time.perf_counter() - begin)

    async def send(self, held: HeldVersion, *, beside: bool) -> PublishReport:
        """Put held weights on every server.

        Args:
            held: the weights; they are sent once.
            beside: whether the trainer steps meanwhile, so that the writing of files counts as a part of the update.

        Raises:
            TrainError: when the weights cannot be written or sent.
            WeightSyncError: when the servers do not hold exactly these weights.

        Cancellation: servers may have either version; the run is over.
        """
        begin = time.perf_counter()
        source, num_bytes = await self._source(held.version)
        written_s = time.perf_counter() - begin
        update = await self._inference.update_weights(source, held.probe)
        self._check(held.version, update)
        seconds = time.perf_counter() - begin
        if self._send_dtype is None:
            await anyio.to_thread.run_sync(lambda: prune(self._directory, keep=self._keep_published))
        return PublishReport(
            publish_s=held.seconds + (0.0 if beside else written_s),
            update_s=seconds - (0.0 if beside else written_s),
            pause_after_s=update.pause_after_s + (written_s if beside else 0.0),
            pause_s=update.pause_s,
            probe_difference=update.probe_difference,
            num_bytes=update.num_bytes or num_bytes,
        )

    async def _source(self, version: int) -> _Source:
        if self._send_dtype is not None:
            return _Source(WeightFeed(version=version, channel=self._trainer.channel, dtype=self._send_dtype), 0)
        publication = await self._trainer.publish(version, str(self._directory))
        return _Source(publication, (Path(publication.path) / WEIGHTS_FILE).stat().st_size)

    def _check(self, version: int, update: UpdateReport) -> None:
        if update.version != version or self._inference.policy_version != version:
            raise WeightSyncError(
                f"published version {version}, but the servers report {update.version} for the update and "
                f"{self._inference.policy_version} now"
            )

    async def save(self, step: int, note: str) -> Path:
        """Begin to write a checkpoint of `step` with `note` in it; return where it will be once `finish_save` reports it.

        Raises:
            TrainError: the checkpoint before could not be written; earlier ones are untouched.

        Cancellation: the checkpoint is whole or absent.
        """
        path = self._checkpoints / f"step-{step:06d}"
        make_private(self._checkpoints)
        await self._trainer.save(str(path), note)
        return path

    async def finish_save(self, *, wait: bool) -> SaveReport | None:
        """Return the checkpoint that was begun, once it is on the disk, and remove the oldest beyond `keep_checkpoints`.

        Args:
            wait: until it is on the disk; otherwise None is returned while it is being written.

        Raises:
            TrainError: naming the path and the cause, such as a full disk; earlier checkpoints are untouched.

        Cancellation: the checkpoint is whole or absent.
        """
        report = await self._trainer.finish_save(wait=wait)
        if report is not None:
            await anyio.to_thread.run_sync(self._prune_checkpoints)
        return report

    def _prune_checkpoints(self) -> None:
        saved = sorted(path for path in self._checkpoints.glob("step-*") if path.is_dir())
        for path in saved[: -self._keep_checkpoints]:
            shutil.rmtree(path, ignore_errors=True)
