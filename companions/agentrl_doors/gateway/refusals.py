"""Errors of calls for their clients: each has a status, OpenAI's code for its reason, and the shape of its dialect.

Every `AgentRLError` that a call can raise has a status, which an openai client turns into the right exception:

- 400: a wrong argument, messages that cannot be rendered, or a conversation that leaves no room (`context_length_exceeded`)
- 404: a model that is not served (`model_not_found`)
- 429: more calls wait than the server holds
- 503: the engine aborted the call, as at a weight update that ends all requests; 504: it took too long; 500: anything else

Invariant: neither the answer nor the log holds the words of an unexpected error, which may be those of a
conversation.
"""

from __future__ import annotations

import logging
from pathlib import Path
from traceback import extract_tb
from typing import Final

from aiohttp import web

from agentrl.errors import (
    AgentRLError,
    EpisodeLimit,
    RequestRejected,
    ServerTimeout,
    ServerUnavailable,
    TokenError,
    WorkflowError,
)
from agentrl.servers.http.errors import error_reply
from agentrl_doors.gateway.dialect import Dialect

_LOGGER: Final = logging.getLogger("agentrl_doors.gateway")


class CallRefused(RequestRejected):
    """A call that is refused before anything is sampled, with OpenAI's code for the reason."""

    def __init__(self, message: str, *, status: int = 400, code: str | None = None, retry_after_s: int = 1) -> None:
        """`retry_after_s` is when a call that is refused with 429 or 503 may be made again."""
        super().__init__(message, status=status)
        self.code = code
        self.retry_after_s = retry_after_s


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


def known_error(error: Exception) -> AgentRLError:
    """Return an error as one that clients may read; for an unexpected one, the log says where it came from."""
    if isinstance(error, AgentRLError):
        return error
    frames = extract_tb(error.__traceback__)
    kind, last = type(error).__name__, frames[-1] if frames else None
    place = "" if last is None else f" at {Path(last.filename).name}, line {last.lineno}"
    steps = " < ".join(f"{Path(each.filename).name}:{each.lineno} {each.name}" for each in reversed(frames[-12:]))
    _LOGGER.error("a call failed by a fault of this server: %s%s (%s)", kind, place, steps)
    return CallRefused(
        f"this server failed on the call by a fault of its own: {kind}{place}; its log has the way there. Please report it",
        status=500,
        code="server_fault",
    )


def refusal_reply(error: Exception, dialect: Dialect) -> web.Response:
    """Return the response to a call that is refused or has failed, in the shape of its dialect."""
    known = known_error(error)
    status = status_of(known)
    reply = error_reply(dialect.refusal(str(known), status=status, code=code_of(known)), status=status)
    if isinstance(known, CallRefused) and "Retry-After" in reply.headers:
        reply.headers["Retry-After"] = str(known.retry_after_s)
    return reply
