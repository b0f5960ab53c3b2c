"""The order in which a run draws its tasks.

Invariant: without a curriculum the task of a group depends on the sources, the seed, `tasks.shuffle` and the number of the
group alone, and each pass over a source that ends draws each task once. With one, or with `tasks.skip_passes`, it depends on
the results, too.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal

import anyio.to_thread
import msgspec

from agentrl.data.curriculum import MAX_RESULTS, Choice, Curriculum, GroupResult
from agentrl.data.digest import StreamDigest, TaskDigest
from agentrl.data.load import TrainingTasks
from agentrl.data.skips import PassSkips, Rest, TaskPlace
from agentrl.data.stream import TaskStream, stream_task
from agentrl.episode.summary import is_success
from agentrl.errors import ConfigError, RunStopped
from agentrl.types import Group, Task


class DrawState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The part of a checkpoint that belongs to a draw by results."""

    places: dict[int, TaskPlace]
    """Of the open groups, by their number."""
    results: dict[str, tuple[GroupResult, ...]]
    """Of the finished groups, by the name of the choice of a curriculum."""
    by: Literal["curriculum", "passes"] = "curriculum"
    """What drew: a curriculum, or passes that tasks sit out (`tasks.skip_passes`)."""
    skipped: dict[int, int] = {}
    """Draws that passes left out, by the number of the source."""
    rests: dict[int, Rest] = {}
    """Of tasks that sit out passes, by the number of the group that was the reason."""


class TaskDraw:
    """Draws the task of each group; `resume` and `digest` come from an earlier process."""

    def __init__(
        self,
        tasks: TrainingTasks,
        seed: int,
        *,
        shuffle: bool = True,
        resume: DrawState | None = None,
        digest: TaskDigest | None = None,
    ) -> None:
        self._sources, self._seed = tasks.sources, seed
        self._orders = {
            number: TaskOrder(source.tasks, seed, shuffle=shuffle, label=f" {number}" if number else "")
            for number, source in enumerate(tasks.sources)
            if isinstance(source.tasks, tuple)
        }
        self._finite = tasks.digest()
        endless = [number for number in range(len(tasks.sources)) if number not in self._orders]
        before = [] if digest is None else digest.streams[: len(endless)]
        before = [*before, *(StreamDigest() for _ in endless[len(before) :])]
        self._streams = dict(zip(endless, before, strict=True))
        self._schedule = WeightedSchedule([source.weight for source in tasks.sources])
        by = None if resume is None else resume.by
        chosen, skips = resume if by == "curriculum" else None, resume if by == "passes" else None
        self._chooser = None if tasks.curriculum is None else _Chooser(tasks, tasks.curriculum, seed, chosen)
        self._skips = _open_skips(tasks, self._orders, skips)

    async def task(self, number: int) -> Task:
        """Return the task of group `number`; it is RunStopped where the source or the curriculum fails.

        Cancellation: a call of a source that blocks is left behind in its thread; the group has no task.
        """
        drawn = {source: digest.drawn for source, digest in self._streams.items()}
        if self._chooser is not None:
            place = self._chooser.place(number, drawn)
        else:
            scheduled = self._schedule[number]
            place = scheduled if self._skips is None else self._skips.place(number, scheduled)
        source = self._sources[place.source]
        if isinstance(source.tasks, tuple):
            return self._orders[place.source][place.draw] if self._chooser is None else source.tasks[place.draw]
        task = await _made(source.tasks, place.draw, source.name)
        digest = self._streams[place.source]
        if place.draw == digest.drawn:
            self._streams[place.source] = digest.with_task(task)
        return task

    @property
    def on_result(self) -> Callable[[Group], None] | None:
        """Takes the result of each finished group; None where results have no say."""
        by_results = self._chooser or self._skips
        return None if by_results is None else by_results.finished

    def metrics(self) -> dict[str, float]:
        """Return what `step` lines say of the draw."""
        return {} if self._skips is None else self._skips.metrics()

    def digest(self) -> TaskDigest:
        return msgspec.structs.replace(self._finite, streams=tuple(self._streams.values()))

    def state(self, open_groups: Collection[int]) -> DrawState | None:
        """Return the part of a checkpoint; a curriculum forgets the results of the open groups, because these run again."""
        if self._skips is not None:
            places, skipped, rests = self._skips.saved(open_groups)
            return DrawState(places=places, results={}, by="passes", skipped=skipped, rests=rests)
        return None if self._chooser is None else self._chooser.state(open_groups)


class TaskOrder:
    """The tasks of a source that ends, pass after pass; `label` gives several sources orders of their own.

    Example:
        >>> order = TaskOrder([Task(id=i, data={}) for i in "ab"], seed=0)
        >>> sorted(order[number].id for number in (2, 3)), order[5] is order[5]
        (['a', 'b'], True)
    """

    def __init__(self, tasks: Sequence[Task], seed: int, *, shuffle: bool = True, label: str = "") -> None:
        self._tasks = tuple(tasks)
        self._seed, self._shuffle, self._label = seed, shuffle, label
        self._pass, self._shuffled = -1, list(self._tasks)

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, number: int) -> Task:
        wanted, at = divmod(number, len(self._tasks))
        if wanted != self._pass:
            self._pass, self._shuffled = wanted, list(self._tasks)
            if self._shuffle:
                random.Random(f"task order{self._label} {self._seed} {wanted}").shuffle(self._shuffled)
        return self._shuffled[at]


class WeightedSchedule:
    """The source of each group: always the one that is furthest behind its share; only the ratios of the weights count.

    Example:
        >>> schedule = WeightedSchedule([3.0, 1.0])
        >>> [schedule[number].source for number in range(8)]
        [0, 0, 1, 0, 0, 0, 1, 0]
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self._shares = [weight / math.fsum(weights) for weight in weights]
        self._counts = [0] * len(weights)
        self._places: list[TaskPlace] = []

    def __getitem__(self, number: int) -> TaskPlace:
        while len(self._places) <= number:
            due = [share * (len(self._places) + 1) - count for share, count in zip(self._shares, self._counts, strict=True)]
            source = due.index(max(due))
            self._places.append(TaskPlace(source, self._counts[source]))
            self._counts[source] += 1
        return self._places[number]


class _Chooser:
    def __init__(self, tasks: TrainingTasks, curriculum: Curriculum, seed: int, resume: DrawState | None) -> None:
        self._curriculum, self._seed = curriculum, seed
        self._choices: list[Choice] = []
        self._shares: list[float] = []
        self._places: list[TaskPlace] = []
        for number, source in enumerate(tasks.sources):
            found = source.tasks if isinstance(source.tasks, tuple) else (None,)
            for index, task in enumerate(found):
                self._choices.append(Choice(source.name if task is None else task.id, number, task, ()))
                self._places.append(TaskPlace(number, index))
                self._shares.append(source.weight / len(found))
        self._position = {choice.name: position for position, choice in enumerate(self._choices)}
        self._chosen: dict[int, TaskPlace] = {}
        if resume is not None:
            self._chosen = dict(resume.places)
            for name, results in resume.results.items():
                if name in self._position:  # not so after --accept-changed-tasks
                    self._set_results(name, results)

    def place(self, number: int, drawn: Mapping[int, int]) -> TaskPlace:
        if number not in self._chosen:
            generator = random.Random(f"task choice {self._seed} {number}")
            [position] = generator.choices(range(len(self._choices)), self._weights())
            place = self._places[position]
            self._chosen[number] = TaskPlace(place.source, drawn[place.source]) if place.source in drawn else place
        return self._chosen[number]

    def finished(self, group: Group) -> None:
        place = self._chosen[group.index]
        by_source = next(choice for choice in self._choices if choice.source == place.source)
        name = by_source.name if by_source.task is None else group.task.id
        count = len(group.episodes)
        result = GroupResult(
            group=group.index,
            success=sum(map(is_success, group.episodes)) / count,
            mean_return=math.fsum(episode.episode_return for episode in group.episodes) / count,
        )
        self._set_results(name, (*self._choices[self._position[name]].results, result)[-MAX_RESULTS:])

    def state(self, open_groups: Collection[int]) -> DrawState:
        open_now = frozenset(open_groups)
        kept = {
            choice.name: tuple(result for result in choice.results if result.group not in open_now)
            for choice in self._choices
            if choice.results
        }
        places = {number: place for number, place in self._chosen.items() if number in open_now}
        return DrawState(places=places, results={name: results for name, results in kept.items() if results})

    def _set_results(self, name: str, results: tuple[GroupResult, ...]) -> None:
        at = self._position[name]
        choice = self._choices[at]
        self._choices[at] = Choice(choice.name, choice.source, choice.task, results)

    def _weights(self) -> list[float]:
        name = getattr(self._curriculum, "__qualname__", type(self._curriculum).__qualname__)
        try:
            weights = [float(weight) for weight in self._curriculum(tuple(self._choices))]
        except (Exception, SystemExit) as error:
            raise RunStopped(f"tasks.curriculum: {name} raised {type(error).__name__}: {error}") from error
        if len(weights) != len(self._choices):
            raise RunStopped(
                f"tasks.curriculum: {name} returned {len(weights)} weights for {len(self._choices)} choices; return one each"
            )
        if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or not any(weights):
            raise RunStopped(
                f"tasks.curriculum: {name} must return finite weights of at least 0, of which one is positive, got "
                f"{weights!r:.200}"
            )
        return [weight * share for weight, share in zip(weights, self._shares, strict=True)]


def _open_skips(tasks: TrainingTasks, orders: Mapping[int, TaskOrder], resume: DrawState | None) -> PassSkips | None:
    if not tasks.skip_passes:
        return None
    before = resume or DrawState(places={}, results={})
    return PassSkips(orders, tasks.skip_passes, places=before.places, skipped=before.skipped, rests=before.rests)


async def _made(stream: TaskStream, index: int, name: str) -> Task:
    try:
        return await anyio.to_thread.run_sync(stream_task, stream, index, name, abandon_on_cancel=True)
    except ConfigError as error:
        raise RunStopped(str(error)) from error
