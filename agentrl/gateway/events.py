"""Server-sent events as OpenAI streams them.

Invariant: a stream that has begun ends with `[DONE]`, or with an error event; a failure before the first event is a whole
response with its own status. A client that disconnects ends the stream without an error.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import suppress

import orjson
from aiohttp import web

from agentrl.errors import AgentRLError
from agentrl.gateway.refusals import code_of, status_of
from agentrl.servers.http.errors import openai_error

_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}


async def send_events(request: web.Request, events: AsyncIterator[Mapping[str, object]]) -> web.StreamResponse:
    """Send events as they come, and return the response.

    Raises:
        AgentRLError: the first event failed; nothing was sent.

    Cancellation: the response ends where it is; the owner of `events` aborts what they sample.
    """
    first = await anext(events)
    response = web.StreamResponse(headers=_HEADERS)
    with suppress(ConnectionResetError):  # the client has disconnected, so there is no one to answer
        await response.prepare(request)
        await response.write(_event(first))
        try:
            async for event in events:
                await response.write(_event(event))
        except AgentRLError as error:
            await response.write(_event(openai_error(str(error), status=status_of(error), code=code_of(error))))
        else:
            await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
    return response


def _event(value: Mapping[str, object]) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"
