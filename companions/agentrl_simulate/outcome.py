"""The result of a simulated run.

Invariant: numbers are of the steps after the warm-up, in which the pipeline fills; counts of groups are of the whole run.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """One training step, in virtual seconds."""

    number: int
    wait_s: float
    """The trainer waited for the batch."""
    train_s: float
    sync_s: float
    """The spot check before the step, and publishing and updating after it, as far as the trainer waited for them."""
    ended_s: float
    """When the trainer could begin the next one."""
    episodes: int
    trained_tokens: int
    """Sampled tokens of the batch."""
    max_staleness: int
    """Largest staleness of a trained token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """The result of a simulation."""

    steps: Sequence[SimulatedStep]
    warm_up: int
    """Steps at the beginning that the numbers leave out."""
    staleness: Mapping[int, int]
    """Trained tokens by staleness, in versions."""
    masked_tokens: int
    """Over-age tokens that policy `mask` left out."""
    groups: Mapping[str, int]
    """Groups `admitted`, `consumed`, `dropped` and `outstanding` at the end."""
    calls: int
    server_share: float
    """Work of the servers over what saturated servers do in the same time."""
    serving_share: float
    """Share of the servers' time in which they had a request."""
    trainer_share: float
    """Share of the time in which the trainer trained, checked or published."""
    bound_share: float
    """Share of the time in which the staleness bound kept groups from opening although episode slots were free."""
    slots_share: float
    """Mean share of the episode slots in use."""
    cores_share: float
    """Share of the shared cores that computed; 0 where servers and trainer have devices of their own."""
    evaluations: int
    seconds: float
    """Virtual time of the whole run."""

    @property
    def measured(self) -> Sequence[SimulatedStep]:
        return self.steps[self.warm_up :]

    @property
    def step_s(self) -> float:
        """Mean seconds from one step to the next."""
        first = self.steps[self.warm_up - 1].ended_s if self.warm_up else 0.0
        return (self.steps[-1].ended_s - first) / len(self.measured)

    @property
    def trained_tokens_per_s(self) -> float:
        """Sampled tokens that are trained in a second: the throughput that counts."""
        return statistics.fmean(step.trained_tokens for step in self.measured) / self.step_s

    @property
    def mean_staleness(self) -> float:
        """Over all trained tokens, versions."""
        total = sum(self.staleness.values())
        return sum(age * count for age, count in self.staleness.items()) / total if total else 0.0

    @property
    def max_staleness(self) -> int:
        return max(self.staleness, default=0)


def merged(counters: Sequence[Mapping[int, int]]) -> Counter[int]:
    """Return the sum of several counters."""
    total: Counter[int] = Counter()
    for counter in counters:
        total.update(counter)
    return total
