"""Tasks that the policy always or never solves sit out passes, come back, and do so alike after a resume."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import anyio
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.data.config import TasksConfig
from agentrl.data.draw import DrawState, TaskDraw
from agentrl.data.load import OpenSource, TrainingTasks, load_training
from agentrl.errors import ConfigError
from agentrl.types import Group, StopReason, Task, Trajectory


def tasks_of(*sizes: int, passes: int) -> TrainingTasks:
    sources = tuple(
        OpenSource(f"source {n}", tuple(Task(id=f"{n}-{k}", data={}) for k in range(size)), 1.0 + n)
        for n, size in enumerate(sizes)
    )
    return TrainingTasks(sources, None, passes)


def finished(index: int, task: Task, *rewards: float, success: float | None = None) -> Group:
    episodes = tuple(
        Trajectory(
            episode_id=f"{index}.{member}",
            task_id=task.id,
            turns=(),
            stop_reason=StopReason.COMPLETED,
            final_reward=reward,
            metrics={} if success is None else {"success": success},
        )
        for member, reward in enumerate(rewards)
    )
    return Group(index=index, task=task, episodes=episodes, admitted_version=0)


def saved(draw: TaskDraw, open_groups: Sequence[int]) -> DrawState | None:
    return msgspec.json.decode(msgspec.json.encode(draw.state(open_groups)), type=DrawState | None)


async def play(draw: TaskDraw, numbers: Sequence[int], rewards: dict[str, tuple[float, ...]]) -> list[str]:
    """Draw groups, each finished before the next; a task without rewards has mixed ones."""
    names: list[str] = []
    for number in numbers:
        task = await draw.task(number)
        names.append(task.id)
        assert draw.on_result is not None
        draw.on_result(finished(number, task, *rewards.get(task.id, (1.0, 0.0))))
    return names


async def test_what_always_or_never_succeeds_sits_out_so_many_passes_and_comes_back() -> None:
    draw = TaskDraw(tasks_of(4, passes=2), 0)
    names = await play(draw, range(14), {"0-0": (1.0, 1.0), "0-1": (0.0, 0.0)})
    passes = [names[:4], names[4:6], names[6:8], names[8:12], names[12:]]
    assert [sorted(some) for some in passes] == [
        ["0-0", "0-1", "0-2", "0-3"],
        ["0-2", "0-3"],
        ["0-2", "0-3"],
        ["0-0", "0-1", "0-2", "0-3"],
        ["0-2", "0-3"],
    ]
    metrics = draw.metrics()
    assert (metrics["resting_tasks.right"], metrics["resting_tasks.wrong"]) == (1.0, 1.0)
    assert 4 <= metrics["skipped_draws"] <= 6  # those of the fifth pass may still lie ahead


async def test_a_pass_in_which_every_task_sits_out_is_empty() -> None:
    draw = TaskDraw(tasks_of(2, passes=3), 0)
    names = await play(draw, range(4), {"0-0": (1.0, 1.0), "0-1": (0.0, 0.0)})
    assert (sorted(names[:2]), sorted(names[2:])) == (["0-0", "0-1"], ["0-0", "0-1"])
    assert draw.metrics()["skipped_draws"] == 6.0  # both in passes 1 to 3


@pytest.mark.parametrize(
    ("rewards", "success", "sits_out"),
    [
        ((1.0, 1.0), None, True),
        ((0.0, 0.0), None, True),
        ((1.0, 0.0), None, False),
        ((0.2, 0.8), None, False),  # each is a success where the workflow records none, but they differ
        ((0.2, 0.8), 0.0, False),
        ((0.5, 0.5), 0.0, True),
        ((1.0,), None, False),  # one episode says nothing of a pass rate
    ],
)
async def test_only_a_group_that_teaches_nothing_makes_a_task_sit_out(
    rewards: tuple[float, ...], success: float | None, sits_out: bool
) -> None:
    draw = TaskDraw(tasks_of(3, passes=1), 0)
    task = await draw.task(0)
    assert draw.on_result is not None
    draw.on_result(finished(0, task, *rewards, success=success))
    names = [(await draw.task(number)).id for number in range(1, 5)]
    assert (task.id not in names) is sits_out


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
    st.integers(0, 3),
    st.integers(1, 3),
    st.integers(0, 1000),
    st.integers(1, 30),
    st.integers(0, 6),
)
def test_a_resumed_run_draws_what_the_first_process_would_have_drawn(
    sizes: list[int], seed: int, passes: int, luck: int, stop: int, still_open: int
) -> None:
    rewards = [(1.0, 1.0), (0.0, 0.0), (1.0, 0.0)]

    def result(number: int, task: Task) -> Group:
        return finished(number, task, *random.Random(f"{luck} {number} {task.id}").choice(rewards))

    async def check() -> None:
        def opened(resume: DrawState | None = None) -> TaskDraw:
            return TaskDraw(tasks_of(*sizes, passes=passes), seed, resume=resume)

        async def go_on(draw: TaskDraw, numbers: Sequence[int]) -> list[str]:
            names: list[str] = []
            for number in numbers:
                task = await draw.task(number)
                names.append(task.id)
                assert draw.on_result is not None
                draw.on_result(result(number, task))
            return names

        whole = await go_on(opened(), range(40))
        first = opened()
        assert await go_on(first, range(stop)) == whole[:stop]
        again_open = list(range(max(0, stop - still_open), stop))
        again = opened(saved(first, again_open))
        assert again.metrics() == first.metrics()
        assert await go_on(again, [*again_open, *range(stop, 40)]) == [*(whole[n] for n in again_open), *whole[stop:]]

    anyio.run(check)


async def test_a_group_that_runs_again_after_a_resume_replaces_its_result() -> None:
    first = TaskDraw(tasks_of(2, passes=5), 0)
    task = await first.task(0)
    assert first.on_result is not None
    first.on_result(finished(0, task, 1.0, 1.0))
    again = TaskDraw(tasks_of(2, passes=5), 0, resume=saved(first, [0]))
    assert again.metrics()["resting_tasks.right"] == 1.0
    assert (await again.task(0)).id == task.id
    assert again.on_result is not None
    again.on_result(finished(0, task, 1.0, 0.0))
    assert again.metrics()["resting_tasks.right"] == 0.0


async def test_a_run_that_is_resumed_with_or_without_skips_keeps_on_drawing() -> None:
    skipping = TaskDraw(tasks_of(3, passes=1), 0)
    await play(skipping, range(6), {"0-0": (1.0, 1.0)})
    plain = TaskDraw(tasks_of(3, passes=0), 0, resume=saved(skipping, [4, 5]))
    assert plain.on_result is None
    assert plain.state([]) is None
    assert (await plain.task(6)).id in {"0-0", "0-1", "0-2"}
    begun = TaskDraw(tasks_of(3, passes=1), 0, resume=None)
    assert len(set(await play(begun, range(6, 9), {}))) == 3


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {"path": "a", "skip_passes": 1, "curriculum": "agentrl.data.curriculum:MiddleFirst"},
            "set curriculum or skip_passes",
        ),
        ({"path": "a", "skip_passes": -1}, "greater than or equal to 0"),
    ],
)
def test_skips_that_cannot_be_are_refused(fields: dict[str, object], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        TasksConfig.model_validate(fields)


def endless() -> Iterator[dict[str, int]]:
    yield from ({"number": number} for number in itertools.count())


def test_a_source_without_an_end_has_no_passes_to_sit_out() -> None:
    config = TasksConfig(factory=f"{__name__}:endless", skip_passes=2)
    with pytest.raises(ConfigError, match=r"tasks\.skip_passes: endless sources have no passes"):
        load_training(config)
