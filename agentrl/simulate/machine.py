"""The shared parts of one simulation: virtual time, cores, the driver and the servers."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.simulate.cores import SharedCores, SimulatedDriver
from agentrl.simulate.events import EventQueue
from agentrl.simulate.pool import SimulatedPool


@dataclass(frozen=True, slots=True)
class SimulatedMachine:
    """The machine of a simulated run."""

    events: EventQueue
    cores: SharedCores
    driver: SimulatedDriver
    pool: SimulatedPool
