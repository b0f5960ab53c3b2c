"""How an exception becomes one message for people."""

from __future__ import annotations

from agentrl.errors import AgentRLError
from agentrl.watchdog.signals import interrupt_text


def first_agentrl_error(error: BaseException) -> AgentRLError | None:
    """Return the first agentrl error inside an exception or exception group; None if there is none."""
    if isinstance(error, AgentRLError):
        return error
    if isinstance(error, BaseExceptionGroup):
        return next((found for inner in error.exceptions if (found := first_agentrl_error(inner)) is not None), None)
    return None


def describe_error(error: BaseException) -> str:
    """Return one message for an exception, whatever groups wrap it."""
    if isinstance(error, KeyboardInterrupt):
        return interrupt_text(error)
    found = first_agentrl_error(error)
    return str(found) if found is not None else f"{type(error).__name__}: {error}"
