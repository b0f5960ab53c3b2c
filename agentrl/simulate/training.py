"""The trainer of a simulated run: spot check, batch, step, publication, update, checkpoint, in the order of the engine.

Invariant: the trainer's version moves by one for each batch, and the servers' after it, before the next publication begins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from agentrl.engine.config import MAX_SKIPPED_CHECKS
from agentrl.simulate.buffer import SimulatedBuffer
from agentrl.simulate.costs.model import CostModel, Fleet, RunShape
from agentrl.simulate.machine import SimulatedMachine
from agentrl.simulate.outcome import SimulatedStep
from agentrl.simulate.rollouts import Rollouts, SimulatedGroup


@dataclass(slots=True)
class _TrainedBatch:
    """The batch in the trainer."""

    computed_tokens: int
    work_s: float
    """Seconds of the trainer, had it its cores for itself."""
    episodes: int
    tokens: int
    staleness: Counter[int]
    over_age: int


class SimulatedTrainer:
    """Trains batches and publishes versions until the last step; `on_step` gets each step when its version counts."""

    def __init__(
        self,
        machine: SimulatedMachine,
        buffer: SimulatedBuffer,
        shape: RunShape,
        fleet: Fleet,
        costs: CostModel,
        on_step: Callable[[SimulatedStep], None],
    ) -> None:
        self._machine, self._buffer = machine, buffer
        self._shape, self._fleet, self._costs, self._on_step = shape, fleet, costs, on_step
        self._rollouts: Rollouts | None = None
        self._idle_since: float | None = 0.0
        self._began = self._took = self._waited_s = self._train_s = 0.0
        self._updating = False
        self._after_update: Callable[[], None] | None = None
        self._skipped = 0
        """Spot checks in a row that were left out because servers loaded weights."""
        self._batch: _TrainedBatch | None = None
        self.steps: list[SimulatedStep] = []
        self.staleness: list[Counter[int]] = []
        """Trained tokens of each step by staleness."""
        self.masked: list[int] = []
        """Over-age tokens of each step that were left out."""
        self.busy_s = 0.0
        """Seconds of the finished steps in which it did not wait for a batch."""

    def connect(self, rollouts: Rollouts) -> None:
        self._rollouts = rollouts

    def look(self) -> None:
        """Begin a step if the trainer is idle and a batch is ready."""
        if self._idle_since is None or not self._buffer.is_ready():
            return
        self._waited_s, self._idle_since = self._now - self._idle_since, None
        self._began = self._now
        if self._updating and self._skipped < MAX_SKIPPED_CHECKS:
            self._skipped += 1
            self._take_batch()
        else:
            self._skipped = 0
            self._when_updated(lambda: self._compute(self._costs.update.spot_check_s, self._take_batch))

    @property
    def _now(self) -> float:
        return self._machine.events.now

    def _compute(self, work_s: float, then: Callable[[], None], threads: int = 1) -> None:
        """Compute on the machine's cores when the driver has time to ask for it, then call `then`."""
        self._machine.driver.run(0.0, lambda: self._machine.cores.run(work_s, threads, then))

    def _take_batch(self) -> None:
        assert self._rollouts is not None
        self._took = self._now
        groups = [self._rollouts.groups.pop(index) for index in self._buffer.take()]
        batch = self._batch = self._prepare(groups)
        self._rollouts.dispatch()
        host = self._costs.host
        threads = host.trainer_threads * self._fleet.trainer_gpus
        self._machine.driver.run(
            batch.computed_tokens * host.batch_s_per_token, lambda: self._compute(batch.work_s, self._trained, threads)
        )

    def _prepare(self, groups: list[SimulatedGroup]) -> _TrainedBatch:
        version, shape = self._buffer.trainer_version, self._shape
        ages: Counter[int] = Counter()
        for group in groups:
            for sampled_by, tokens in group.tokens.items():
                ages[version - sampled_by] += tokens
        over_age = sum(tokens for age, tokens in ages.items() if age > shape.max_staleness)
        computed = [episode.tokens for group in groups if not group.zero_variance for episode in group.finished]
        return _TrainedBatch(
            computed_tokens=sum(computed),
            work_s=self._costs.trainer.train_s(sum(computed), max(computed, default=0), self._fleet.trainer_gpus),
            episodes=sum(len(group.finished) for group in groups),
            tokens=sum(ages.values()) - over_age,
            staleness=Counter({age: tokens for age, tokens in ages.items() if age <= shape.max_staleness}),
            over_age=over_age,
        )

    def _trained(self) -> None:
        assert self._rollouts is not None
        self._train_s = self._now - self._took
        if self._shape.freezes_evaluation:
            self._rollouts.when_evaluated(lambda: self._when_updated(self._publish))
        else:
            self._when_updated(self._publish)

    def _when_updated(self, then: Callable[[], None]) -> None:
        if self._updating:
            self._after_update = then
        else:
            then()

    def _publish(self) -> None:
        self._buffer.stepped()
        self._compute(self._costs.update.publish_s, self._update)

    def _update(self) -> None:
        update, number, shape = self._costs.update, len(self.steps) + 1, self._shape
        self._updating = True
        if shape.overlaps_publication and number < shape.steps and not self._evaluates(number):
            self._end_step()
        else:
            self._after_update = self._end_step
        self._compute(max(0.0, update.update_s - update.pause_s), self._pause)

    def _pause(self) -> None:
        self._machine.pool.set_paused(True)
        self._compute(self._costs.update.pause_s, self._updated)

    def _updated(self) -> None:
        assert self._rollouts is not None
        self._buffer.tick()
        self._machine.pool.take_version(self._buffer.version, rereads=self._shape.rereads_context)
        self._machine.pool.set_paused(False)
        self._updating = False
        then, self._after_update = self._after_update, None
        if then is not None:
            then()
        self._rollouts.dispatch()

    def _evaluates(self, number: int) -> bool:
        return bool(self._shape.eval_every) and number % self._shape.eval_every == 0

    def _end_step(self) -> None:
        assert self._batch is not None
        assert self._rollouts is not None
        update, batch, number = self._costs.update, self._batch, len(self.steps) + 1
        worked_s = self._now - self._began
        step = SimulatedStep(
            number=number,
            wait_s=self._waited_s,
            train_s=self._train_s,
            sync_s=worked_s - self._train_s,
            ended_s=self._now,
            episodes=batch.episodes,
            trained_tokens=batch.tokens,
            max_staleness=max(batch.staleness, default=0),
        )
        self.steps.append(step)
        self.staleness.append(batch.staleness)
        self.masked.append(batch.over_age)
        self.busy_s += worked_s
        self._on_step(step)
        if self._evaluates(number):
            self._rollouts.request_evaluation(number)
        saves = self._shape.checkpoint_every and number % self._shape.checkpoint_every == 0
        self._compute(update.between_s + (update.checkpoint_s if saves else 0.0), self._idle)

    def _idle(self) -> None:
        self._idle_since = self._now
        self.look()
