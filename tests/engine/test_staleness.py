"""The admission and enforcement rules, over random schedules and heavy tails."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.engine.staleness import Admission, Candidate, StalenessPolicy, select


@dataclass
class Simulation:
    """Groups opened by admission, finishing after random durations, trained by a trainer that takes `train_s` a step."""

    groups_per_step: int
    max_staleness: int
    policy: StalenessPolicy
    slots: int
    steps: int
    train_s: float
    rng: random.Random
    sigma: float = 1.5
    drop_rate: float = 0.0
    staleness: list[int] = field(default_factory=list)
    dropped_for_age: int = 0
    most_due: int = 0
    admitted: int = 0

    def run(self) -> None:
        admission = Admission(
            groups_per_step=self.groups_per_step,
            max_staleness=self.max_staleness,
            total_groups=self.steps * self.groups_per_step,
        )
        open_groups: dict[int, Candidate] = {}
        events: list[tuple[float, int]] = []  # (time, group), or group -1: the trainer's step ends
        now, version, consumed, training = 0.0, 0, 0, False
        while version < self.steps:
            running = sum(not c.complete for c in open_groups.values())
            while running < self.slots and admission.allows(opened=consumed + len(open_groups), version=version):
                open_groups[self.admitted] = Candidate(index=self.admitted, version=version, complete=False)
                heapq.heappush(events, (now + self.rng.lognormvariate(0.0, self.sigma), self.admitted))
                self.admitted += 1
                running += 1
            if not training:
                self._check_condition(open_groups, version)
                chosen = select(
                    list(open_groups.values()),
                    version=version,
                    groups_per_step=self.groups_per_step,
                    max_staleness=self.max_staleness,
                    policy=self.policy,
                )
                for index in chosen.drop:
                    del open_groups[index]
                    self.dropped_for_age += 1
                for index in chosen.take:
                    self.staleness.append(version - open_groups.pop(index).version)
                if chosen.take:
                    consumed += len(chosen.take)
                    training = True
                    heapq.heappush(events, (now + self.train_s, -1))
                if chosen.drop or chosen.take:
                    continue
            assert events, f"nothing will ever happen at version {version}: {open_groups}"
            now, group = heapq.heappop(events)
            if group < 0:
                version, training = version + 1, False
            elif self.rng.random() < self.drop_rate:
                del open_groups[group]
            else:
                open_groups[group] = Candidate(index=group, version=open_groups[group].version, complete=True)

    def _check_condition(self, open_groups: dict[int, Candidate], version: int) -> None:
        """Condition (1) of the module: every class of outstanding groups fits into the versions it has left."""
        for age_class in range(self.max_staleness + 1):
            limit = version - self.max_staleness + age_class
            count = sum(c.version <= limit for c in open_groups.values())
            if self.policy == "wait":
                assert count <= self.groups_per_step * (age_class + 1)
            if age_class == 0:
                self.most_due = max(self.most_due, count)


schedules = st.fixed_dictionaries(
    {
        "groups_per_step": st.integers(1, 6),
        "max_staleness": st.integers(0, 5),
        "slots": st.integers(1, 40),
        "train_s": st.sampled_from([0.01, 0.3, 1.0, 5.0]),
        "sigma": st.sampled_from([0.1, 1.0, 2.5]),
        "drop_rate": st.sampled_from([0.0, 0.05, 0.5]),
        "rng": st.integers(0, 2**32).map(random.Random),
    }
)


@settings(max_examples=200, deadline=None)
@given(schedules)
def test_under_wait_no_token_is_over_the_bound_and_nothing_is_discarded(schedule: dict[str, object]) -> None:
    simulation = Simulation(policy="wait", steps=25, **schedule)  # pyright: ignore[reportArgumentType] - drawn values
    simulation.run()
    assert max(simulation.staleness) <= simulation.max_staleness
    assert simulation.dropped_for_age == 0
    assert len(simulation.staleness) == 25 * simulation.groups_per_step


@settings(max_examples=100, deadline=None)
@given(schedules)
def test_under_drop_no_token_is_over_the_bound_and_every_step_still_gets_its_batch(schedule: dict[str, object]) -> None:
    simulation = Simulation(policy="drop", steps=15, **schedule)  # pyright: ignore[reportArgumentType] - drawn values
    simulation.run()
    assert max(simulation.staleness) <= simulation.max_staleness
    assert len(simulation.staleness) == 15 * simulation.groups_per_step


@settings(max_examples=50, deadline=None)
@given(schedules)
def test_with_a_bound_of_zero_every_token_is_trained_at_its_own_version(schedule: dict[str, object]) -> None:
    simulation = Simulation(policy="wait", steps=10, **{**schedule, "max_staleness": 0})  # pyright: ignore[reportArgumentType] - drawn values
    simulation.run()
    assert set(simulation.staleness) == {0}


def test_heavy_tails_break_the_bound_under_admission_alone_and_keep_it_under_wait() -> None:
    def simulate(policy: StalenessPolicy) -> Simulation:
        simulation = Simulation(
            groups_per_step=16,
            max_staleness=4,
            policy=policy,
            slots=64,
            steps=150,
            train_s=1.0,
            rng=random.Random(1),
            sigma=2.0,
        )
        simulation.run()
        return simulation

    admission_alone, waiting, dropping = simulate("mask"), simulate("wait"), simulate("drop")
    assert max(admission_alone.staleness) > 2 * 4
    assert max(waiting.staleness) <= 4
    assert waiting.admitted == len(waiting.staleness)
    assert max(dropping.staleness) <= 4
    assert dropping.dropped_for_age > 0


def test_groups_of_one_version_are_spread_over_the_versions_left_to_them() -> None:
    """Taking whatever is complete at versions 0 and 1 would leave four groups due at version 2, where two can be trained."""

    def batch(candidates: list[Candidate], version: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        chosen = select(candidates, version=version, groups_per_step=2, max_staleness=2, policy="wait")
        return chosen.take, chosen.waits_for

    slow = [Candidate(index=i, version=0, complete=False) for i in range(4)]
    fast = [Candidate(index=i, version=0, complete=True) for i in (4, 5)]
    assert batch([*slow, *fast], 0) == ((4, 5), ())
    younger = [Candidate(index=i, version=1, complete=True) for i in (6, 7)]
    assert batch([*slow, *younger], 1) == ((), (0, 1, 2, 3))
    two_done = [Candidate(index=i, version=0, complete=i in (1, 3)) for i in range(4)]
    assert batch([*two_done, *younger], 1) == ((1, 3), ())


def test_admission_counts_from_the_first_version_and_ends_with_the_run() -> None:
    admission = Admission(groups_per_step=2, max_staleness=1, first_version=10, total_groups=6)
    assert admission.allows(opened=3, version=10)
    assert not admission.allows(opened=4, version=10)
    assert admission.allows(opened=5, version=12)
    assert not admission.allows(opened=6, version=99)


@pytest.mark.parametrize("policy", ["wait", "mask", "drop"])
def test_nothing_is_taken_before_a_whole_batch_is_complete(policy: StalenessPolicy) -> None:
    candidates = [Candidate(index=0, version=0, complete=True), Candidate(index=1, version=0, complete=False)]
    chosen = select(candidates, version=0, groups_per_step=2, max_staleness=3, policy=policy)
    assert (chosen.take, chosen.drop, chosen.waits_for) == ((), (), (1,))
