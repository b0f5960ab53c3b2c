"""How the HTTP server reads bodies and words refusals: SGLang has one shape of error for each place a body is checked.

Invariant: whatever is wrong with a call becomes a status and a message that names it; no body ends the server.

- a body that is not the endpoint's: 400 `{"object": "error", "message", "type", "param", "code"}`
- `sampling_params` of unknown names or other types: 400 `{"error": "message"}`
- a value the server cannot serve: 400 `{"error": {"message"}}`; of a streamed call, HTTP 200 and an error event
- no such path or method: 404 or 405 `{"detail"}`
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
import orjson
from aiohttp import web

from agentrl.errors import RequestRejected

_Body = TypeVar("_Body")


class BadBody(RequestRejected):
    """A body that is not JSON, or not what the endpoint takes."""


class BadSampling(RequestRejected):
    """`sampling_params` with an unknown name or a value of another type."""


def dumps(value: object) -> bytes:
    """Return JSON bytes."""
    return orjson.dumps(value)


def json_reply(value: object, *, status: int = 200) -> web.Response:
    """Return a JSON response."""
    return web.Response(body=dumps(value), status=status, content_type="application/json")


def decode_body(body: bytes, kind: type[_Body]) -> _Body:
    """Return the JSON `body` as `kind`.

    Raises:
        BadBody: naming the field that is wrong; also for an empty body, as at SGLang.

    Example:
        >>> decode_body(b'{"a": 1}', dict[str, int])
        {'a': 1}
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadBody(f"1 validation error:\n  {error or 'the body is empty; send {}'}", status=400) from None


def refusal(error: RequestRejected) -> web.Response:
    """Return the response for a refused call."""
    status = error.status or 400
    if isinstance(error, BadBody):
        return json_reply(
            {"object": "error", "message": str(error), "type": "Bad Request", "param": None, "code": status}, status=status
        )
    return json_reply({"error": str(error) if isinstance(error, BadSampling) else {"message": str(error)}}, status=status)


def error_event(error: RequestRejected) -> bytes:
    """Return the event that ends a stream which could not be served."""
    body = {"message": str(error), "type": "invalid_request_error", "code": error.status or 400, "retryable": False}
    return b"data: " + dumps({"error": body}) + b"\n\ndata: [DONE]\n\n"
