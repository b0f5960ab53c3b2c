"""The part of `AsyncOpenAI` that an episode's client inherits and does not use: one shared, refusing HTTP client.

Invariant: an episode's client never opens a connection; every endpoint but chat completions raises an error that names
what is served.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NoReturn

import openai
from openai import AsyncOpenAI

from agentrl.errors import ServerTimeout, WorkflowError

BASE_URL = "http://agentrl.invalid/v1"
SERVED = "an episode's client serves chat.completions.create (also stream=True and with_raw_response) and generate"


class CallTimeout(ServerTimeout, openai.APITimeoutError):
    """The deadline a model call was given as `timeout` has passed; the call recorded nothing.

    It is an `openai.APITimeoutError` too, so agents written for the OpenAI API can catch and retry it.
    """

    def __init__(self, message: str, *, status: int | None = None, url: str | None = None) -> None:
        ServerTimeout.__init__(self, message, status=status, url=url)
        self.message = message
        self.request = _http_client().build_request("POST", f"{BASE_URL}/chat/completions")
        self.body, self.code, self.param, self.type = None, None, None, None


def timed_out(episode_id: str, timeout_s: float) -> str:
    """Return the message of a `CallTimeout`."""
    return f"episode {episode_id}: no completion within the call's timeout of {timeout_s:g} s"


def refuse(what: str) -> NoReturn:
    """Raise `WorkflowError`, saying that `what` is not served and what is."""
    raise WorkflowError(f"{what} is not served; {SERVED}")


class _RefusingTransport:
    """Stands where a connection pool would; reached only by code that goes around the client."""

    async def handle_async_request(self, request: object) -> NoReturn:
        refuse(f"{request!r}")

    async def aclose(self) -> None: ...

    async def __aenter__(self) -> _RefusingTransport:
        return self

    async def __aexit__(self, *details: object) -> None: ...


@functools.cache
def _http_client() -> Any:  # noqa: ANN401 - an httpx or httpx2 client, by the openai version
    transport: Any = _RefusingTransport()
    return openai.DefaultAsyncHttpxClient(transport=transport, trust_env=False)


@functools.cache
def shared_attributes() -> Mapping[str, object]:
    """Return the attributes a fresh `AsyncOpenAI` has: a client that copies them is one, at no cost per episode."""
    client = AsyncOpenAI(api_key="agentrl", base_url=BASE_URL, max_retries=0, timeout=None, http_client=_http_client())
    return dict(vars(client))


class RawResponse:
    """What `with_raw_response` returns: the parsed object behind an HTTP-like face."""

    status_code = 200
    retries_taken = 0

    def __init__(self, parsed: object, request_id: str) -> None:
        self._parsed = parsed
        self.request_id = request_id
        self.headers: dict[str, str] = {"content-type": "application/json", "x-request-id": request_id}

    def parse(self, *, to: type | None = None) -> Any:  # noqa: ANN401 - mirrors the openai class
        """Return the completion or stream."""
        if to is not None and not isinstance(self._parsed, to):
            refuse(f"parse(to={to.__name__})")
        return self._parsed
