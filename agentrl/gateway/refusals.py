"""Errors of a call as OpenAI's JSON, with the status that an openai client turns into the right exception.

Invariant: every `AgentRLError` that a call can raise has a status; a message names what is wrong and how to fix it.

- 400: a wrong argument, messages that cannot be rendered, or a conversation that leaves no room (`context_length_exceeded`)
- 404: a model that is not served (`model_not_found`)
- 429: more calls wait than the server holds
- 503: the engine aborted the call, as at a weight update that ends all requests; 504: it took too long; 500: anything else
"""

from __future__ import annotations

from agentrl.errors import (
    AgentRLError,
    EpisodeLimit,
    RequestRejected,
    ServerTimeout,
    ServerUnavailable,
    TokenError,
    WorkflowError,
)


class CallRefused(RequestRejected):
    """A call that is refused before anything is sampled, with OpenAI's code for the reason."""

    def __init__(self, message: str, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(message, status=status)
        self.code = code


def status_of(error: AgentRLError) -> int:
    """Return the HTTP status of an error.

    Example:
        >>> status_of(WorkflowError("n must be at least 1")), status_of(ServerUnavailable("aborted"))
        (400, 503)
    """
    if isinstance(error, RequestRejected):
        return error.status or 400
    if isinstance(error, (WorkflowError, TokenError, EpisodeLimit)):
        return 400
    if isinstance(error, ServerTimeout):
        return 504
    return 503 if isinstance(error, ServerUnavailable) else 500


def code_of(error: AgentRLError) -> str | None:
    """Return OpenAI's code for the reason of an error; None where it has none."""
    if isinstance(error, EpisodeLimit):
        return "context_length_exceeded"
    return error.code if isinstance(error, CallRefused) else None
