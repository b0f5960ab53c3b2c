"""The simulated buffer opens groups and forms batches exactly as the engine's buffer does."""

from __future__ import annotations

from typing import Literal

import anyio
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.engine.buffer import GroupBuffer, Signal, VersionClock
from agentrl.engine.staleness import Admission
from agentrl.types import Group, Task
from agentrl_simulate.rollouts import SimulatedBuffer


class _AgedGroup(Group):
    """A group whose oldest token is of the version at its admission."""

    def min_version(self) -> int:
        return self.admitted_version


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(0, 3),
    st.sampled_from(("wait", "mask", "drop")),
    st.booleans(),
    st.lists(st.tuples(st.sampled_from(("admit", "complete", "drop", "train")), st.integers(0, 9)), max_size=60),
)
def test_both_buffers_do_the_same(
    groups_per_step: int,
    max_staleness: int,
    policy: Literal["wait", "mask", "drop"],
    overlaps: bool,
    actions: list[tuple[str, int]],
) -> None:
    anyio.run(_play_both, Admission(groups_per_step=groups_per_step, max_staleness=max_staleness), policy, overlaps, actions)


async def _play_both(
    admission: Admission, policy: Literal["wait", "mask", "drop"], overlaps: bool, actions: list[tuple[str, int]]
) -> None:
    changed = Signal()
    clock = VersionClock(changed=changed)
    real = GroupBuffer(clock=clock, changed=changed, admission=admission, policy=policy)
    simulated = SimulatedBuffer(admission, policy)
    running: dict[int, int] = {}
    simulated.on_drop = lambda index: None
    for action, number in actions:
        assert simulated.may_admit == real.may_admit
        if action == "admit" and real.may_admit:
            ticket = await real.admit()
            assert ticket is not None
            assert simulated.admit() == ticket.index
            running[ticket.index] = ticket.version
        elif action in ("complete", "drop") and running:
            index = sorted(running)[number % len(running)]
            version = running.pop(index)
            if action == "drop":
                real.drop(index, "test")
                simulated.drop(index)
            else:
                task = Task(id=str(index), data={})
                real.complete(_AgedGroup(index=index, task=task, episodes=(), admitted_version=version))
                simulated.complete(index, version)
        elif action == "train":
            batch: tuple[int, ...] = ()
            with anyio.move_on_after(0):
                taken = await real.take()
                batch = tuple(group.index for group in taken or ())
            assert simulated.take() == batch
            if batch:
                if clock.version < clock.trainer_version:
                    clock.tick(clock.trainer_version)
                    simulated.tick()
                clock.stepped()
                simulated.stepped()
                if not overlaps:
                    clock.tick(clock.trainer_version)
                    simulated.tick()
        assert simulated.outstanding == real.num_outstanding
        assert simulated.dropped == sum(real.dropped.values())
