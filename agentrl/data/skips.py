"""Tasks that sit out passes over their source, because the policy always or never succeeds at them.

Invariant: which task a group gets follows from the number of the group and the results that were known when it was drawn.
Both are in a checkpoint, so a resumed run draws what the first process would have drawn.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple, Protocol

import msgspec

from agentrl.algo.group_slots import returns_differ
from agentrl.episode.summary import is_success
from agentrl.types import Group, Task


class TaskPlace(NamedTuple):
    """The place in the sources from which the task of a group comes."""

    source: int
    """Number of the source, from 0."""
    draw: int
    """Position in the draws of the source; with a curriculum, in the tasks of a source that ends."""


class Rest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A task that sits out passes over its source, after a group that taught nothing."""

    task_id: str
    source: int
    until: int
    """The last pass that it sits out, from 0."""
    solved: bool
    """Whether every episode of the group succeeded; false: none did."""


class Order(Protocol):
    """The tasks of a source that ends, pass after pass."""

    def __getitem__(self, number: int, /) -> Task: ...

    def __len__(self) -> int:
        """Return the number of tasks of a pass."""
        ...


class PassSkips:
    """Draws in the order of the passes, without the tasks that sit out.

    Args:
        orders: of the sources that end, by their number.
        passes: that a task sits out.
        places: of open groups, from a checkpoint.
        skipped: draws that were left out, by the number of the source, from a checkpoint.
        rests: by the number of the group that was the reason, from a checkpoint.
    """

    def __init__(
        self,
        orders: Mapping[int, Order],
        passes: int,
        *,
        places: Mapping[int, TaskPlace],
        skipped: Mapping[int, int],
        rests: Mapping[int, Rest],
    ) -> None:
        self._orders, self._passes = orders, passes
        self._chosen = dict(places)
        self._skipped = dict.fromkeys(orders, 0) | {source: count for source, count in skipped.items() if source in orders}
        self._current = dict.fromkeys(orders, 0)
        """The pass of the last new draw, by source."""
        self._rests = dict(rests)
        self._until: dict[str, int] = {}
        for rest in self._rests.values():
            self._until[rest.task_id] = max(rest.until, self._until.get(rest.task_id, -1))

    def place(self, number: int, scheduled: TaskPlace) -> TaskPlace:
        """Return the place of group `number`, which has this one where no task sits out."""
        order = self._orders.get(scheduled.source)
        if number in self._chosen or order is None:
            return self._chosen.get(number, scheduled)
        draw = scheduled.draw + self._skipped[scheduled.source]
        while self._until and self._until.get(order[draw].id, -1) >= draw // len(order):
            draw += 1
        self._skipped[scheduled.source] = draw - scheduled.draw
        self._current[scheduled.source] = draw // len(order)
        self._chosen[number] = TaskPlace(scheduled.source, draw)
        return self._chosen[number]

    def finished(self, group: Group) -> None:
        """Take the result of a group; a group that runs again after a resume replaces its former result."""
        before = self._rests.pop(group.index, None)
        place = self._chosen.get(group.index)
        if place is not None and _teaches_nothing(group):
            until = place.draw // len(self._orders[place.source]) + self._passes
            solved = is_success(group.episodes[0])
            self._rests[group.index] = Rest(task_id=group.task.id, source=place.source, until=until, solved=solved)
        if before is not None or group.index in self._rests:
            own = [rest.until for rest in self._rests.values() if rest.task_id == group.task.id]
            self._until[group.task.id] = max(own, default=-1)

    def saved(self, open_groups: Collection[int]) -> tuple[dict[int, TaskPlace], dict[int, int], dict[int, Rest]]:
        """Return places, skipped draws and rests for a checkpoint."""
        places = {number: self._chosen[number] for number in sorted(open_groups) if number in self._chosen}
        return places, dict(self._skipped), dict(self._resting())

    def metrics(self) -> dict[str, float]:
        """Return the skipped draws of the run, and how many tasks sit out the present pass, by outcome."""
        outcomes = {rest.task_id: rest.solved for rest in self._resting().values()}
        solved = sum(outcomes.values())
        resting = {"resting_tasks.right": float(solved), "resting_tasks.wrong": float(len(outcomes) - solved)}
        return {"skipped_draws": float(sum(self._skipped.values())), **resting}

    def _resting(self) -> dict[int, Rest]:
        """Return the rests that are not over, and forget the others."""
        self._rests = {
            number: rest for number, rest in sorted(self._rests.items()) if rest.until >= self._current.get(rest.source, 0)
        }
        return self._rests


def _teaches_nothing(group: Group) -> bool:
    """Return whether all episodes of a group, or none, succeed, and with equal returns."""
    successes = sum(map(is_success, group.episodes))
    all_alike = len(group.episodes) > 1 and successes in (0, len(group.episodes))
    return all_alike and not returns_differ(group)
