"""The client without a connection: what stands where openai's HTTP client would, and what it refuses.

Invariant: nothing here opens a socket.
"""

from __future__ import annotations

import functools
from typing import Any, NoReturn

import openai

from agentrl.errors import ServerTimeout, WorkflowError

BASE_URL = "http://agentrl.invalid/v1"
_SERVED = "an episode's client serves chat.completions.create (also stream=True and with_raw_response), parse and generate"


class CallTimeout(ServerTimeout, openai.APITimeoutError):
    """The deadline that a model call was given as `timeout` has passed; what it had sampled is a turn.

    It is an `openai.APITimeoutError` too, so agents written for the OpenAI API can catch and retry it.
    """

    def __init__(self, message: str, *, status: int | None = None, url: str | None = None) -> None:
        ServerTimeout.__init__(self, message, status=status, url=url)
        self.message = message
        self.request = offline_http_client().build_request("POST", f"{BASE_URL}/chat/completions")
        self.body, self.code, self.param, self.type = None, None, None, None


def call_timeout(episode_id: str, timeout_s: float, *, is_recorded: bool = False) -> CallTimeout:
    """Return the error of a call whose `timeout` has passed."""
    return _timeout(f"episode {episode_id}: no completion within the call's timeout of {timeout_s:g} s", is_recorded)


def left_running(episode_id: str) -> CallTimeout:
    """Return the error of a call that ran when the workflow returned, which is no failure."""
    return _timeout(f"episode {episode_id}: the workflow has returned, which ends the calls that run", True)


def _timeout(message: str, is_recorded: bool) -> CallTimeout:
    error = CallTimeout(message)
    error.is_recorded = is_recorded
    return error


def not_served(what: str) -> NoReturn:
    """Raise `WorkflowError`: `what` is not served; the message names what is."""
    raise WorkflowError(f"{what} is not served; {_SERVED}")


class _RefusingTransport:
    """Stands where a connection pool would; only code that bypasses the client reaches it."""

    async def handle_async_request(self, request: object) -> NoReturn:
        not_served(f"{request!r}")

    async def aclose(self) -> None: ...

    async def __aenter__(self) -> _RefusingTransport:
        return self

    async def __aexit__(self, *details: object) -> None: ...


@functools.cache
def offline_http_client() -> Any:  # noqa: ANN401 - an httpx or httpx2 client, by the openai version
    """Return the HTTP client of all episodes; it has no connections."""
    transport: Any = _RefusingTransport()
    return openai.DefaultAsyncHttpxClient(transport=transport, trust_env=False)
