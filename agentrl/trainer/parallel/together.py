"""An error of one rank is the error of all, so no rank continues or waits in an exchange that another has given up."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from agentrl.errors import AgentRLError, TrainError, error_named

if TYPE_CHECKING:
    from agentrl.trainer.parallel.ranks import Ranks

Result = TypeVar("Result")


def together(ranks: Ranks, action: Callable[[], Result]) -> Result:
    """Return the result of `action`, which every rank must run; the error of the lowest rank is raised on all."""
    results: list[Result] = []
    problem = None
    try:
        results.append(action())
    except AgentRLError as error:
        problem = f"{type(error).__name__}: {error}"
    first = ranks.first_error(problem)
    if first is not None:
        kind, _, message = first.partition(": ")
        raise trainer_error(kind, message)
    return results[0]


def trainer_error(kind: str, message: str) -> AgentRLError:
    """Return the error that another process of the trainer names; a `TrainError` if agentrl does not have it."""
    return error_named(kind, message) or TrainError(f"{kind}: {message}")
