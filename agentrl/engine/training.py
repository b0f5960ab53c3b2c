"""The training side of the loop: servers checked, one batch in, one version out, a checkpoint now and then.

Invariant: each batch that is taken becomes one version. Before the batch is taken, while the trainer still has the weights
that the servers sample with, a few calls of each server are recomputed. Where publications overlap training, that is
so after at most `MAX_SKIPPED_CHECKS` batches. The trainer waits for its batch, its worker, a frozen evaluation and the
servers, in that order, and the board lists each wait. A checkpoint holds the weights of a whole step, and its note accounts
for every group and evaluation that was asked for.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import anyio
import anyio.to_thread
import numpy as np
from anyio.abc import TaskGroup

from agentrl.data.digest import TaskDigest
from agentrl.data.draw import TaskDraw
from agentrl.engine.alarms import Alarms
from agentrl.engine.batch import PreparedBatch, prepare_batch
from agentrl.engine.config import CHECKPOINT_AGE_S, MAX_SKIPPED_CHECKS, spot_bounds
from agentrl.engine.estimates import verified_groups
from agentrl.engine.evaluate import EvaluationQueue
from agentrl.engine.inflight import FinishedCall, FinishedCalls
from agentrl.engine.journal import LoopState
from agentrl.engine.parts import EngineParts, RunState
from agentrl.engine.publishing import Publications, WeightPublisher, probe_ids
from agentrl.engine.skipped import SkippedSteps
from agentrl.errors import (
    AgentRLError,
    InvariantError,
    NothingLearned,
    ServerError,
    TrainerDied,
    TrainError,
    WeightSyncError,
)
from agentrl.inference.backend import ServerSet
from agentrl.support.concurrency import task_group
from agentrl.trainer.base import StepReport
from agentrl.types import Float32Array

logger = logging.getLogger(__name__)
IMPOSSIBLE_KL = 0.5
"""Nats below 0, beyond 5 standard errors, at which a KL between behavior and proximal policy stops the run. Truncated
sampling (top_p) biases the estimate downwards, but less than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotReport:
    """The result of one spot check."""

    metrics: Mapping[str, float]
    wrong: Mapping[str, str]
    """The servers whose log-probs are not the trainer's, and how far off they are."""


class SpotCheck:
    """Recomputes a few calls of every server with the weights that sampled them; bounds: `docs/adr/0014-spot-checks.md`."""

    SHARE = 16
    """A step checks one call for this many of its episodes, and at least one of each server."""
    ASKED_TOKENS = 16
    """Output tokens of a call made for a check, to a server that has finished none under the present version."""
    ASK_TIMEOUT_S = 60.0
    """Seconds that such a call may take, behind those that wait at a busy server."""
    WARN_AFTER = 5
    """Number of steps in a row without a check of a server after which the trainer warns."""

    def __init__(self, parts: EngineParts, calls: FinishedCalls) -> None:
        self._trainer, self._calls, self._engine = parts.trainer, calls, parts.engine
        self.servers = parts.inference if isinstance(parts.inference, ServerSet) else None
        """The servers that can be asked and taken out; None: there is only one."""
        self._tolerance = spot_bounds(parts.engine, parts.compute_type)
        self._episodes_per_step = parts.algorithm.groups_per_step * parts.algorithm.group_size
        self._unchecked: Counter[str] = Counter()
        self._reasons: dict[str, str] = {}
        """Why no call of a server was compared, by its name."""
        self._skipped = 0

    def skip(self) -> Mapping[str, float] | None:
        """Return the metrics of a batch without a check; None when there were too many in a row."""
        if self._skipped == MAX_SKIPPED_CHECKS:
            return None
        self._skipped += 1
        return {"unchecked_servers": float(1 if self.servers is None else len(self.servers.serving))}

    async def run(self, version: int) -> SpotReport:
        """Compare calls that servers began with `version`, which the trainer must have, and return the result.

        Cancellation: the trainer cannot be used again.
        """
        began = time.perf_counter()
        self._skipped = 0
        if self._calls.impossible is not None:
            raise InvariantError(self._calls.impossible)
        serving = self._calls.servers if self.servers is None else self.servers.serving
        limit = max(1, self._episodes_per_step // (self.SHARE * max(1, len(serving))))
        chosen = {server: self._calls.of_version(server, version)[:limit] for server in {*serving, *self._calls.servers}}
        async with task_group() as tasks:
            for server in serving:
                if not chosen[server]:
                    tasks.start_soon(self._ask, server, version, chosen[server])
        differences = await self._differences(version, chosen)
        wrong: dict[str, str] = {}
        for server, found in differences.items():
            verdict = self._verdict(server, version, found)
            if verdict is None:
                self._calls.passed(server)
            else:
                wrong[server] = verdict
        unchecked = self._count_unchecked(serving or ("",), differences)
        joined = np.concatenate([np.empty(0, np.float32), *differences.values()])
        metrics = {"spot_check_tokens": float(len(joined)), "unchecked_servers": float(unchecked)}
        if len(joined):
            metrics |= {"mean_spot_difference": float(joined.mean()), "max_spot_difference": float(joined.max())}
        return SpotReport(metrics=metrics | {"seconds_spot_check": time.perf_counter() - began}, wrong=wrong)

    def forget(self, server: str) -> set[int]:
        """Drop the calls of a server, and return the groups with calls since its last check that passed."""
        return self._calls.forget(server)

    async def _ask(self, server: str, version: int, found: list[FinishedCall]) -> None:
        """Have a server answer the beginning of the run's last request, and add the call to `found`."""
        self._reasons[server] = "it finished no call at a temperature above 0"
        example = self._calls.example
        if example is None or self.servers is None:
            return
        sampling = replace(example.sampling, max_new_tokens=min(self.ASKED_TOKENS, example.sampling.max_new_tokens), stop=())
        request = replace(example, request_id=uuid4().hex, episode_id=f"spot check of {server}", sampling=sampling)
        with anyio.move_on_after(self.ASK_TIMEOUT_S) as waited:
            try:
                self._calls.add(request, await self.servers.sample(server, request), None)
            except ServerError as error:  # the pool's health check deals with the server
                self._reasons[server] = f"the call that the trainer made for a check failed: {error}"
            else:
                found += self._calls.of_version(server, version)[:1]
        if waited.cancelled_caught:
            self._reasons[server] = (
                f"it finished no call of the present version, nor one that the trainer made for a check, in "
                f"{self.ASK_TIMEOUT_S:g} s: it is busy"
            )

    async def _differences(self, version: int, chosen: Mapping[str, Sequence[FinishedCall]]) -> dict[str, Float32Array]:
        """Return, for each server with calls, |log-prob of the server - the trainer's| of their tokens, nats."""
        calls = [(server, call) for server, some in chosen.items() for call in some]
        if not calls:
            return {}
        recomputed = await self._trainer.logprobs(
            [call.token_ids for _, call in calls], [call.temperature for _, call in calls]
        )
        parts: dict[str, list[Float32Array]] = {}
        for (server, call), values in zip(calls, recomputed, strict=True):
            start, count = call.context_size - 1, call.tokens_of(version)
            reported = call.generation.output_logprobs[:count]
            parts.setdefault(server, []).append(np.abs(reported - values[start : start + count]))
        return {server: np.concatenate(some) for server, some in parts.items()}

    def _verdict(self, server: str, version: int, found: Float32Array) -> str | None:
        """Return the reason why the server's log-probs are wrong; None: they are right."""
        excess = self._tolerance.excess(found)
        if excess is None:
            return None
        return (
            f"{server or 'the server'}: log-probs of {len(found)} tokens that it sampled with version {version} differ from "
            f"the trainer's by {excess}; see engine.logprob_tolerance and engine.max_logprob_difference"
        )

    def _count_unchecked(self, serving: Sequence[str], checked: Mapping[str, Float32Array]) -> int:
        missed = [server for server in serving if server not in checked]
        self._unchecked = Counter({server: self._unchecked[server] + 1 for server in missed})
        for server in missed:
            if self._unchecked[server] == self.WARN_AFTER:
                logger.warning(
                    "%s: its log-probs have not been compared with the trainer's for %d steps: %s",
                    server or "the server",
                    self.WARN_AFTER,
                    self._reasons.get(server, "it finished no call at a temperature above 0"),
                )
        return len(missed)


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
    """Seconds that the trainer copied its state."""


class TrainLoop:
    """Takes batches from the buffer, turns each into a published version, and saves checkpoints."""

    def __init__(self, parts: EngineParts, state: LoopState, *, evaluations: EvaluationQueue, draw: TaskDraw) -> None:
        self._trainer, self._algorithm, self._engine = parts.trainer, parts.algorithm, parts.engine
        self._progress, self._source = parts.progress, parts.source
        self._buffer, self._clock = state.buffer, state.clock
        self._journal, self._board, self._watchdog = state.journal, state.board, state.watchdog
        self._evaluations, self._draw = evaluations, draw
        self._weights = WeightPublisher(
            trainer=parts.trainer,
            inference=parts.inference,
            run_dir=parts.run_dir,
            config=parts.engine,
            probe_ids=probe_ids(parts.renderer),
            send_dtype=parts.send_dtype,
            compute_type=parts.compute_type,
        )
        self._publications = Publications(self._weights, state)
        self._spot_check = SpotCheck(parts, state.backend.finished)
        self._skipped = SkippedSteps(parts.algorithm, parts.engine)
        self._alarms = Alarms()
        self._first_step = parts.resume.step
        self._eval_tasks = TaskDigest.of(parts.eval_tasks) if parts.engine.eval_every else None
        self._held: _Weights | None = _Weights(self._first_step, state.clock.version)
        """None while a batch is in the trainer, whose weights then belong to no step."""
        self._seen = parts.resume.advantages_seen
        """The batches up to those weights."""
        self._saved_step, self._saved_at = self._first_step, time.perf_counter()
        self._writing: _BegunSave | None = None
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
        self._saved_at = time.perf_counter()
        try:
            async with task_group() as publications:
                for number in range(self._first_step + 1, self._engine.steps + 1):
                    if not await self._step(number, publications):
                        break
                    self._evaluations.request(number)
                    if self._checkpoint_is_due(number):
                        await self._save()
                if self._interrupted:
                    await self._save_last()  # not after the servers, which may take longer than there is time
                await self._publications.finish()
            await self._finish_save(wait=True)
        except (ServerError, WeightSyncError, NothingLearned):
            await self._save_last()  # the trainer is not to blame
            raise
        except AgentRLError as error:
            if self._interrupted:
                logger.warning("the present step could not be finished: %s", error)
            if not isinstance(error, TrainerDied):  # whose checkpoint, if one was begun, died with it
                await self._finish_begun_save()
            if not self._interrupted:
                raise
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
                await self._publications.finish()  # raises what closed the buffer
                raise InvariantError(f"the buffer was closed before step {number}")
            return False
        await self._journal.check_in_place()
        compared = groups if self._source is None else await self._source.taken(number, groups)
        version = self._clock.trainer_version
        with self._board.waiting("the trainer", f"its worker to train batch {number}"), self._journal.timed("train_s"):
            self._held = None
            verified = await verified_groups(compared, self._trainer, self._algorithm)
            prepared = await anyio.to_thread.run_sync(
                lambda: prepare_batch(verified, version=version, algorithm=self._algorithm, before=self._seen)
            )
            report = await self._train(prepared)
        self._check_logprobs(number, report)
        report = replace(report, metrics={**report.metrics, **checked})
        self._held, self._seen = _Weights(number, version + 1), prepared.seen
        await self._wait_for_evaluation(version + 1)
        drawn = self._draw.metrics()
        try:
            await self._publications.begin(publications, beside=self._may_overlap(number))
        except (ServerError, WeightSyncError):
            self._journal.step(number, groups, prepared, report, self._publications.take_cost(), drawn=drawn)  # `run` saves
            raise
        self._journal.step(number, groups, prepared, report, self._publications.take_cost(), drawn=drawn)
        self._progress.step(self._journal.snapshot())
        self._alarms.step(number, groups, prepared.metrics, report.metrics)
        try:
            self._skipped.step(number, groups, report.skipped)
        except NothingLearned:
            await self._publications.finish()  # the trainer could not be used after a cancelled one, and `run` saves
            raise
        return True

    async def _wait_for_evaluation(self, version: int) -> None:
        """Return when no frozen evaluation keeps the servers from taking `version`."""
        steps = ", ".join(map(str, self._evaluations.due))
        whom = f"the frozen evaluation after step {steps} to end, before it sends version {version}"
        with self._board.waiting("the trainer", whom), self._journal.during("trainer", "wait_for_evaluation"):
            await self._evaluations.released()

    def _may_overlap(self, number: int) -> bool:
        """Return whether the weights of step `number` may reach the servers during the next step."""
        is_last = self._interrupted or number == self._engine.steps
        return self._engine.overlap_publication and not is_last and not self._evaluations.is_due(number)

    async def _checked(self, number: int) -> Mapping[str, float]:
        """Check the servers, if they have the trainer's version or were not checked for long; return the metrics."""
        if self._clock.version != self._clock.trainer_version:
            skipped = self._spot_check.skip()
            if skipped is not None:
                return skipped
            await self._publications.finish()
        return await self._check_servers(number)

    async def _check_servers(self, number: int) -> Mapping[str, float]:
        """Take out the servers whose log-probs are wrong, drop the groups they may have spoilt, and return the metrics."""
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
        found, limit = report.metrics.get("max_logprob_difference"), self._engine.max_logprob_difference
        if found is not None and limit is not None and found > limit:
            cut = report.metrics.get("max_interrupted_difference", 0.0)
            raise InvariantError(
                f"step {number}: a behavior log-prob differs by {found:.3g} nats from the trainer's under the same version, "
                f"over engine.max_logprob_difference = {limit:g}; servers and trainer do not compute the same model"
                + (f", or inference.pause_mode is fast (interrupted model calls: up to {cut:.3g} nats)" if cut else "")
            )

    def _checkpoint_is_due(self, number: int) -> bool:
        every = self._engine.checkpoint_every
        by_time = time.perf_counter() - self._saved_at >= CHECKPOINT_AGE_S
        return number == self._engine.steps or bool(every and number % every == 0) or by_time

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
            eval_tasks=self._eval_tasks,
            draw=self._draw.state(self._buffer.open_indices),
            advantages_seen=self._seen,
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
