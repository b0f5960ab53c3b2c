"""Play one run in virtual time.

Invariant: the same arguments give the same result. No trained token is more versions old than the bound, no group is lost
and none is trained twice: the rules are the engine's own.

What the model leaves out: the driver's own processor time, unequal servers, servers that fail, and growth of answers during
training. `docs/scaling.md` lists it with its effect.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from agentrl.engine.staleness import Admission
from agentrl.errors import ConfigError, InvariantError
from agentrl.simulate.buffer import SimulatedBuffer
from agentrl.simulate.cores import SharedCores, SimulatedDriver
from agentrl.simulate.costs.model import CostModel, Fleet, RunShape
from agentrl.simulate.events import EventQueue
from agentrl.simulate.machine import SimulatedMachine
from agentrl.simulate.outcome import SimulatedRun, SimulatedStep, merged
from agentrl.simulate.pool import SimulatedPool
from agentrl.simulate.rollouts import Rollouts
from agentrl.simulate.training import SimulatedTrainer
from agentrl.simulate.workload import EpisodeSource


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
