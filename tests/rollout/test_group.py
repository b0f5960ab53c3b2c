"""Groups: retries, drop and keep, order of starting, cancellation."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import anyio.lowlevel
import pytest

from agentrl.errors import InvariantError
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.group import DroppedGroup, run_group
from agentrl.types import EpisodeFailure, Group, StopReason, Task, Trajectory
from tests.rollout.harness import PATIENCE_S, TASK


def outcome(episode_id: str, failed: bool) -> Trajectory:
    failure = EpisodeFailure(kind="ValueError", message=f"{episode_id} failed", traceback="") if failed else None
    reason = StopReason.WORKFLOW_ERROR if failed else StopReason.COMPLETED
    reward = None if failed else 1.0
    return Trajectory(
        episode_id=episode_id, task_id="t0", turns=(), stop_reason=reason, final_reward=reward, failure=failure
    )


class Runner:
    """Fails the episodes that `fails` says, and remembers all."""

    def __init__(self, fails: Callable[[int, int], bool] = lambda member, attempt: False) -> None:
        self.fails = fails
        self.ids: list[str] = []
        self.running = 0
        self.most_running = 0

    async def __call__(self, task: Task, *, episode_id: str) -> Trajectory:
        self.ids.append(episode_id)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            for _ in range(8):  # long enough for others to start
                await anyio.lowlevel.checkpoint()
        finally:
            self.running -= 1
        _, member, attempt = map(int, episode_id.split("."))
        return outcome(episode_id, self.fails(member, attempt))


async def group_of(runner: Runner, *, slots: int = 8, size: int = 4, **rollout: object) -> Group | DroppedGroup:
    with anyio.fail_after(PATIENCE_S):
        return await run_group(
            TASK,
            index=7,
            group_size=size,
            admitted_version=3,
            run=runner,
            rollout=RolloutConfig(**rollout),  # pyright: ignore[reportArgumentType] - the test's values
            slots=anyio.Semaphore(slots),
        )


async def test_a_group_has_its_members_in_order_and_its_admission() -> None:
    group = await group_of(Runner())
    assert isinstance(group, Group)
    assert [e.episode_id for e in group.episodes] == ["7.0.0", "7.1.0", "7.2.0", "7.3.0"]
    assert (group.index, group.admitted_version, group.task) == (7, 3, TASK)


async def test_a_failed_member_is_run_again_from_the_start() -> None:
    runner = Runner(lambda member, attempt: member == 2 and attempt == 0)
    group = await group_of(runner, episode_retries=1)
    assert isinstance(group, Group)
    assert [e.episode_id for e in group.episodes] == ["7.0.0", "7.1.0", "7.2.1", "7.3.0"]


async def test_a_member_that_fails_for_good_drops_the_group_and_cancels_the_others() -> None:
    never = anyio.Event()

    class Slow(Runner):
        async def __call__(self, task: Task, *, episode_id: str) -> Trajectory:
            if not episode_id.startswith("7.2"):
                await never.wait()
            return await super().__call__(task, episode_id=episode_id)

    dropped = await group_of(Slow(lambda member, attempt: True), episode_retries=2)
    assert isinstance(dropped, DroppedGroup)
    assert dropped.reason == "episode_failed:workflow_error"
    assert [failure.message for failure in dropped.failures] == ["7.2.0 failed", "7.2.1 failed", "7.2.2 failed"]


async def test_keep_goes_on_with_the_others_if_there_are_enough() -> None:
    lost_one = await group_of(Runner(lambda member, attempt: member == 0), incomplete_group="keep")
    assert isinstance(lost_one, Group)
    assert [e.episode_id for e in lost_one.episodes] == ["7.1.0", "7.2.0", "7.3.0"]
    lost_two = await group_of(Runner(lambda member, attempt: member < 2), incomplete_group="keep")
    assert isinstance(lost_two, Group)
    lost_three = await group_of(Runner(lambda member, attempt: member < 3), incomplete_group="keep")
    assert isinstance(lost_three, DroppedGroup)


async def test_no_more_episodes_run_at_once_than_there_are_slots_and_all_slots_come_back() -> None:
    runner = Runner()
    slots = anyio.Semaphore(2)
    await run_group(TASK, index=0, group_size=5, admitted_version=0, run=runner, rollout=RolloutConfig(), slots=slots)
    assert runner.most_running == 2
    assert slots.value == 2


@pytest.mark.parametrize("size", [1, 3, 6])
async def test_all_slots_come_back_when_a_group_is_dropped_while_it_starts(size: int) -> None:
    slots = anyio.Semaphore(size)
    await run_group(
        TASK,
        index=0,
        group_size=6,
        admitted_version=0,
        run=Runner(lambda member, attempt: True),
        rollout=RolloutConfig(episode_retries=0),
        slots=slots,
    )
    assert slots.value == size


async def test_started_is_called_once_every_member_has_its_slot() -> None:
    slots = anyio.Semaphore(2)
    release = anyio.Event()
    begun: list[str] = []
    started = anyio.Event()

    async def run(task: Task, *, episode_id: str) -> Trajectory:
        begun.append(episode_id)
        await release.wait()
        return outcome(episode_id, failed=False)

    async def group() -> None:
        await run_group(
            TASK,
            index=0,
            group_size=3,
            admitted_version=0,
            run=run,
            rollout=RolloutConfig(),
            slots=slots,
            on_started=started.set,
        )

    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(group)
            await anyio.wait_all_tasks_blocked()
            assert len(begun) == 2
            assert not started.is_set()
            release.set()
    assert started.is_set()


async def test_every_attempt_is_reported() -> None:
    seen: list[Trajectory] = []
    await run_group(
        TASK,
        index=7,
        group_size=2,
        admitted_version=0,
        run=Runner(lambda member, attempt: attempt == 0),
        rollout=RolloutConfig(episode_retries=1),
        slots=anyio.Semaphore(4),
        on_episode=seen.append,
    )
    assert sorted(t.episode_id for t in seen) == ["7.0.0", "7.0.1", "7.1.0", "7.1.1"]


async def test_a_broken_invariant_in_one_member_leaves_as_itself() -> None:
    async def run(task: Task, *, episode_id: str) -> Trajectory:
        if episode_id == "7.1.0":
            raise InvariantError("digest mismatch")
        await anyio.sleep_forever()
        raise AssertionError

    with anyio.fail_after(PATIENCE_S), pytest.raises(InvariantError, match="digest mismatch"):
        await run_group(
            TASK, index=7, group_size=3, admitted_version=0, run=run, rollout=RolloutConfig(), slots=anyio.Semaphore(9)
        )


async def test_cancelling_a_group_ends_its_members_and_gives_its_slots_back() -> None:
    slots = anyio.Semaphore(3)
    ended: list[str] = []

    async def run(task: Task, *, episode_id: str) -> Trajectory:
        try:
            await anyio.sleep_forever()
        finally:
            ended.append(episode_id)
        raise AssertionError

    async def group() -> None:
        await run_group(TASK, index=0, group_size=5, admitted_version=0, run=run, rollout=RolloutConfig(), slots=slots)

    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(group)
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
    assert len(ended) == 3
    assert slots.value == 3
