"""An error of one rank is the error of all, so no rank continues or waits in an exchange that another has given up."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn, TypeVar

from agentrl import errors

if TYPE_CHECKING:
    from agentrl.trainer.parallel.ranks import Ranks

Result = TypeVar("Result")


def together(ranks: Ranks, action: Callable[[], Result]) -> Result:
    """Return the result of `action`, which every rank must run; the error of the lowest rank is raised on all."""
    results: list[Result] = []
    problem = None
    try:
        results.append(action())
    except errors.AgentRLError as error:
        problem = f"{type(error).__name__}: {error}"
    first = ranks.first_error(problem)
    if first is not None:
        kind, _, message = first.partition(": ")
        raise_named(kind, message)
    return results[0]


def raise_named(kind: str, message: str) -> NoReturn:
    """Raise the error of another process: of the class of `agentrl.errors` that `kind` names, or else `TrainError`."""
    found = getattr(errors, kind, None)
    if isinstance(found, type) and issubclass(found, errors.AgentRLError):
        raise found(message)
    raise errors.TrainError(f"{kind}: {message}")
