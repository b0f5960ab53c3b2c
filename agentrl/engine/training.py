"""The training side of the loop: servers checked, one batch in, one version out, a checkpoint now and then.

Invariant: each batch that is taken becomes one version. Before the batch is taken, while the trainer still has the weights
that the servers sample with, a few calls of each server are recomputed. Where publications overlap training, that is
so after at most `MAX_SKIPPED_CHECKS` batches. The trainer waits for its batch, its worker, a frozen evaluation and the
servers, in that order, and the board lists each wait.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace

import anyio.to_thread
from anyio.abc import TaskGroup

from agentrl.data.digest import TaskDigest
from agentrl.data.draw import TaskDraw
from agentrl.engine.alarms import Alarms
from agentrl.engine.batch import PreparedBatch, VerifiedGroups, needs_models, prepare_batch
from agentrl.engine.checkpoints import Checkpoints, HeldStep
from agentrl.engine.estimates import with_estimates
from agentrl.engine.evaluate import EvaluationQueue
from agentrl.engine.journal import LoopState
from agentrl.engine.parts import EngineParts, RunState
from agentrl.engine.publishing import Publications, WeightPublisher, probe_ids
from agentrl.engine.skipped import SkippedSteps
from agentrl.engine.spot_check import ServerChecks
from agentrl.errors import AgentRLError, InvariantError, NothingLearned, ServerError, TrainerDied, WeightSyncError
from agentrl.support.concurrency import task_group
from agentrl.trainer.base import StepReport
from agentrl.types import Group

logger = logging.getLogger(__name__)
IMPOSSIBLE_KL = 0.5
"""Nats below 0, beyond 5 standard errors, at which a KL between behavior and proximal policy stops the run. Truncated
sampling (top_p) biases the estimate downwards, but less than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trained:
    """A step whose weights the trainer has."""

    number: int
    groups: tuple[Group, ...]
    prepared: PreparedBatch
    report: StepReport
    drawn: Mapping[str, float]
    """Metrics of the task draw."""


class TrainLoop:
    """Takes batches from the buffer, turns each into a published version, and saves checkpoints."""

    def __init__(self, parts: EngineParts, state: LoopState, *, evaluations: EvaluationQueue, draw: TaskDraw) -> None:
        self._trainer, self._algorithm, self._engine = parts.trainer, parts.algorithm, parts.engine
        self._progress, self._source = parts.progress, parts.source
        self._buffer, self._clock = state.buffer, state.clock
        self._journal, self._board, self._watchdog = state.journal, state.board, state.watchdog
        self._evaluations, self._draw = evaluations, draw
        weights = WeightPublisher(
            trainer=parts.trainer,
            inference=parts.inference,
            run_dir=parts.run_dir,
            config=parts.engine,
            probe_ids=probe_ids(parts.renderer),
            send_dtype=parts.send_dtype,
            compute_type=parts.compute_type,
        )
        self._publications = Publications(weights, state)
        self._checks = ServerChecks(parts, state, self._publications)
        self._checkpoints = Checkpoints(parts, state, note=self._note)
        self._skipped = SkippedSteps(parts.algorithm, parts.engine)
        self._alarms = Alarms()
        self._steps = range(parts.resume.step + 1, parts.engine.steps + 1)
        self._eval_tasks = TaskDigest.of(parts.eval_tasks) if parts.engine.eval_every else None
        self._seen = parts.resume.advantages_seen
        """The batches up to the weights that the trainer holds."""
        self._interrupted = False

    async def publish_first(self) -> None:
        """Put the weights with which the run begins on every server; raises and is cancelled as `Publications.first`."""
        await self._publications.first()

    def interrupt(self) -> None:
        """Ask `run` to return after the present step, with its checkpoint."""
        self._interrupted = True
        self._buffer.close()
        self._evaluations.release()  # they are cancelled, too

    async def run(self) -> None:
        """Train to the last step, or until `interrupt`.

        Raises:
            RunStopped: the run's files were deleted or replaced, or cannot be written, or the run learns nothing.

        Cancellation: the weights cannot be used again.
        """
        self._checkpoints.start()
        async with self._saving_at_the_end(), task_group() as publications:
            for number in self._steps:
                groups, checked = await self._next_batch(number)
                if groups is None:
                    break
                step = await self._train(number, groups, checked)
                with self._recording(step):
                    await self._publish(step, publications)
                await self._stop_if_nothing_is_learned(step)
                self._evaluations.request(number)
                await self._checkpoints.save_if_due(number)
            if self._interrupted:
                await self._checkpoints.save_last()  # not after the servers, which may take longer than there is time
            await self._publications.finish()

    async def _next_batch(self, number: int) -> tuple[tuple[Group, ...] | None, Mapping[str, float]]:
        """Check the servers once a batch is ready, and take it; None: the run was interrupted."""
        with self._board.waiting("the trainer", self._buffer.describe_wait), self._journal.timed("trainer_wait_s"):
            await self._buffer.ready()
        # A checkpoint that could not be written ends the run before it trains further from weights that it would lose.
        await self._checkpoints.finish(wait=False)
        # Before the batch is taken, so that it holds no group that the check condemns.
        checked = {} if self._interrupted else await self._checks.before(number)
        with self._board.waiting("the trainer", self._buffer.describe_wait), self._journal.timed("trainer_wait_s"):
            groups = await self._buffer.take()
        if groups is None and not self._interrupted:
            await self._publications.finish()  # raises what closed the buffer
            raise InvariantError(f"the buffer was closed before step {number}")
        return groups, checked

    async def _train(self, number: int, groups: tuple[Group, ...], checked: Mapping[str, float]) -> _Trained:
        """Train a batch; the trainer then has the weights of the next version."""
        await self._journal.check_in_place()
        compared = groups if self._source is None else await self._source.taken(number, groups)
        version = self._clock.trainer_version
        with self._board.waiting("the trainer", f"its worker to train batch {number}"), self._journal.timed("train_s"):
            self._checkpoints.held = None
            prepared = await self._prepare(compared, version)
            # An empty batch still advances the learning-rate schedule, which counts batches, not gradients.
            batch = prepared.batch if prepared.skip is None else replace(prepared.batch, samples=())
            report = await self._trainer.step(batch)
            self._watchdog.progress()
        if prepared.skip is not None:
            report = StepReport(skipped=prepared.skip)
        check_logprobs(number, report.metrics, limit=self._engine.max_logprob_difference)
        report = replace(report, metrics={**report.metrics, **checked})
        self._checkpoints.held, self._seen = HeldStep(number, version + 1), prepared.seen
        return _Trained(number=number, groups=groups, prepared=prepared, report=report, drawn=self._draw.metrics())

    async def _prepare(self, groups: Sequence[Group], version: int) -> PreparedBatch:
        verified = await anyio.to_thread.run_sync(VerifiedGroups.of, groups)
        if needs_models(self._algorithm):
            verified = await with_estimates(verified, self._trainer, self._algorithm)
        return await anyio.to_thread.run_sync(
            lambda: prepare_batch(verified, version=version, algorithm=self._algorithm, before=self._seen)
        )

    async def _publish(self, step: _Trained, publications: TaskGroup) -> None:
        """Put the weights of a step on the servers, or let that go on during the next step."""
        await self._wait_for_evaluation(self._clock.trainer_version + 1)
        is_last = self._interrupted or step.number == self._engine.steps
        # An evaluation after this step samples with its weights, so they must be there first.
        beside = self._engine.overlap_publication and not is_last and not self._evaluations.is_due(step.number)
        await self._publications.begin(publications, beside=beside)

    async def _wait_for_evaluation(self, version: int) -> None:
        """Return when no frozen evaluation keeps the servers from taking `version`."""
        steps = ", ".join(map(str, self._evaluations.due))
        whom = f"the frozen evaluation after step {steps} to end, before it sends version {version}"
        with self._board.waiting("the trainer", whom), self._journal.during("trainer", "wait_for_evaluation"):
            await self._evaluations.released()

    @contextmanager
    def _recording(self, step: _Trained) -> Generator[None]:
        """Record a step after the block, also where it fails because of the servers: `run` then saves its weights."""
        try:
            yield
        except (ServerError, WeightSyncError):
            self._record(step)
            raise
        self._record(step)
        self._progress.step(self._journal.snapshot())
        self._alarms.step(step.number, step.groups, step.prepared.metrics, step.report.metrics)

    def _record(self, step: _Trained) -> None:
        cost = self._publications.take_cost()
        self._journal.step(step.number, step.groups, step.prepared, step.report, cost, drawn=step.drawn)

    async def _stop_if_nothing_is_learned(self, step: _Trained) -> None:
        try:
            self._skipped.step(step.number, step.groups, step.report.skipped)
        except NothingLearned:
            await self._publications.finish()  # the trainer could not be used after a cancelled one, and `run` saves
            raise

    @asynccontextmanager
    async def _saving_at_the_end(self) -> AsyncGenerator[None]:
        """Leave a checkpoint of the last whole step, whatever ends the block: the last step, an interrupt or an error."""
        try:
            yield
            await self._checkpoints.finish()
        except (ServerError, WeightSyncError, NothingLearned):
            await self._checkpoints.save_last()  # the trainer is not to blame
            raise
        except AgentRLError as error:
            if self._interrupted:
                logger.warning("the present step could not be finished: %s", error)
            if not isinstance(error, TrainerDied):  # whose checkpoint, if one was begun, died with it
                await self._checkpoints.finish_last()
            if not self._interrupted:
                raise
        if self._interrupted:
            await self._checkpoints.save_last()

    def _note(self, held: HeldStep) -> str:
        """Return the state from which a run continues after `held`."""
        state = RunState(
            step=held.step,
            policy_version=held.version,
            groups_admitted=self._buffer.num_admitted,
            groups_open=self._buffer.open_indices,
            evaluations_due=self._evaluations.due,
            tasks=self._draw.digest(),
            eval_tasks=self._eval_tasks,
            draw=self._draw.state(self._buffer.open_indices),
            advantages_seen=self._seen,
        )
        return state.to_note()


def check_logprobs(number: int, metrics: Mapping[str, float], *, limit: float | None) -> None:
    """Raise `InvariantError` where behavior log-probs cannot be those of the policy that sampled the tokens.

    Over tokens sampled by the behavior policy, mean(behavior - proximal) estimates KL(behavior || proximal), which is not
    negative. A mean far below 0, by more than 5 standard errors, means that servers report too low log-probs. `limit`, nats,
    bounds the difference of each token under the same version.
    """
    tokens, mean = metrics.get("num_loss_tokens", 0.0), metrics.get("kl_behavior_proximal_k1", 0.0)
    # 1.25 is the ratio of the standard deviation to the mean distance of a normal distribution.
    error = 1.25 * metrics.get("behavior_log_weight_mean", 0.0) / math.sqrt(tokens) if tokens else 0.0
    if tokens and mean < -IMPOSSIBLE_KL - 5 * error:
        raise InvariantError(
            f"step {number}: KL(behavior || proximal) is {mean:.3g} nats per token over {tokens:g} tokens, but no KL is "
            "negative: the servers report log-probs that are too low for the tokens they sample"
        )
    found = metrics.get("max_logprob_difference")
    if found is not None and limit is not None and found > limit:
        cut = metrics.get("max_interrupted_difference", 0.0)
        raise InvariantError(
            f"step {number}: a behavior log-prob differs by {found:.3g} nats from the trainer's under the same version, "
            f"over engine.max_logprob_difference = {limit:g}; servers and trainer do not compute the same model"
            + (f", or inference.pause_mode is fast (interrupted model calls: up to {cut:.3g} nats)" if cut else "")
        )
