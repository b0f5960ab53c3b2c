"""The trainer of a simulated run: spot check, batch, step, publication, update, checkpoint, in the order of the engine.

Invariant: the version moves by one for each batch, after every server has the new weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from agentrl.simulate.buffer import SimulatedBuffer
from agentrl.simulate.costs.model import CostModel, Fleet, RunShape
from agentrl.simulate.events import EventQueue
from agentrl.simulate.outcome import SimulatedStep
from agentrl.simulate.pool import SimulatedPool
from agentrl.simulate.rollouts import Rollouts, SimulatedGroup


@dataclass(slots=True)
class _TrainedBatch:
    """The batch in the trainer."""

    waited_s: float
    train_s: float
    episodes: int
    tokens: int
    staleness: Counter[int]
    over_age: int


class SimulatedTrainer:
    """Trains batches and publishes versions until the last step."""

    def __init__(
        self,
        events: EventQueue,
        pool: SimulatedPool,
        buffer: SimulatedBuffer,
        shape: RunShape,
        fleet: Fleet,
        costs: CostModel,
        on_step: Callable[[SimulatedStep], None],
    ) -> None:
        """Begin idle; `connect` gives it the rollouts, and `on_step` gets each step when its version counts."""
        self._events, self._pool, self._buffer = events, pool, buffer
        self._shape, self._fleet, self._costs, self._on_step = shape, fleet, costs, on_step
        self._rollouts: Rollouts | None = None
        self._idle_since: float | None = 0.0
        self._batch: _TrainedBatch | None = None
        self.steps: list[SimulatedStep] = []
        self.staleness: list[Counter[int]] = []
        """Trained tokens of each step by staleness."""
        self.masked: list[int] = []
        """Over-age tokens of each step that were left out."""
        self.busy_s = 0.0
        """Seconds of the finished steps in which it did not wait for a batch."""

    def connect(self, rollouts: Rollouts) -> None:
        """Take batches from `rollouts`."""
        self._rollouts = rollouts

    def look(self) -> None:
        """Begin a step if the trainer is idle and a batch is ready."""
        if self._idle_since is not None and self._buffer.is_ready():
            self._idle_since, waited = None, self._events.now - self._idle_since
            self._events.plan(self._costs.update.spot_check_s, lambda: self._train(waited))

    def _train(self, waited: float) -> None:
        assert self._rollouts is not None
        groups = [self._rollouts.groups.pop(index) for index in self._buffer.take()]
        batch = self._batch = self._prepare(groups, waited)
        self._rollouts.dispatch()
        self._pool.set_training(batch.train_s > 0)
        self._events.plan(batch.train_s, self._trained)

    def _prepare(self, groups: list[SimulatedGroup], waited: float) -> _TrainedBatch:
        version, shape = self._buffer.version, self._shape
        ages: Counter[int] = Counter()
        for group in groups:
            for sampled_by, tokens in group.tokens.items():
                ages[version - sampled_by] += tokens
        over_age = sum(tokens for age, tokens in ages.items() if age > shape.max_staleness)
        computed = [episode.tokens for group in groups if not group.zero_variance for episode in group.finished]
        return _TrainedBatch(
            waited_s=waited,
            train_s=self._costs.trainer.train_s(sum(computed), max(computed, default=0), self._fleet.trainer_gpus),
            episodes=sum(len(group.finished) for group in groups),
            tokens=sum(ages.values()) - over_age,
            staleness=Counter({age: tokens for age, tokens in ages.items() if age <= shape.max_staleness}),
            over_age=over_age,
        )

    def _trained(self) -> None:
        self._pool.set_training(False)
        self._events.plan(self._costs.update.publish_s, self._update)

    def _update(self) -> None:
        update = self._costs.update
        self._events.plan(max(0.0, update.update_s - update.pause_s), lambda: self._pool.set_paused(True))
        self._events.plan(max(update.update_s, update.pause_s), self._updated)

    def _updated(self) -> None:
        assert self._batch is not None
        assert self._rollouts is not None
        update, batch, number = self._costs.update, self._batch, len(self.steps) + 1
        self._buffer.tick()
        self._pool.take_version(self._buffer.version, rereads=update.rereads_context)
        self._pool.set_paused(False)
        sync_s = update.spot_check_s + update.publish_s + max(update.update_s, update.pause_s)
        step = SimulatedStep(
            number=number,
            wait_s=batch.waited_s,
            train_s=batch.train_s,
            sync_s=sync_s,
            ended_s=self._events.now,
            episodes=batch.episodes,
            trained_tokens=batch.tokens,
            max_staleness=max(batch.staleness, default=0),
        )
        self.steps.append(step)
        self.staleness.append(batch.staleness)
        self.masked.append(batch.over_age)
        self.busy_s += batch.train_s + sync_s
        self._on_step(step)
        if self._shape.eval_every and number % self._shape.eval_every == 0:
            self._rollouts.request_evaluation(number)
        saves = self._shape.checkpoint_every and number % self._shape.checkpoint_every == 0
        self._events.plan(update.between_s + (update.checkpoint_s if saves else 0.0), self._idle)
        self._rollouts.dispatch()

    def _idle(self) -> None:
        self._idle_since = self._events.now
        self.look()
