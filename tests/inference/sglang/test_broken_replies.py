"""Replies no server should give: each is one of our errors at once, and is not asked for again."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import anyio
import pytest
from anyio.abc import SocketAttribute, SocketStream

from agentrl.errors import ReplyError, RequestRejected, ServerError, ServerUnavailable
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
            with suppress(anyio.BrokenResourceError):  # the client may close before it has read all
                await stream.send(head + body)

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, answer)
        port = listener.extra(SocketAttribute.local_port)
        server = SGLangServer(f"http://127.0.0.1:{port}", vocab_size=VOCAB, request_timeout_s=60)
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


async def test_a_reply_longer_than_its_tokens_need_is_not_read_to_its_end() -> None:
    async with answering(b"200 OK", b" " * 4_000_000) as (server, _):
        with pytest.raises(ReplyError, match="more than 1114112 bytes, which no reply to this call needs"):
            await server.generate(request(max_new_tokens=64))


async def test_an_event_without_an_end_is_not_read_for_ever() -> None:
    async with (
        answering(b"200 OK", b"data: " + b" " * 4_000_000) as (server, _),
        server.stream(request()) as chunks,
    ):
        with pytest.raises(ReplyError, match="the rest was not read"):
            await anext(chunks)


async def test_an_overloaded_server_says_when_to_call_again() -> None:
    async with answering(b"429 Too Many Requests\r\nRetry-After: 7", b"slow down") as (server, _):
        with pytest.raises(ServerUnavailable, match="HTTP 429: slow down") as caught:
            await server.generate(request())
    assert (caught.value.status, caught.value.retry_after_s) == (429, 7.0)


async def retry_after_s(header: str) -> float | None:
    """Return the wait that a client reads from the `Retry-After` of an overloaded server."""
    async with answering(f"503 Service Unavailable\r\nRetry-After: {header}".encode(), b"later") as (server, _):
        with pytest.raises(ServerUnavailable, match="HTTP 503: later") as caught:
            await server.generate(request())
    return caught.value.retry_after_s


async def test_an_overloaded_server_may_name_a_date() -> None:
    in_an_hour = await retry_after_s(format_datetime(datetime.now(UTC) + timedelta(hours=1), usegmt=True))
    assert in_an_hour is not None
    assert 3000 < in_an_hour <= 3600
    for past in ("Sun, 06 Nov 1994 08:49:37 GMT", "Sun, 06 Nov 1994 08:49:37 -0000"):
        assert await retry_after_s(past) == 0
    for broken in ("soon", "-5", "Sun, 99 Nov 9999999 08:49:37 GMT"):
        assert await retry_after_s(broken) is None


async def test_the_text_of_a_server_can_neither_steer_a_terminal_nor_forge_a_line() -> None:
    body = b"\x1b]0;owned\x07\x1b[2J\nagentrl: everything is fine\x9b31m"
    for form in (body, b'{"error":{"message":"\\u001b[2J\\nagentrl: everything is fine"}}'):
        async with answering(b"400 Bad Request", form) as (server, _):
            with pytest.raises(RequestRejected) as caught:
                await server.generate(request())
        assert "\\x1b[2J\\nagentrl: everything is fine" in str(caught.value)
        assert str(caught.value).replace("\ufffd", "?").isprintable()


async def test_a_process_without_free_file_descriptors_blames_itself_and_not_the_server() -> None:
    async with answering(b"200 OK", b"") as (server, asked):
        gc.collect()  # a file of an earlier test that is collected below would make a descriptor free
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest_free = os.dup(0)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
        try:
            with pytest.raises(ServerError, match=r"this process cannot open .*Too many open files.*ulimit -n") as caught:
                await server.generate(request())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert not asked
    assert (type(caught.value), caught.value.url) == (ServerError, None)
