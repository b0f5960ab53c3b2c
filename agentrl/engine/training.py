"""The training side of the loop: servers checked, one batch in, one version out, a checkpoint now and then.

Invariant: each batch that is taken becomes one version. Before the batch is taken, while the trainer still has the weights
that the servers sample with, a few calls of each server are recomputed. Where publications run beside the trainer, that is
so after at most `SpotCheck.MAX_SKIPPED` batches. The trainer waits for its batch, its worker and the servers, in that order,
and the board lists each wait. A checkpoint holds the weights of a whole step, and its note accounts for every group and
evaluation that was asked for.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import anyio.to_thread
from anyio.abc import TaskGroup

from agentrl.algo.config import AlgorithmConfig
from agentrl.concurrency import task_group
from agentrl.data.draw import TaskDraw
from agentrl.engine.batch import PreparedBatch, prepare_batch
from agentrl.engine.buffer import GroupBuffer, VersionClock
from agentrl.engine.config import EngineConfig
from agentrl.engine.evaluate import EvaluationQueue
from agentrl.engine.journal import Journal
from agentrl.engine.publishing.publications import Publications
from agentrl.engine.publishing.publisher import WeightPublisher
from agentrl.engine.resume import RunState
from agentrl.engine.skipped import SkippedSteps
from agentrl.engine.spot_check import SpotCheck
from agentrl.errors import AgentRLError, InvariantError, NothingLearned, ServerError, TrainError, WeightSyncError
from agentrl.observe.progress import Progress
from agentrl.observe.stall import StallTimer, WaitBoard
from agentrl.trainer.base import StepReport, Trainer

logger = logging.getLogger(__name__)
IMPOSSIBLE_KL = 0.5
"""Nats below 0, beyond 5 standard errors, at which a KL between behavior and proximal policy stops the run. Truncated
sampling (top_p) biases the estimate downwards, but less than this."""


class _Weights(NamedTuple):
    """The weights that the trainer holds."""

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
    """How long the trainer copied its state."""


class TrainLoop:
    """Takes batches from the buffer, turns each into a published version, and saves checkpoints."""

    def __init__(
        self,
        *,
        trainer: Trainer,
        weights: WeightPublisher,
        publications: Publications,
        buffer: GroupBuffer,
        clock: VersionClock,
        journal: Journal,
        board: WaitBoard,
        watchdog: StallTimer,
        progress: Progress,
        algorithm: AlgorithmConfig,
        config: EngineConfig,
        spot_check: SpotCheck,
        evaluations: EvaluationQueue,
        draw: TaskDraw,
        state: RunState,
    ) -> None:
        """Connect the parts that `Engine` makes; `state` is the one to start from, with the digest of the held-out tasks."""
        self._draw = draw
        self._spot_check = spot_check
        self._trainer, self._weights, self._publications = trainer, weights, publications
        self._buffer, self._clock = buffer, clock
        self._journal, self._board, self._watchdog, self._progress = journal, board, watchdog, progress
        self._algorithm, self._config = algorithm, config
        self._evaluations, self._first = evaluations, state
        self._skipped = SkippedSteps(algorithm, config)
        self._held: _Weights | None = _Weights(state.step, clock.version)
        """None while a batch is in the trainer, whose weights then belong to no step."""
        self._saved_step, self._saved_at = state.step, time.perf_counter()
        self._writing: _BegunSave | None = None
        self._interrupted = False

    def interrupt(self) -> None:
        """Ask `run` to return after the present step, with its checkpoint."""
        self._interrupted = True
        self._buffer.close()

    async def run(self) -> None:
        """Train to the last step, or until `interrupt`.

        Raises:
            TrainError, WeightSyncError, ServerError: from the worker or the servers.
            StaleDataError, InvariantError: from the data.
            RunStopped: the run's files were deleted or replaced, or cannot be written, or the run learns nothing.

        Cancellation: the weights cannot be used again.
        """
        self._saved_at = time.perf_counter()
        try:
            async with task_group() as publications:
                for number in range(self._first.step + 1, self._config.steps + 1):
                    if not await self._step(number, publications):
                        break
                    self._evaluations.request(number)
                    if self._checkpoint_is_due(number):
                        await self._save()
                await self._publications.finish()
            await self._finish_save(wait=True)
        except (ServerError, WeightSyncError, NothingLearned):
            await self._save_last()  # the trainer is not to blame
            raise
        except AgentRLError as error:
            await self._finish_begun_save()
            if not self._interrupted:
                raise
            logger.warning("the present step could not be finished: %s", error)
        if self._interrupted:
            await self._save_last()

    async def _step(self, number: int, publications: TaskGroup) -> bool:
        """Train one batch, publish the weights, advance the clock and record the step; False: there is no batch."""
        with self._board.waiting("the trainer", self._buffer.describe_wait), self._journal.timed("trainer_wait_s"):
            await self._buffer.ready()
        await self._finish_save(wait=False)
        checked = {} if self._interrupted else await self._checked(number)
        with self._board.waiting("the trainer", self._buffer.describe_wait), self._journal.timed("trainer_wait_s"):
            groups = await self._buffer.take()
        if groups is None:
            if not self._interrupted:
                raise InvariantError(f"the buffer was closed before step {number}")
            return False
        await self._journal.check_in_place()
        version = self._clock.trainer_version
        with self._board.waiting("the trainer", f"its worker to train batch {number}"), self._journal.timed("train_s"):
            self._held = None
            prepared = await anyio.to_thread.run_sync(
                lambda: prepare_batch(groups, version=version, algorithm=self._algorithm)
            )
            report = await self._train(prepared)
        self._check_logprobs(number, report)
        report = replace(report, metrics={**report.metrics, **checked})
        self._held = _Weights(number, version + 1)
        try:
            await self._publications.begin(publications, beside=self._may_overlap(number))
        except (ServerError, WeightSyncError):
            self._journal.step(number, groups, prepared, report, self._publications.take_cost())  # `run` saves these weights
            raise
        self._journal.step(number, groups, prepared, report, self._publications.take_cost())
        self._progress.step(self._journal.snapshot())
        self._skipped.step(number, groups, report.skipped)
        return True

    def _may_overlap(self, number: int) -> bool:
        """Return whether the weights of step `number` may reach the servers during the next step."""
        is_last = self._interrupted or number == self._config.steps
        return self._config.overlap_publication and not is_last and not self._evaluations.is_due(number)

    async def _checked(self, number: int) -> Mapping[str, float]:
        """Check the servers, if they have the trainer's version or were not checked for long; return the metrics."""
        if self._publications.running:
            skipped = self._spot_check.skip()
            if skipped is not None:
                return skipped
            await self._publications.finish()
        return await self._check_servers(number)

    async def _check_servers(self, number: int) -> Mapping[str, float]:
        """Take out the servers whose log-probs are wrong, drop the groups they may have spoilt, and return the metrics.

        Raises:
            InvariantError: no other server is left, or a log-prob is impossible.
        """
        version = self._clock.version
        with (
            self._board.waiting("the trainer", f"a spot check of the servers at version {version}"),
            self._journal.during("trainer", "spot_check"),
        ):
            report = await self._spot_check.run(version)
        self._watchdog.progress()
        servers = self._spot_check.servers
        if report.wrong and (servers is None or not set(servers.serving) - report.wrong.keys()):
            raise InvariantError(
                f"step {number}: {'; '.join(report.wrong.values())}. No other server is left: servers and trainer do not "
                "compute the same model (other weights, another dtype, or another attention kernel?)"
            )
        for server, reason in report.wrong.items():
            if servers is not None:
                servers.take_out(server, reason)
            dropped = self._buffer.condemn(sorted(self._spot_check.forget(server)), "unverified")
            logger.warning("%d groups with calls of %s since its last spot check are dropped", dropped, server)
        return report.metrics

    async def _train(self, prepared: PreparedBatch) -> StepReport:
        # An empty batch still advances the learning-rate schedule, which counts batches, not gradients.
        batch = prepared.batch if prepared.skip is None else replace(prepared.batch, samples=())
        report = await self._trainer.step(batch)
        self._watchdog.progress()
        return report if prepared.skip is None else StepReport(skipped=prepared.skip)

    def _check_logprobs(self, number: int, report: StepReport) -> None:
        _check_divergence(number, report.metrics)
        found, limit = report.metrics.get("max_logprob_difference"), self._config.max_logprob_difference
        if found is not None and limit is not None and found > limit:
            cut = report.metrics.get("max_interrupted_difference", 0.0)
            raise InvariantError(
                f"step {number}: a behavior log-prob differs by {found:.3g} nats from the trainer's under the same version, "
                f"over engine.max_logprob_difference = {limit:g}; servers and trainer do not compute the same model"
                + (f", or inference.pause_mode is fast (interrupted model calls: up to {cut:.3g} nats)" if cut else "")
            )

    def _checkpoint_is_due(self, number: int) -> bool:
        every, age_s = self._config.checkpoint_every, self._config.checkpoint_every_s
        by_time = bool(age_s) and time.perf_counter() - self._saved_at >= age_s
        return number == self._config.steps or bool(every and number % every == 0) or by_time

    async def _save_last(self) -> None:
        """Save the weights of the last whole step on the way to the end of the run, which an error does not change."""
        await self._finish_begun_save()  # if it failed, the present step is saved in its place
        if self._held is not None and self._held.step != self._saved_step:
            try:
                await self._save()
            except AgentRLError as error:
                logger.warning("no checkpoint of step %d could be saved: %s", self._held.step, error)
        await self._finish_begun_save()

    async def _finish_begun_save(self) -> None:
        """Wait for the checkpoint that is being written, on the way to the end of the run."""
        try:
            await self._finish_save(wait=True)
        except AgentRLError as error:
            logger.warning("the last checkpoint could not be saved: %s", error)

    async def _save(self) -> None:
        """Begin to write a checkpoint of the weights that the trainer holds, after the one before is on the disk."""
        assert self._held is not None
        await self._finish_save(wait=True)
        step, version = self._held
        await self._journal.flush()
        begin = time.perf_counter()
        with self._board.waiting("the trainer", f"its worker to save the checkpoint of step {step}"):
            path = await self._weights.save(step, self._state(step, version).to_note())
        self._watchdog.progress()
        self._saved_at = time.perf_counter()
        self._writing = _BegunSave(step=step, path=path, held_s=self._saved_at - begin)
        self._journal.checkpoint_begun(step, self._writing.held_s)

    async def _finish_save(self, *, wait: bool) -> None:
        """Record the checkpoint that is being written, if it is on the disk; `wait` until it is."""
        save = self._writing
        if save is None:
            return
        try:
            with self._board.waiting("the trainer", f"its worker to save the checkpoint of step {save.step}"):
                report = await self._weights.finish_save(wait=wait)
        except TrainError:
            self._writing = None
            raise
        if report is not None:
            self._watchdog.progress()
            self._writing, self._saved_step = None, save.step
            self._journal.checkpoint(save.step, save.path, seconds=save.held_s + report.seconds, held_s=save.held_s)

    def _state(self, step: int, version: int) -> RunState:
        return RunState(
            step=step,
            policy_version=version,
            groups_admitted=self._buffer.num_admitted,
            groups_open=self._buffer.open_indices,
            evaluations_due=self._evaluations.due,
            tasks=self._draw.digest(),
            eval_tasks=self._first.eval_tasks,
            draw=self._draw.state(self._buffer.open_indices),
        )


def _check_divergence(number: int, metrics: Mapping[str, float]) -> None:
    """Raise `InvariantError` where behavior log-probs cannot be those of the policy that sampled the tokens.

    Over tokens sampled by the behavior policy, mean(behavior - proximal) estimates KL(behavior || proximal), which is not
    negative. A mean far below 0, by more than 5 standard errors, means that servers report too low log-probs.
    """
    tokens, mean = metrics.get("num_loss_tokens", 0.0), metrics.get("kl_behavior_proximal_k1", 0.0)
    if not tokens:
        return
    # 1.25 is the ratio of the standard deviation to the mean distance of a normal distribution.
    error = 1.25 * metrics.get("behavior_log_weight_mean", 0.0) / math.sqrt(tokens)
    if mean < -IMPOSSIBLE_KL - 5 * error:
        raise InvariantError(
            f"step {number}: KL(behavior || proximal) is {mean:.3g} nats per token over {tokens:g} tokens, but no KL is "
            "negative: the servers report log-probs that are too low for the tokens they sample"
        )
