"""Routes that no policy answers, such as embeddings: their requests go to the endpoint that a run names, as they are.

Invariant: a request has the endpoint's own answer, whatever its status, or an error that says what is missing. None outlives
the door; none is a turn.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final

import aiohttp
import anyio
from aiohttp import web

from agentrl.client import OtherModel
from agentrl.servers.http.errors import decode_body, json_bytes
from agentrl_doors.gateway.refusals import CallRefused

ENDPOINT_ROUTES: Final = ("completions", "embeddings")
_TIMEOUT: Final = aiohttp.ClientTimeout(total=None, sock_connect=30.0, sock_read=600.0)
"""Of an endpoint that is silent."""
_KEPT_HEADERS: Final = ("Content-Type", "Retry-After")


class EndpointRoutes:
    """Passes the requests of one episode on.

    Args:
        http: makes the requests.
        other: the endpoint, and its models.
        key: of the endpoint.
    """

    def __init__(self, http: aiohttp.ClientSession, other: OtherModel, key: str) -> None:
        self._http, self._other = http, other
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        self._running: set[anyio.CancelScope] = set()

    def close(self) -> None:
        """End the requests that still run."""
        for scope in self._running:
            scope.cancel()

    async def answer(self, request: web.Request, route: str) -> web.StreamResponse:
        """Answer a request by what the endpoint answers; the name of the model becomes the endpoint's.

        Raises:
            CallRefused: the body is no JSON object, the endpoint cannot be reached (502), or the episode has ended (410).
        """
        body = decode_body(await request.read(), dict[str, object])
        is_embedding = route == "embeddings" and self._other.embeddings is not None
        body["model"] = self._other.embeddings if is_embedding else self._other.model
        response = None
        with anyio.CancelScope() as scope:
            self._running.add(scope)
            try:
                async with self._asked(route, body) as given:
                    response = web.StreamResponse(status=given.status, headers=_kept(given))
                    await response.prepare(request)
                    async for piece in given.content.iter_any():
                        await response.write(piece)
                    await response.write_eof()
            finally:
                self._running.discard(scope)
        if response is None:
            raise CallRefused("the episode has ended, and with it this call", status=410)
        return response

    @asynccontextmanager
    async def _asked(self, route: str, body: dict[str, object]) -> AsyncGenerator[aiohttp.ClientResponse]:
        url = f"{self._other.base_url.rstrip('/')}/{route}"
        try:
            given = await self._http.post(url, data=json_bytes(body), headers=self._headers, timeout=_TIMEOUT)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise CallRefused(
                f"the endpoint of side_calls.answer did not answer POST /{route}: {type(error).__name__}; see that it runs",
                status=502,
            ) from None
        async with given:
            yield given


def unanswered_route(route: str, *, is_replay: bool) -> CallRefused:
    """Return the refusal of a request that no endpoint gets."""
    if is_replay:
        return CallRefused(f"a replay has no answers of POST /{route}, which are not recorded", status=404)
    return CallRefused(
        f"POST /{route} is not answered by the policy: name an endpoint that does in the workflow of the run file, "
        "`side_calls: {answer: {base_url: ..., model: ...}}`",
        status=404,
    )


def _kept(given: aiohttp.ClientResponse) -> dict[str, str]:
    return {name: given.headers[name] for name in _KEPT_HEADERS if name in given.headers}
