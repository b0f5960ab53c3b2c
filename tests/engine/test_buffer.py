"""The buffer owns groups from admission to consumption; the clock moves by one."""

from __future__ import annotations

import anyio
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.engine.buffer import GroupBuffer, Signal, Ticket, VersionClock
from agentrl.engine.staleness import Admission, StalenessPolicy
from agentrl.errors import InvariantError, StallError
from agentrl.types import Group, StopReason, Trajectory, Turn, VersionSpan
from tests.rollout.harness import PATIENCE_S, TASK


def group(ticket: Ticket, version: int | None = None) -> Group:
    """Return a group whose one token was sampled at `version`, that of its admission by default."""
    sampled = ticket.version if version is None else version
    one = np.array([1], np.int32)
    turn = Turn(
        context_ids=one,
        output_ids=one,
        output_logprobs=np.array([-1.0], np.float32),
        spans=(VersionSpan(start=0, end=1, version=sampled),),
        stop_reason=StopReason.STOP,
        sent_after=0,
        sent_at=0,
    )
    episode = Trajectory(episode_id="e", task_id="t0", turns=(turn,), stop_reason=StopReason.COMPLETED, final_reward=1.0)
    return Group(index=ticket.index, task=TASK, episodes=(episode,), admitted_version=ticket.version)


class Parts:
    """A buffer with its clock."""

    def __init__(self, *, batch: int = 2, bound: int = 1, policy: StalenessPolicy = "wait") -> None:
        changed = Signal()
        self.clock = VersionClock(changed=changed)
        self.dropped: list[tuple[int, str]] = []
        self.buffer = GroupBuffer(
            clock=self.clock,
            changed=changed,
            admission=Admission(groups_per_step=batch, max_staleness=bound),
            policy=policy,
            on_drop=lambda index, reason: self.dropped.append((index, reason)),
        )

    async def admit(self) -> Ticket:
        with anyio.fail_after(PATIENCE_S):
            ticket = await self.buffer.admit()
        assert ticket is not None
        return ticket

    async def take(self) -> list[int]:
        with anyio.fail_after(PATIENCE_S):
            groups = await self.buffer.take()
        assert groups is not None
        return [g.index for g in groups]


async def test_admission_waits_for_a_version() -> None:
    parts = Parts(batch=1, bound=1)
    admitted = [await parts.admit(), await parts.admit()]
    third: list[Ticket] = []

    async def admit() -> None:
        third.append(await parts.admit())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(admit)
        await anyio.wait_all_tasks_blocked()
        assert third == []
        parts.buffer.complete(group(admitted[0]))
        assert await parts.take() == [0]
        await anyio.wait_all_tasks_blocked()
        assert third == []
        parts.clock.stepped()
        parts.clock.tick(1)
    assert third == [Ticket(index=2, version=1)]


async def test_a_dropped_group_gives_its_place_back() -> None:
    parts = Parts(batch=1, bound=0)
    first = await parts.admit()
    assert not parts.buffer.may_admit
    parts.buffer.drop(first.index, "episode_failed:workflow_error")
    assert (await parts.admit()).index == 1
    assert parts.buffer.dropped == {"episode_failed:workflow_error": 1}
    assert parts.dropped == [(0, "episode_failed:workflow_error")]


async def test_take_waits_for_groups_that_are_due_though_others_are_complete() -> None:
    parts = Parts(batch=1, bound=1)
    slow, fast = await parts.admit(), await parts.admit()
    parts.buffer.complete(group(fast))
    assert await parts.take() == [1]
    parts.clock.stepped()
    parts.clock.tick(1)
    young = await parts.admit()
    parts.buffer.complete(group(young))
    taken: list[list[int]] = []

    async def take() -> None:
        taken.append(await parts.take())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(take)
        await anyio.wait_all_tasks_blocked()
        assert taken == []
        assert "missing: groups 0 that are due" in parts.buffer.describe_wait()
        parts.buffer.complete(group(slow))
    assert taken == [[0]]


async def test_over_age_groups_leave_under_drop_and_their_place_is_free() -> None:
    parts = Parts(batch=1, bound=0, policy="drop")
    ticket = await parts.admit()
    parts.clock.stepped()
    parts.clock.tick(1)
    parts.buffer.complete(group(ticket))
    taken: list[list[int]] = []

    async def take() -> None:
        taken.append(await parts.take())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(take)
        await anyio.wait_all_tasks_blocked()
        assert parts.dropped == [(0, "over_age")]
        parts.buffer.complete(group(await parts.admit()))
    assert taken == [[1]]


async def test_condemned_groups_are_dropped_now_or_when_they_complete() -> None:
    parts = Parts(batch=1, bound=3)
    first, second, third = await parts.admit(), await parts.admit(), await parts.admit()
    parts.buffer.complete(group(first))
    assert parts.buffer.condemn([first.index, second.index, 99], "unverified") == 2
    assert parts.buffer.dropped == {"unverified": 1}
    parts.buffer.complete(group(second))
    assert parts.buffer.dropped == {"unverified": 2}
    parts.buffer.complete(group(third))
    assert await parts.take() == [2]


async def test_a_complete_group_that_is_dropped_counts_for_no_batch() -> None:
    parts = Parts(batch=2, bound=3)
    dropped, second = await parts.admit(), await parts.admit()
    parts.buffer.complete(group(dropped))
    parts.buffer.drop(dropped.index, "unverified")
    parts.buffer.complete(group(second))
    taken: list[list[int]] = []

    async def take() -> None:
        taken.append(await parts.take())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(take)
        await anyio.wait_all_tasks_blocked()
        parts.buffer.complete(group(await parts.admit()))
        await anyio.wait_all_tasks_blocked()
        assert taken == [[1, 2]]


async def test_each_group_is_settled_once() -> None:
    parts = Parts(batch=1, bound=3)
    first, second = await parts.admit(), await parts.admit()
    parts.buffer.complete(group(first))
    with pytest.raises(InvariantError, match="completed twice"):
        parts.buffer.complete(group(first))
    assert await parts.take() == [0]
    with pytest.raises(InvariantError, match="was consumed or dropped before"):
        parts.buffer.drop(0, "again")
    parts.buffer.drop(second.index, "x")
    with pytest.raises(InvariantError, match="was consumed or dropped before"):
        parts.buffer.complete(group(second))
    with pytest.raises(InvariantError, match="was never admitted"):
        parts.buffer.complete(group(Ticket(index=99, version=0)))


async def test_the_age_of_a_group_counts_from_the_trainer_where_it_is_ahead_of_the_servers() -> None:
    parts = Parts(batch=1, bound=1, policy="drop")
    old = await parts.admit()
    parts.clock.stepped()
    parts.clock.tick(1)
    young = await parts.admit()
    parts.buffer.complete(group(old))
    parts.buffer.complete(group(young))
    parts.clock.stepped()  # the trainer has version 2, the servers have 1
    assert await parts.take() == [young.index]
    assert parts.dropped == [(old.index, "over_age")]


async def test_closing_ends_both_waits() -> None:
    parts = Parts(batch=1, bound=0)
    await parts.admit()
    results: list[object] = []

    async def admit() -> None:
        results.append(await parts.buffer.admit())

    async def take() -> None:
        results.append(await parts.buffer.take())

    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(admit)
            tasks.start_soon(take)
            await anyio.wait_all_tasks_blocked()
            parts.buffer.close()
    assert results == [None, None]


async def test_a_take_with_a_deadline_names_the_groups_it_waited_for() -> None:
    parts = Parts(batch=2, bound=1)
    await parts.admit()
    with pytest.raises(StallError, match=r"0 of 2 groups are complete; missing: groups 0: this did not end within 0\.01 s"):
        await parts.buffer.take(timeout_s=0.01)
    assert parts.buffer.num_outstanding == 1


async def test_cancelled_waits_take_nothing() -> None:
    parts = Parts(batch=1, bound=0)
    ticket = await parts.admit()
    for wait in (parts.buffer.admit, parts.buffer.take):
        with anyio.move_on_after(0.01) as scope:
            await wait()
        assert scope.cancelled_caught
    parts.buffer.complete(group(ticket))
    assert await parts.take() == [0]
    assert (parts.buffer.num_outstanding, parts.buffer.num_admitted) == (0, 1)


async def test_the_clock_moves_by_one_and_wakes_who_waits() -> None:
    changed = Signal()
    clock = VersionClock(start=5, changed=changed)
    seen: list[int] = []

    async def reach(version: int, timeout_s: float) -> None:
        await changed.wait_until(
            lambda: clock.version >= version, timeout_s=timeout_s, what=lambda: f"version {version}, now {clock.version}"
        )

    async def wait() -> None:
        await reach(7, PATIENCE_S)
        seen.append(clock.version)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        clock.stepped()
        clock.tick(6)
        await anyio.wait_all_tasks_blocked()
        assert seen == []
        clock.stepped()
        clock.tick(7)
    assert seen == [7]
    for early in (7, 8):
        with pytest.raises(
            InvariantError, match=f"from 7 to 8 after a step of the trainer, which has version 7; got {early}"
        ):
            clock.tick(early)
    clock.stepped()
    assert (clock.version, clock.trainer_version) == (7, 8)
    with pytest.raises(InvariantError, match="the trainer stepped from version 8, but the servers hold version 7"):
        clock.stepped()
    for wrong in (7, 9, 6):
        with pytest.raises(InvariantError, match="must move from 7 to 8"):
            clock.tick(wrong)
    with pytest.raises(StallError, match="version 8, now 7: this did not end"):
        await reach(8, 0.01)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(0, 3),
    st.sampled_from(["wait", "mask", "drop"]),
    st.lists(st.tuples(st.sampled_from(["complete", "drop", "train", "publish"]), st.integers(0, 10**6)), max_size=120),
)
def test_every_admitted_group_is_consumed_once_or_dropped_once_or_outstanding(
    batch: int, bound: int, policy: StalenessPolicy, actions: list[tuple[str, int]]
) -> None:
    async def play() -> None:
        parts = Parts(batch=batch, bound=bound, policy=policy)
        running: list[Ticket] = []
        versions: dict[int, int] = {}
        consumed: list[int] = []
        for action, choice in actions:
            while parts.buffer.may_admit:
                running.append(await parts.admit())
                versions[running[-1].index] = running[-1].version
            if action == "complete" and running:
                parts.buffer.complete(group(running.pop(choice % len(running))))
            elif action == "drop" and running:
                parts.buffer.drop(running.pop(choice % len(running)).index, "x")
            elif action == "publish" and parts.clock.version < parts.clock.trainer_version:
                parts.clock.tick(parts.clock.trainer_version)
            elif action == "train":
                with anyio.move_on_after(0):
                    taken = await parts.take()
                    if policy != "mask":
                        assert parts.clock.trainer_version - min(versions[index] for index in taken) <= bound
                    consumed += taken
                    if parts.clock.version < parts.clock.trainer_version:
                        parts.clock.tick(parts.clock.trainer_version)
                    parts.clock.stepped()
        dropped = [index for index, _ in parts.dropped]
        settled = consumed + dropped
        assert len(settled) == len(set(settled))
        admitted = len(settled) + parts.buffer.num_outstanding
        assert set(settled) <= set(range(admitted))
        assert sum(parts.buffer.dropped.values()) == len(dropped)

    anyio.run(play)
