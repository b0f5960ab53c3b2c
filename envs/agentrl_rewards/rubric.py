"""A reward of several weighted parts; each part is a metric.

Invariant: with a part that raises or returns no finite number, there is no reward.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeAlias, cast

from agentrl.episode.checks import check_reward
from agentrl.errors import ConfigError
from agentrl.support.concurrency import task_group

RubricPart: TypeAlias = Callable[..., float | Awaitable[float]]
"""Returns a number, mostly 0 to 1; async where it waits for a grader or judge."""


class Rubric:
    """A weighted sum of named parts, all called with the arguments of the rubric; a negative weight makes a penalty.

    `client.reward_final(await rubric.weighted(answer, task))` sets the sum as reward and records each summand by name.

    Example:
        >>> import anyio
        >>> def right(answer: str, task: dict[str, str]) -> float:
        ...     return float(answer == task["answer"])
        >>> async def short(answer: str, task: dict[str, str]) -> bool:
        ...     return len(answer) < 10
        >>> rubric = Rubric(correct=(1.0, right), short=(0.1, short))
        >>> anyio.run(rubric.weighted, "4", {"answer": "4"})
        {'correct': 1.0, 'short': 0.1}
    """

    def __init__(self, **parts: tuple[float, RubricPart]) -> None:
        if not parts:
            raise ConfigError("Rubric: give it at least one part, such as Rubric(correct=(1.0, is_correct))")
        for name, part in parts.items():
            checked = cast("object", part)
            if not (isinstance(checked, tuple) and len(cast("tuple[object, ...]", checked)) == 2 and callable(part[1])):
                raise ConfigError(f"Rubric: {name} must be a weight and a function, got {checked!r:.80}")
            if (
                isinstance(part[0], bool)
                or not isinstance(cast("object", part[0]), (int, float))
                or not math.isfinite(part[0])
            ):
                raise ConfigError(f"Rubric: the weight of {name} must be a finite number, got {part[0]!r}")
        self._parts = parts

    async def __call__(self, *arguments: object, record: Callable[..., object] | None = None) -> float:
        """Return the weighted sum of the parts, all called with `arguments`; a sum that is not finite is a RewardError.

        `record` is called with the unweighted value of each part, by its name; pass `client.record`.
        """
        return math.fsum((await self.weighted(*arguments, record=record)).values())

    async def weighted(self, *arguments: object, record: Callable[..., object] | None = None) -> Mapping[str, float]:
        """Return the summands of the reward, in the order of the parts: each value times its weight."""
        values = await self.parts(*arguments)
        if record is not None:
            record(**values)
        return {name: self._parts[name][0] * value for name, value in values.items()}

    async def parts(self, *arguments: object) -> Mapping[str, float]:
        """Return the unweighted value of each part; async parts run at the same time."""
        values: dict[str, float] = dict.fromkeys(self._parts, 0.0)

        async def evaluate(name: str, function: RubricPart) -> None:
            value = function(*arguments)
            values[name] = check_reward(await value if inspect.isawaitable(value) else value, f"Rubric.{name}")

        async with task_group() as tasks:
            for name, (_, function) in self._parts.items():
                tasks.start_soon(evaluate, name, function)
        return values
