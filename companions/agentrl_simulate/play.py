"""Play one run in virtual time; its trainer checks, trains, publishes and updates in the order of the engine.

Invariant: the same arguments give the same result. No trained token is more versions old than the bound, no group is lost
and none is trained twice: the rules are the engine's own. The trainer's version moves by one for each batch, and the
servers' after it, before the next publication begins.

The model leaves out unequal servers, servers that fail, and growth of answers during training. `docs/scaling.md` lists them
with their effect.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from agentrl.engine.config import MAX_SKIPPED_CHECKS
from agentrl.engine.staleness import Admission
from agentrl.errors import ConfigError, InvariantError
from agentrl_simulate.costs import CostModel, Fleet, RunShape
from agentrl_simulate.events import EventQueue, SharedCores, SimulatedDriver
from agentrl_simulate.outcome import SimulatedRun, SimulatedStep, merged
from agentrl_simulate.rollouts import Rollouts, SimulatedBuffer, SimulatedGroup
from agentrl_simulate.servers import SimulatedMachine, SimulatedPool
from agentrl_simulate.workload import EpisodeSource


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
        version, shape = self._buffer.version, self._shape
        keeps = version - shape.max_staleness if shape.pins_calls else None
        self._machine.pool.take_version(version, rereads=shape.rereads_context, keeps=keeps)
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


@dataclass(frozen=True, slots=True)
class _Reading:
    now: float = 0.0
    sampled: float = 0.0
    serving_s: float = 0.0
    trainer_s: float = 0.0
    bound_s: float = 0.0
    slot_s: float = 0.0
    cores_s: float = 0.0


class _Player:
    def __init__(
        self,
        shape: RunShape,
        fleet: Fleet,
        costs: CostModel,
        source: EpisodeSource,
        warm_up: int,
        on_step: Callable[[SimulatedStep], None],
    ) -> None:
        self.shape, self.fleet, self.costs, self.warm_up, self.on_step = shape, fleet, costs, warm_up, on_step
        self.events = EventQueue()
        cores = self.cores = SharedCores(self.events, costs.host.cores)
        self.pool = SimulatedPool(self.events, cores, costs, fleet.servers)
        machine = SimulatedMachine(self.events, cores, SimulatedDriver(cores), self.pool)
        admission = Admission(
            groups_per_step=shape.groups_per_step,
            max_staleness=shape.max_staleness,
            total_groups=None if shape.total_steps is None else shape.total_steps * shape.groups_per_step,
        )
        self.buffer = SimulatedBuffer(admission, shape.policy)
        self.trainer = SimulatedTrainer(machine, self.buffer, shape, fleet, costs, self.stepped)
        self.rollouts = Rollouts(machine, self.buffer, shape, source, costs.host, self.trainer.look)
        self.trainer.connect(self.rollouts)
        self.begin = _Reading()

    def stepped(self, step: SimulatedStep) -> None:
        if step.number == self.warm_up:
            self.begin = self.read()
        self.on_step(step)

    def read(self) -> _Reading:
        servers = self.pool.servers
        self.cores.advance()
        return _Reading(
            now=self.events.now,
            sampled=sum(server.sampled for server in servers),
            serving_s=sum(server.busy_s for server in servers),
            trainer_s=self.trainer.busy_s,
            bound_s=self.rollouts.waited_for_bound_s(),
            slot_s=self.rollouts.slot_seconds(),
            cores_s=self.cores.used_s,
        )

    def play(self) -> SimulatedRun:
        self.rollouts.dispatch()
        while len(self.trainer.steps) < self.shape.steps:
            if not self.events.run_next():
                raise InvariantError(
                    f"nothing happens any more at second {self.events.now:g} of the simulation, before step "
                    f"{len(self.trainer.steps) + 1}; groups: {dict(self.buffer.counts())}"
                )
        return self.result()

    def result(self) -> SimulatedRun:
        begin, end, trainer, warm_up = self.begin, self.read(), self.trainer, self.warm_up
        elapsed = end.now - begin.now
        saturated = elapsed * self.costs.server.tokens_per_s * self.fleet.servers
        return SimulatedRun(
            steps=tuple(trainer.steps),
            warm_up=warm_up,
            staleness=dict(sorted(merged(trainer.staleness[warm_up:]).items())),
            masked_tokens=sum(trainer.masked[warm_up:]),
            groups=dict(self.buffer.counts()),
            calls=self.rollouts.calls,
            server_share=(end.sampled - begin.sampled) / saturated,
            serving_share=(end.serving_s - begin.serving_s) / elapsed / self.fleet.servers,
            trainer_share=(end.trainer_s - begin.trainer_s) / elapsed,
            bound_share=(end.bound_s - begin.bound_s) / elapsed,
            slots_share=(end.slot_s - begin.slot_s) / elapsed / self.shape.slots,
            cores_share=(end.cores_s - begin.cores_s) / elapsed / cores if (cores := self.costs.host.cores) else 0.0,
            evaluations=self.rollouts.evaluations,
            seconds=end.now,
        )


def play_run(
    shape: RunShape,
    fleet: Fleet,
    costs: CostModel,
    source: EpisodeSource,
    *,
    warm_up: int | None = None,
    on_step: Callable[[SimulatedStep], None] = lambda step: None,
) -> SimulatedRun:
    """Play `shape.steps` training steps and return the result.

    `warm_up` are the steps at the beginning that the numbers leave out; None: those in which the pipeline fills, which are
    `max_staleness` + 2, but at most half.

    Raises:
        ConfigError: a number that must be positive is not.
        InvariantError: every group failed, so no batch forms.
    """
    positive = {"steps": shape.steps, "servers": fleet.servers, "trainer GPUs": fleet.trainer_gpus, "slots": shape.slots}
    for name, number in positive.items():
        if number < 1:
            raise ConfigError(f"expected at least 1 of the simulated {name}, got {number}")
    warm_up = min(shape.max_staleness + 2, shape.steps // 2) if warm_up is None else warm_up
    return _Player(shape, fleet, costs, source, warm_up, on_step).play()
