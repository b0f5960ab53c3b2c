"""Replies no server should give: each is one of our errors at once, and is not asked for again."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
import pytest
from anyio.abc import SocketAttribute, SocketStream

from agentrl.errors import ReplyError, RequestRejected, ServerError
from agentrl.inference.sglang.server import SGLangServer
from agentrl.inference.sglang.transport import error_message
from agentrl.inference.sglang.wire import ServerInfo, decode
from agentrl.servers.http.errors import BadBody, BadSampling, decode_body
from agentrl.servers.http.requests import GenerateBody, decode_generate
from tests.support.scripted import VOCAB, request

DEEP = b"[" * 20_000


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def answering(status: bytes, body: bytes) -> AsyncGenerator[tuple[SGLangServer, list[bytes]]]:
    """Serve one reply to whatever is asked; yields a client of it and what was asked."""
    asked: list[bytes] = []

    async def answer(stream: SocketStream) -> None:
        async with stream:
            asked.append(await stream.receive())
            head = b"HTTP/1.1 %b\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % (status, len(body))
            await stream.send(head + body)

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, answer)
        port = listener.extra(SocketAttribute.local_port)
        server = SGLangServer(f"http://127.0.0.1:{port}", vocab_size=VOCAB, request_timeout_s=10)
        try:
            yield server, asked
        finally:
            await server.aclose()
            tasks.cancel_scope.cancel()


async def test_an_empty_reply_is_a_broken_reply_and_is_not_asked_for_again() -> None:
    async with answering(b"200 OK", b"") as (server, asked):
        with pytest.raises(ReplyError, match="the reply to /generate breaks the protocol: expected JSON, got nothing"):
            await server.generate(request())
    assert len(asked) == 1


@pytest.mark.parametrize(("status", "error"), [(b"400 Bad Request", RequestRejected), (b"200 OK", ReplyError)])
@pytest.mark.parametrize("body", [DEEP, b'{"meta_info":' + DEEP, b'{"error":{"message":' + DEEP])
async def test_a_deeply_nested_reply_is_the_error_its_status_stands_for(
    status: bytes, error: type[ServerError], body: bytes
) -> None:
    async with answering(status, body) as (server, _):
        with pytest.raises(error, match=r"\[\[\["):
            await server.generate(request())


def test_an_error_that_can_be_read_but_not_written_again_is_told_by_its_beginning() -> None:
    for depth in range(900, 1000):  # somewhere here reading comes to its end before writing does, or the other way round
        body = b'{"a":' * depth + b"1" + b"}" * depth
        assert error_message(body).startswith(('{"a":', "{'a':"))


def test_a_deeply_nested_message_is_refused_on_either_side() -> None:
    with pytest.raises(ReplyError, match="breaks the protocol"):
        decode(b'{"version": "1", "unknown": ' + DEEP, ServerInfo, "the reply", "http://s")
    with pytest.raises(BadBody):
        decode_body(b'{"unknown": ' + DEEP, GenerateBody)
    nested = b"[" * 1100 + b"]" * 1100
    with pytest.raises((BadBody, BadSampling)):
        decode_generate(b'{"sampling_params": {"regex": ' + nested + b"}}")
