"""Decoding of request bodies, and SGLang's error replies: each place that checks a body has a shape of its own.

Invariant: every error in a call becomes a status and a message that names it; no body stops the server.

- a body that does not fit the endpoint: 400 `{"object": "error", "message", "type", "param", "code"}`
- an unknown name or a wrong type in `sampling_params`: 400 `{"error": "message"}`
- a value that the server cannot serve: 400 `{"error": {"message"}}`; in a streamed call, HTTP 200 and an error event
- an unknown path or method: 404 or 405 `{"detail"}`
- a call of the OpenAI API (`/v1/...`): OpenAI's shape, `{"error": {"message", "type", "param", "code"}}`
"""

from __future__ import annotations

import json
from typing import TypeVar

import msgspec
import orjson
from aiohttp import web

from agentrl.errors import RequestRejected

_Body = TypeVar("_Body")


class BadBody(RequestRejected):
    """The body is not JSON, or does not fit the endpoint."""


class BadSampling(RequestRejected):
    """`sampling_params` holds an unknown name or a value of the wrong type."""


def json_bytes(value: object, *, sort_keys: bool = False) -> bytes:
    """Return a value as JSON, exactly: integers of any size and halves of surrogate pairs included, which orjson refuses.

    Example:
        >>> json_bytes({"a": 2**64, "b": 1})
        b'{"a":18446744073709551616,"b":1}'
    """
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS if sort_keys else None)
    except TypeError:
        return json.dumps(value, sort_keys=sort_keys, separators=(",", ":")).encode()


def json_reply(value: object, *, status: int = 200) -> web.Response:
    """Return `value` as a JSON response."""
    return web.Response(body=json_bytes(value), status=status, content_type="application/json")


def decode_body(body: bytes, kind: type[_Body]) -> _Body:
    """Return the JSON `body` as `kind`.

    Example:
        >>> decode_body(b'{"a": 1}', dict[str, int])
        {'a': 1}
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadBody(f"1 validation error:\n  {error or 'the body is empty; send {}'}", status=400) from None


def refusal(error: RequestRejected) -> web.Response:
    """Return the response to a refused call."""
    status = error.status or 400
    if isinstance(error, BadBody):
        return json_reply(
            {"object": "error", "message": str(error), "type": "Bad Request", "param": None, "code": status}, status=status
        )
    return json_reply({"error": str(error) if isinstance(error, BadSampling) else {"message": str(error)}}, status=status)


_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def openai_error(message: str, *, status: int, code: str | None = None) -> dict[str, object]:
    """Return the body of an error in OpenAI's shape.

    Example:
        >>> openai_error("no such model", status=404, code="model_not_found")["error"]["type"]
        'invalid_request_error'
    """
    kind = _OPENAI_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def error_reply(body: object, *, status: int) -> web.Response:
    """Return an error as a response; one that may go away says when to call again."""
    reply = json_reply(body, status=status)
    if status in (429, 503):
        reply.headers["Retry-After"] = "1"
    return reply


def error_event(error: RequestRejected) -> bytes:
    """Return the events of a stream whose call is refused."""
    body = {"message": str(error), "type": "invalid_request_error", "code": error.status or 400, "retryable": False}
    return b"data: " + orjson.dumps({"error": body}) + b"\n\ndata: [DONE]\n\n"
