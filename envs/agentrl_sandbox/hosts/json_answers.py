"""Answers of servers whose bodies are JSON: a body, or `{"error": REASON}` with its status."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler
from pydantic import ValidationError

from agentrl.errors import ConfigError, EnvironmentFault, RequestRejected
from agentrl.servers.http.errors import decode_body
from agentrl.servers.listening import Refusal
from agentrl_sandbox.remote.wire import FileError

Body = TypeVar("Body")


@web.middleware
async def refused_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer an error of a handler with its status and reason."""
    try:
        return await handler(request)
    except (ConfigError, ValidationError, RequestRejected, ValueError) as error:
        return json_refusal(400, str(error))
    except EnvironmentFault as error:
        return json_refusal(503, str(error))
    except web.HTTPException as error:
        return json_refusal(error.status, error.reason)
    except OSError as error:  # of a file
        body = FileError(number=error.errno or 0, error=error.strerror or str(error), path=str(error.filename or ""))
        return encoded(body, status=422)


def turned_away_as_json(request: web.Request, refused: Refusal) -> web.Response:
    """Answer a request that no handler sees."""
    del request
    return json_refusal(refused.status, refused.reason)


async def read_body(request: web.Request, kind: type[Body]) -> Body:
    """Return the body of a request; one of another form is a RequestRejected."""
    return decode_body(await request.read(), kind)


def encoded(body: object, *, status: int = 200) -> web.Response:
    """Return a body as JSON."""
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")


def json_refusal(status: int, text: str) -> web.Response:
    """Return the reason of a refusal as JSON."""
    return web.json_response({"error": text}, status=status)
