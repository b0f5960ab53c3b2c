"""The order in which a run draws its tasks: by seed, by weight, from endless sources and by a curriculum."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from functools import partial

import anyio
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.data.curriculum import Choice, Curriculum, GroupResult, MiddleFirst, load_curriculum
from agentrl.data.digest import TaskDigest
from agentrl.data.draw import DrawState, TaskDraw, TaskOrder, WeightedSchedule
from agentrl.data.load import OpenSource, TrainingTasks
from agentrl.data.source import OpenedSource
from agentrl.data.stream import IteratedStream
from agentrl.errors import ConfigError, RunStopped
from agentrl.types import Group, StopReason, Task, Trajectory


def listed(count: int, prefix: str = "") -> tuple[Task, ...]:
    return tuple(Task(id=f"{prefix}{number}", data={"number": number}) for number in range(count))


def counted(prefix: str = "e") -> IteratedStream:
    return IteratedStream(prefix, lambda: (Task(id=f"{prefix}{number}", data={}) for number in itertools.count()))


def training(*tasks: OpenedSource, weights: Sequence[float] = (), curriculum: Curriculum | None = None) -> TrainingTasks:
    shares = weights or [1.0] * len(tasks)
    sources = tuple(
        OpenSource(f"source {n}", each, share) for n, (each, share) in enumerate(zip(tasks, shares, strict=True))
    )
    return TrainingTasks(sources, curriculum)


async def drawn(draw: TaskDraw, numbers: Sequence[int]) -> list[str]:
    return [(await draw.task(number)).id for number in numbers]


def finished(index: int, task: Task, *rewards: float) -> Group:
    """Return a group with an episode for each reward."""
    episodes = tuple(
        Trajectory(
            episode_id=f"{index}.{member}",
            task_id=task.id,
            turns=(),
            stop_reason=StopReason.COMPLETED,
            final_reward=reward,
        )
        for member, reward in enumerate(rewards)
    )
    return Group(index=index, task=task, episodes=episodes, admitted_version=0)


def result(success: float, group: int = 0) -> GroupResult:
    return GroupResult(group=group, success=success, mean_return=success)


def saved(draw: TaskDraw, open_groups: Sequence[int]) -> DrawState | None:
    """Return the state of a draw as a checkpoint gives it back."""
    return msgspec.json.decode(msgspec.json.encode(draw.state(open_groups)), type=DrawState | None)


def test_tasks_that_are_not_shuffled_are_drawn_in_their_own_order_in_every_pass() -> None:
    tasks = listed(5)
    own, shuffled = TaskOrder(tasks, 0, shuffle=False), TaskOrder(tasks, 0)
    assert [own[number].id for number in range(10)] == [task.id for task in tasks] * 2
    assert [shuffled[number].id for number in range(5)] != [task.id for task in tasks]


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=3),
    st.integers(0, 3),
    st.integers(1, 12),
    st.sets(st.integers(0, 11), max_size=4),
)
def test_a_resumed_run_draws_what_one_run_would_have_drawn(
    sizes: list[int], seed: int, admitted: int, reopened: set[int]
) -> None:
    def tasks() -> TrainingTasks:
        sources = [listed(size, f"{n}-") if size else counted(f"{n}-") for n, size in enumerate(sizes)]
        return training(*sources, weights=[1.0 + n for n in range(len(sources))])

    async def check() -> None:
        whole = await drawn(TaskDraw(tasks(), seed), range(20))
        first = TaskDraw(tasks(), seed)
        await drawn(first, range(admitted))
        numbers = [*sorted(number for number in reopened if number < admitted), *range(admitted, 20)]
        again = TaskDraw(tasks(), seed, resume=saved(first, ()), digest=first.digest())
        assert await drawn(again, numbers) == [whole[number] for number in numbers]
        every = TaskDraw(tasks(), seed)
        await drawn(every, range(20))
        assert again.digest() == every.digest()

    anyio.run(check)


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=5))
def test_the_sources_of_a_schedule_are_drawn_in_proportion_to_their_weights(weights: list[float]) -> None:
    schedule = WeightedSchedule(weights)
    places = [schedule[number] for number in range(200)]
    for source, weight in enumerate(weights):
        draws = [place.draw for place in places if place.source == source]
        assert draws == list(range(len(draws)))
        assert abs(len(draws) - 200 * weight / sum(weights)) < len(weights)


async def test_the_digest_of_endless_sources_covers_what_was_drawn() -> None:
    tasks = training(listed(2), counted())
    draw = TaskDraw(tasks, 0)
    await drawn(draw, range(60))
    digest = msgspec.json.decode(msgspec.json.encode(draw.digest()), type=TaskDigest)
    numbers = [stream.drawn for stream in digest.streams]
    assert numbers == [30]
    assert training(listed(2), counted()).digest(numbers).difference(digest) is None
    changed = training(listed(2), counted("other"))
    assert changed.digest(numbers).difference(digest) == "endless source 1 gives other tasks than before"
    assert training(listed(2)).digest(numbers).difference(digest) == "0 endless sources instead of 1"


async def test_an_iterator_is_read_only_as_far_as_tasks_are_drawn_and_starts_again_for_an_earlier_one() -> None:
    starts = made = 0

    def numbers() -> itertools.count[int]:
        nonlocal starts
        starts += 1
        return itertools.count()

    def task(number: int) -> Task:
        nonlocal made
        made += 1
        return Task(id=str(number), data={})

    draw = TaskDraw(training(IteratedStream("numbers", lambda: map(task, numbers()))), 0)
    assert await drawn(draw, [5, 6, 7]) == ["5", "6", "7"]
    assert (starts, made) == (1, 8)
    assert await drawn(draw, [2, 9]) == ["2", "9"]
    assert (starts, made) == (2, 18)


def test_an_iterator_that_ends_starts_again_and_one_that_changes_is_an_error() -> None:
    lengths = iter([3, 2])
    stream = IteratedStream("words", lambda: iter(listed(next(lengths))))
    with pytest.raises(ConfigError, match="words ended after 2 tasks and had 3 before"):
        [stream.task(index) for index in range(6)]
    with pytest.raises(ConfigError, match="words holds no tasks"):
        IteratedStream("words", lambda: iter(())).task(0)


class Blocked:
    """A stream that blocks until it is let go, and then fails."""

    def __init__(self) -> None:
        self.let_go, self.threads = threading.Event(), list[int]()

    def task(self, index: int) -> Task:
        self.threads.append(threading.get_ident())
        self.let_go.wait(10)
        raise OSError(f"no task {index}")


async def test_a_source_that_blocks_does_so_in_a_thread_and_its_failure_names_it() -> None:
    stream = Blocked()
    draw = TaskDraw(training(stream), 0)
    with anyio.move_on_after(0.05) as scope:
        await draw.task(0)
    assert scope.cancelled_caught
    stream.let_go.set()
    with pytest.raises(RunStopped, match=r"source 0.task\(0\) raised OSError: no task 0"):
        await draw.task(0)
    assert threading.get_ident() not in stream.threads


def weigh(choices: Sequence[Choice], *, values: Sequence[float]) -> Sequence[float]:
    """Weigh by a list that the run file gives."""
    return [values[position] for position in range(len(choices))] if len(values) > 1 else values


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([1.0], "returned 1 weights for 3 choices; return one each"),
        ([0.0, 0.0, 0.0], "finite weights of at least 0, of which one is positive"),
        ([1.0, -1.0, 0.0], "finite weights of at least 0"),
        ([1.0, float("nan"), 0.0], "finite weights of at least 0"),
        ([1.0, 2.0], "raised IndexError"),
    ],
)
async def test_a_curriculum_that_cannot_be_used_ends_the_run_with_its_name(weights: list[float], expected: str) -> None:
    curriculum = load_curriculum(f"{__name__}:weigh", {"values": weights})
    draw = TaskDraw(training(listed(3), curriculum=curriculum), 0)
    with pytest.raises(RunStopped, match=rf"tasks\.curriculum: .*{expected}"):
        await draw.task(0)


@pytest.mark.parametrize(
    ("name", "args", "expected"),
    [
        ("agentrl.data.curriculum:MiddleFirst", {"low": 0.9, "high": 0.1}, "expected 0 <= low <= high <= 1"),
        ("agentrl.data.curriculum:MiddleFirst", {"lower": 0.9}, "check curriculum_args"),
        (f"{__name__}:weigh", {}, "missing a required argument: 'values'; check curriculum_args"),
        ("agentrl.data.curriculum:Nothing", {}, r"tasks\.curriculum: module agentrl\.data\.curriculum has no 'Nothing'"),
        ("agentrl.data.curriculum:Choice", {"name": "", "source": 0, "task": None, "results": ()}, "cannot be called"),
    ],
)
def test_a_curriculum_that_cannot_be_loaded_is_explained(name: str, args: dict[str, object], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        load_curriculum(name, args)


def test_middle_first_prefers_what_is_sometimes_solved_over_the_last_two_groups() -> None:
    def choice(*successes: float) -> Choice:
        return Choice("name", 0, None, tuple(map(result, successes)))

    tried = [choice(), choice(0.5), choice(0.0), choice(1.0), choice(0.0, 0.2, 0.2), choice(0.5, 1.0, 1.0), choice(0.0, 1.0)]
    assert MiddleFirst()(tried) == [0.5, 1.0, 0.05, 0.05, 1.0, 0.05, 1.0]
    assert MiddleFirst(low=0.0, high=0.0, window=1)(tried)[2] == 1.0


async def test_a_curriculum_draws_more_of_what_is_sometimes_solved() -> None:
    tasks = listed(4)
    draw = TaskDraw(training(tasks, curriculum=MiddleFirst()), 7)
    take = draw.on_result
    assert take is not None
    counts = dict.fromkeys("0123", 0)
    for number in range(400):
        task = await draw.task(number)
        counts[task.id] += 1
        take(finished(number, task, *((1.0, 0.0) if task.id == "2" else (0.0, 0.0))))
    assert counts["2"] > 300
    assert min(counts.values()) > 2


async def play(draw: TaskDraw, numbers: Sequence[int]) -> list[str]:
    """Draw groups, each finished before the next, with a result that depends on the number of the group."""
    names: list[str] = []
    for number in numbers:
        task = await draw.task(number)
        names.append(task.id)
        assert draw.on_result is not None
        draw.on_result(finished(number, task, float(number % 3 == 0), 0.0))
    return names


@pytest.mark.parametrize("endless", [False, True])
async def test_a_resumed_curriculum_continues_with_its_results_and_its_open_groups(endless: bool) -> None:
    tasks = partial(training, *([counted("a"), counted("b")] if endless else [listed(6)]), curriculum=MiddleFirst())
    whole = await play(TaskDraw(tasks(), 3), range(40))
    first = TaskDraw(tasks(), 3)
    assert await play(first, range(20)) == whole[:20]
    again = TaskDraw(tasks(), 3, resume=saved(first, ()), digest=first.digest())
    assert await play(again, range(20, 40)) == whole[20:]
    state = first.state([18, 19])
    assert state is not None
    assert all(group.group < 18 for results in state.results.values() for group in results)
    reopened = TaskDraw(tasks(), 3, resume=saved(first, [18, 19]), digest=first.digest())
    assert await play(reopened, range(18, 40)) == whole[18:]
