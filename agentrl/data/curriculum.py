"""Curricula: the next tasks, chosen by the results that the policy has had on them.

Invariant: a curriculum is a function of the results alone, so a resumed run continues with those of its checkpoint.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol, cast

import msgspec

from agentrl.data.source import find_function
from agentrl.errors import ConfigError
from agentrl.types import Task

MAX_RESULTS: Final = 16
"""Number of recent groups whose results each choice keeps."""


class GroupResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The result of one finished group."""

    group: int
    """Its number."""
    success: float
    """Share of its episodes that succeeded, from 0 to 1."""
    mean_return: float
    """Mean return of its episodes, undiscounted."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A choice of a curriculum: one task, or an endless source, which gives its next task."""

    name: str
    """The id of the task, or the name of the endless source."""
    source: int
    """Number of the source in `tasks.sources`, from 0; 0 where there is one source."""
    task: Task | None
    """None for an endless source."""
    results: tuple[GroupResult, ...]
    """Of the last 16 finished groups of this choice, the oldest first."""

    def success(self, groups: int) -> float | None:
        """Return the mean success of the last `groups` finished groups; None where there is none."""
        last = self.results[-groups:]
        return sum(result.success for result in last) / len(last) if last else None


class Curriculum(Protocol):
    """Weighs choices: a function, or an object that is called, as `tasks.curriculum` names it."""

    def __call__(self, choices: Sequence[Choice]) -> Sequence[float]:
        """Return a weight for each choice: none is negative, and at least one is positive.

        The next group gets a choice with a probability in proportion to its weight times the weight of its source, divided
        by the number of choices of the source. It is called in the event loop before each group, so it must be quick.
        """
        ...


class MiddleFirst:
    """Prefers tasks that the policy sometimes solves: the others have groups with equal returns, which teach nothing.

    The rule: a choice whose mean success over its last `window` groups lies in [`low`, `high`] has weight 1; one that was
    not tried has weight 0.5; any other, too hard or solved, has weight 0.05, so that it is tried again at times.

    Example:
        >>> groups = [GroupResult(group=n, success=s, mean_return=s) for n, s in enumerate((0.0, 0.5, 1.0))]
        >>> MiddleFirst()([Choice(str(n), 0, None, (group,)) for n, group in enumerate(groups)])
        [0.05, 1.0, 0.05]
    """

    MIDDLE: Final = 1.0
    UNTRIED: Final = 0.5
    REST: Final = 0.05

    def __init__(self, *, low: float = 0.2, high: float = 0.8, window: int = 2) -> None:
        if not 0 <= low <= high <= 1 or not 1 <= window <= MAX_RESULTS:
            raise ConfigError(
                f"MiddleFirst: expected 0 <= low <= high <= 1 and window from 1 to {MAX_RESULTS}, got low={low}, "
                f"high={high}, window={window}"
            )
        self._low, self._high, self._window = low, high, window

    def __call__(self, choices: Sequence[Choice]) -> list[float]:
        return [self._weight(choice.success(self._window)) for choice in choices]

    def _weight(self, success: float | None) -> float:
        if success is None:
            return self.UNTRIED
        return self.MIDDLE if self._low <= success <= self._high else self.REST


def load_curriculum(name: str, args: Mapping[str, Any]) -> Curriculum:
    """Return the curriculum that `tasks.curriculum` names."""
    factory = find_function(name, "tasks.curriculum")
    try:
        curriculum = factory(**args) if inspect.isclass(factory) else partial(factory, **args)
        if not inspect.isclass(factory):
            inspect.signature(factory).bind([], **args)
    except ConfigError as error:
        raise ConfigError(f"tasks.curriculum: {error}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"tasks.curriculum: {name}: {error}; check curriculum_args") from error
    if not callable(curriculum):
        raise ConfigError(f"tasks.curriculum: an object of {name} cannot be called with the choices; give it __call__")
    return cast("Curriculum", curriculum)
