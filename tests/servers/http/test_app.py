"""What is the embedded HTTP server's own: keys, its refusals, live loads, seeds, its end. The protocol itself is tested,
together with a real SGLang's, in tests/conformance."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import anyio.lowlevel
import pytest
from aiohttp import web

from agentrl.errors import ConfigError
from agentrl.servers.embedded.engine import EmbeddedEngine, EngineOptions
from agentrl.servers.listening import AllowedOrigins
from agentrl.servers.serve import serving
from tests.support.tiny import tiny_checkpoint

JSON = {"Content-Type": "application/json"}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("http")
    return [tiny_checkpoint(root / str(seed), seed=seed) for seed in range(2)]


@dataclass
class Server:
    engine: EmbeddedEngine
    url: str
    session: aiohttp.ClientSession

    async def post(self, path: str, body: object = None) -> tuple[int, Any]:
        async with self.session.post(self.url + path, json=body if body is not None else {}) as response:
            data = await response.read()
            return response.status, json.loads(data) if data[:1] in (b"{", b"[") else data.decode()

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path) as response:
            data = await response.read()
            return response.status, json.loads(data) if data[:1] in (b"{", b"[") else data.decode()

    async def generate(
        self, ids: list[int], max_new_tokens: int = 8, *, sampling: dict[str, object] | None = None, **fields: object
    ) -> dict[str, Any]:
        chosen = {"max_new_tokens": max_new_tokens, "ignore_eos": True, **(sampling or {})}
        sent = {"input_ids": ids, "sampling_params": chosen, "return_logprob": True, **fields}
        status, body = await self.post("/generate", sent)
        assert status == 200, body
        return body

    async def running(self, count: int) -> None:
        with anyio.fail_after(300):
            while self.engine.load.num_running != count:
                await anyio.lowlevel.checkpoint()


@asynccontextmanager
async def server(path: Path, *, api_key: str | None = None, key_sent: str | None = None) -> AsyncGenerator[Server]:
    engine = EmbeddedEngine(EngineOptions(model_path=str(path), max_context_tokens=2048, turn_s=0))
    headers = {} if key_sent is None else {"Authorization": f"Bearer {key_sent}"}
    async with serving(engine, api_key=api_key) as url, aiohttp.ClientSession(headers=headers) as session:
        yield Server(engine, url, session)


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"input_ids": [[1], []]}, "a prompt is empty"),
    ({"text": ""}, "a prompt is empty"),
    ({"input_ids": [1, 100000]}, "id 100000 is outside the vocabulary"),
    ({"input_ids": [-1]}, "id -1 is outside the vocabulary"),
    ({"input_ids": [1], "return_logprob": True, "logprob_start_len": -2}, "logprob_start_len must be from -1"),
    ({"input_ids": [[1], [2]], "sampling_params": [{}]}, "1 sampling_params for 2 prompts"),
    ({"input_ids": [1], "sampling_params": []}, "0 sampling_params for 1 prompts"),
    ({"input_ids": [1], "return_logprob": [True]}, "return_logprob should not be a list"),
    ({"input_ids": [[1], [2]], "extra_key": ["a"]}, "1 values of extra_key for 2 prompts"),
    *(
        ({"input_ids": [1], "sampling_params": {name: "a+"}}, f"{name} is not supported")
        for name in ("regex", "json_schema")
    ),
    ({"input_ids": [1], "sampling_params": {"logit_bias": {"1": 1}}}, "logit_bias is not supported"),
    ({"input_ids": [1], "top_logprobs_num": 3}, "top_logprobs_num is not supported"),
    ({"input_ids": [1], "token_ids_logprob": [3]}, "token_ids_logprob is not supported"),
    ({"input_ids": [1], "return_text_in_logprobs": True}, "return_text_in_logprobs is not supported"),
    ({"input_ids": [1], "lora_path": "adapter"}, "is not loaded; loaded: none"),
    ({"input_ids": [1], "sampling_params": {"n": 1_000_000_000}}, "at most 1024 samples are allowed in a call"),
    ({"input_ids": [[1]] * 600, "sampling_params": {"n": 2}}, "got 600 prompts with n = 2"),
    ({"text": ["a"] * 2000}, "got 2000 characters in 2000 prompts"),
]


@pytest.mark.parametrize(("body", "message"), REFUSALS)
async def test_what_sglang_dies_of_and_what_this_server_cannot_do_is_refused_by_name(
    body: dict[str, Any], message: str, models: list[Path]
) -> None:
    async with server(models[0]) as s:
        status, reply = await s.post("/generate", body)
        assert (status, message in reply["error"]["message"]) == (400, True), reply
        await s.running(0)
        assert len((await s.generate([1], 1))["output_ids"]) == 1


@pytest.mark.parametrize(
    ("headers", "why"),
    [
        ({"Host": "evil.example"}, "Host 'evil.example' is not this machine"),
        ({"Host": "127.0.0.1.evil.example:80"}, "is not this machine"),
        ({"Origin": "https://evil.example"}, "Origin 'https://evil.example' is another site"),
        ({"Origin": "null"}, "Origin 'null' is another site"),
        ({"Content-Type": "text/plain"}, "Content-Type 'text/plain' is not application/json"),
        ({"Content-Type": "application/x-www-form-urlencoded"}, "is not application/json"),
    ],
)
async def test_without_a_key_a_call_that_a_web_page_could_send_is_refused(
    headers: dict[str, str], why: str, models: list[Path]
) -> None:
    async with server(models[0]) as s:
        sent = {"Content-Type": "application/json", **headers}
        async with s.session.post(s.url + "/pause_generation", data=b'{"mode":"abort"}', headers=sent) as response:
            assert response.status == 403
            assert why in (await response.json())["error"]
        assert not s.engine.load.num_running
        assert len((await s.generate([1], 1))["output_ids"]) == 1


async def test_a_client_that_never_finishes_its_headers_is_disconnected(models: list[Path]) -> None:
    engine = EmbeddedEngine(EngineOptions(model_path=str(models[0]), max_context_tokens=2048))
    async with serving(engine, headers_s=0.1) as url, aiohttp.ClientSession() as session:
        async with await anyio.connect_tcp("127.0.0.1", int(url.rpartition(":")[2])) as stream:
            await stream.send(b"GET /health HTTP/1.1\r\nHost: loc")
            with anyio.fail_after(300), pytest.raises(anyio.EndOfStream):
                await stream.receive()
        async with session.get(url + "/model_info") as response:
            assert response.status == 200


async def test_the_deadline_of_headers_holds_for_each_request_of_a_connection(models: list[Path]) -> None:
    engine = EmbeddedEngine(EngineOptions(model_path=str(models[0]), max_context_tokens=2048))
    whole, received = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", bytearray()
    async with (
        serving(engine, headers_s=1) as url,
        await anyio.connect_tcp("127.0.0.1", int(url.rpartition(":")[2])) as stream,
    ):
        for wait_s in (1.5, 0):  # longer than the deadline: a connection that has begun no request is kept
            await stream.send(whole)
            received += await stream.receive()
            await anyio.sleep(wait_s)
        assert received.count(b"HTTP/1.1 200 OK") == 2
        await stream.send(whole[:20])
        with anyio.fail_after(300), suppress(anyio.EndOfStream):
            while True:
                await stream.receive()


async def test_the_next_requests_headers_may_begin_before_the_answer(models: list[Path]) -> None:
    body = json.dumps({"input_ids": [1], "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True}}).encode()
    head = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    engine = EmbeddedEngine(EngineOptions(model_path=str(models[0]), max_context_tokens=2048, turn_s=0))
    received = bytearray()
    async with (
        serving(engine, headers_s=0.5) as url,
        await anyio.connect_tcp("127.0.0.1", int(url.rpartition(":")[2])) as stream,
    ):
        await stream.send(head % len(body) + body)
        with anyio.fail_after(300):
            while not engine.load.num_running:
                await anyio.lowlevel.checkpoint()
        await stream.send(head[:20])
        with anyio.fail_after(300), suppress(anyio.EndOfStream):
            while True:
                received += await stream.receive()
    assert received.startswith(b"HTTP/1.1 200 OK")


async def test_a_compressed_body_is_refused_before_it_grows(models: list[Path]) -> None:
    async with server(models[0]) as s:
        body = gzip.compress(b" " * (300 << 20), 1)
        for encoding in ("gzip", "deflate", "br"):
            headers = {**JSON, "Content-Encoding": encoding}
            async with s.session.post(s.url + "/generate", data=io.BytesIO(body), headers=headers) as response:
                assert response.status == 415
                assert "send the body as it is" in (await response.json())["error"]
        assert (await s.get("/health"))[0] == 200


@pytest.mark.parametrize("temperature", [1e308, 101, 1e-7, 1e-300, -1])
async def test_a_temperature_that_no_float_can_divide_by_is_refused(temperature: float, models: list[Path]) -> None:
    async with server(models[0]) as s:
        sent = {"input_ids": [1], "sampling_params": {"temperature": temperature}}
        status, reply = await s.post("/generate", sent)
        assert (status, "temperature must be 0 (greedy) or 1e-06 to 100" in reply["error"]["message"]) == (400, True), reply
        for highest in (1e-6, 100):
            assert (await s.generate([1], 4, sampling={"temperature": highest}))["output_ids"]


@pytest.mark.parametrize("sent", ["none", "sized", "chunked"])
async def test_the_deadline_of_headers_holds_behind_requests_of_the_same_segment(models: list[Path], sent: str) -> None:
    head = b" HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    whole = {
        "none": b"GET /health" + head + b"\r\n",
        "sized": b"POST /generate" + head + b"Content-Length: 18\r\n\r\n" + b'{"input_ids": [1]}',
        "chunked": b"POST /generate"
        + head
        + b"Transfer-Encoding: chunked\r\n\r\n12\r\n"
        + b'{"input_ids": [1]}\r\n0\r\n\r\n',
    }[sent]
    engine = EmbeddedEngine(EngineOptions(model_path=str(models[0]), max_context_tokens=2048))
    received = bytearray()
    async with (
        serving(engine, headers_s=0.5) as url,
        await anyio.connect_tcp("127.0.0.1", int(url.rpartition(":")[2])) as stream,
    ):
        await stream.send(whole + whole + whole[:20])
        with anyio.fail_after(300), suppress(anyio.EndOfStream):
            while True:
                received += await stream.receive()
    assert received.count(b"HTTP/1.1 200 OK") == 2


async def test_a_connection_whose_last_request_had_a_body_is_kept_beyond_the_deadline_of_headers(
    models: list[Path],
) -> None:
    head = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 18\r\n\r\n"
    body, received = b'{"input_ids": [1]}', bytearray()
    engine = EmbeddedEngine(EngineOptions(model_path=str(models[0]), max_context_tokens=2048))
    async with (
        serving(engine, headers_s=1) as url,
        await anyio.connect_tcp("127.0.0.1", int(url.rpartition(":")[2])) as stream,
    ):
        for number in (1, 2):
            for piece in (head[:-2], head[-2:] + body):
                await stream.send(piece)
            while received.count(b"HTTP/1.1 200 OK") < number:
                received += await stream.receive()
            await anyio.sleep(1.5)  # longer than the deadline


async def test_a_client_that_never_finishes_a_body_is_disconnected(models: list[Path]) -> None:
    engine = EmbeddedEngine(EngineOptions(model_path=str(models[0]), max_context_tokens=2048))
    received = bytearray()
    async with serving(engine, body_s=0.1) as url, aiohttp.ClientSession() as session:
        async with await anyio.connect_tcp("127.0.0.1", int(url.rpartition(":")[2])) as stream:
            head = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            await stream.send(head + b'Content-Length: 400\r\n\r\n{"input_ids": [1')
            with anyio.fail_after(300), suppress(anyio.EndOfStream):
                while True:
                    received += await stream.receive()
        async with session.post(url + "/generate", json={"input_ids": [1]}) as response:
            assert response.status == 200
    assert received.startswith(b"HTTP/1.1 408 ")
    assert b"the body was not complete after 0.1 s" in received


async def test_a_text_far_beyond_any_context_is_refused_before_it_is_encoded(models: list[Path]) -> None:
    async with server(models[0]) as s:
        body = io.BytesIO(json.dumps({"text": "a b " * 1_000_000}).encode())
        async with s.session.post(s.url + "/generate", data=body, headers=JSON) as response:
            assert response.status == 400
            assert "at most 1048576 characters of text" in (await response.json())["error"]["message"]


async def test_other_bad_calls_are_refused_and_the_server_goes_on(models: list[Path]) -> None:
    async with server(models[0]) as s:
        status, reply = await s.post("/update_weights_from_disk", {"model_path": "x", "load_format": "npcache"})
        assert (status, "load_format" in reply["error"]["message"]) == (400, True)
        async with s.session.post(s.url + "/generate", data=io.BytesIO(b" " * (33 << 20)), headers=JSON) as response:
            assert response.status == 413
        assert (await s.get("/health"))[0] == 200


async def test_seeds_repeat_whole_and_streamed(models: list[Path]) -> None:
    async with server(models[0]) as s:
        once, again, other = [
            (await s.generate([5, 6], 20, sampling={"sampling_seed": seed}))["output_ids"] for seed in (4, 4, 5)
        ]
        assert once == again != other
        sent = {
            "input_ids": [5, 6],
            "sampling_params": {"n": 2, "max_new_tokens": 20, "ignore_eos": True, "sampling_seed": 4},
        }
        assert [body["output_ids"] for body in (await s.post("/generate", sent))[1]] == [once, once]


async def test_loads_are_live_in_a_pause_and_count_what_it_holds(models: list[Path]) -> None:
    async with server(models[0]) as s, anyio.create_task_group() as group:
        group.start_soon(s.generate, [3, 4], 2000)
        await s.running(1)
        await s.post("/pause_generation", {"mode": "retract"})
        assert (await s.get("/health"))[0] == 200
        loads = (await s.get("/v1/loads"))[1]["loads"][0]
        assert (loads["num_running_reqs"], loads["queues"]) == (0, {"waiting": 0, "paused": 1, "retracted": 1})
        await s.post("/abort_request", {"abort_all": True})


async def test_digests_are_those_of_a_publication(models: list[Path]) -> None:
    async with server(models[0]) as s:
        await s.post("/update_weights_from_disk", {"model_path": str(models[1])})
        checksums = (await s.post("/weights_checker", {"action": "checksum"}))[1]["ranks"][0]["checksums"]
        assert checksums == EmbeddedEngine(EngineOptions(model_path=str(models[1]))).checksums()


async def test_a_refused_update_says_why(models: list[Path], tmp_path: Path) -> None:
    async with server(models[0]) as s:
        status, reply = await s.post("/update_weights_from_disk", {"model_path": str(tmp_path), "weight_version": "9"})
        assert (status, "no weights at" in reply["message"]) == (400, True)


@pytest.mark.parametrize("paused", [True, False])
async def test_two_updates_at_once_follow_one_another(paused: bool, models: list[Path]) -> None:
    async with server(models[0]) as s:
        if paused:
            await s.post("/pause_generation", {"mode": "retract"})
        statuses: list[int] = []

        async def update(version: int) -> None:
            sent = {"model_path": str(models[version]), "weight_version": str(version)}
            statuses.append((await s.post("/update_weights_from_disk", sent))[0])

        async with anyio.create_task_group() as group:
            for version in (0, 1):
                group.start_soon(update, version)
        assert statuses == [200, 200]
        info = (await s.get("/model_info"))[1]
        assert info["model_path"] == str(models[int(info["weight_version"])])
        expected = EmbeddedEngine(EngineOptions(model_path=info["model_path"])).checksums()
        assert s.engine.checksums() == expected


async def test_server_info_names_the_engine(models: list[Path]) -> None:
    async with server(models[0]) as s:
        status, info = await s.get("/server_info")
        assert (status, info["version"], info["engine"], info["vocab_size"]) == (200, "0.5.23", "embedded", 357)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_disconnects_aborts_its_request_and_no_other(stream: bool, models: list[Path]) -> None:
    async with server(models[0]) as s:
        body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 2000, "ignore_eos": True}, "stream": stream}
        async with anyio.create_task_group() as group:

            async def keep() -> None:
                assert len((await s.generate([2], 1000, rid="ab"))["output_ids"]) == 1000

            async def leave(scope: anyio.CancelScope) -> None:
                with scope:
                    async with s.session.post(s.url + "/generate", json={**body, "rid": "a"}) as response:
                        await response.read()

            scope = anyio.CancelScope()
            group.start_soon(keep)
            group.start_soon(leave, scope)
            await s.running(2)
            scope.cancel()
            await s.running(1)
        await s.running(0)


async def test_every_route_wants_the_key(models: list[Path]) -> None:
    for sent in (None, "wrong", "schlüssel"):
        async with server(models[0], api_key="secret", key_sent=sent) as s:
            for path in ("/health", "/ready", "/model_info", "/server_info", "/v1/loads", "/nothing"):
                assert (await s.get(path))[0] == 401
            for path in ("/generate", "/abort_request", "/pause_generation", "/update_weights_from_disk"):
                assert (await s.post(path))[0] == 401
    async with server(models[0], api_key="secret", key_sent="secret") as s:
        assert len((await s.generate([1], 1))["output_ids"]) == 1


async def test_a_port_that_is_taken_is_a_config_error(models: list[Path]) -> None:
    async with server(models[0]) as s:
        port = int(s.url.rpartition(":")[2])
        engine = EmbeddedEngine(EngineOptions(model_path=str(models[0])))
        with pytest.raises(ConfigError, match="cannot listen on"):
            async with serving(engine, port=port):
                pass


async def test_closing_the_server_answers_what_is_in_flight(models: list[Path]) -> None:
    engine = EmbeddedEngine(EngineOptions(model_path=str(models[0])))
    replies: list[dict[str, Any]] = []
    async with aiohttp.ClientSession() as session, anyio.create_task_group() as group:
        async with serving(engine) as url:
            s = Server(engine, url, session)

            async def call() -> None:
                replies.append(await s.generate([1], 3000))

            group.start_soon(call)
            await s.running(1)
        with anyio.fail_after(300):
            while not replies:
                await anyio.lowlevel.checkpoint()
    assert replies[0]["meta_info"]["finish_reason"]["type"] == "abort"


async def test_a_page_of_a_named_origin_may_call_the_openai_api_and_nothing_else(models: list[Path]) -> None:
    page = "http://localhost:3000"
    engine = EmbeddedEngine(EngineOptions(model_path=str(models[0]), max_context_tokens=2048, turn_s=0))

    def add_routes(app: web.Application, _engine: object) -> None:
        async def answer(_: web.Request) -> web.Response:
            return web.json_response({"id": "m"})

        app.router.add_post("/v1/chat/completions", answer)

    async with (
        serving(engine, api_key="k", origins=AllowedOrigins([page]), add_routes=add_routes) as url,
        aiohttp.ClientSession() as session,
    ):
        asks = {"Origin": page, "Access-Control-Request-Headers": "authorization"}
        async with session.options(f"{url}/v1/chat/completions", headers=asks) as response:
            assert response.status == 204  # a browser sends no key with its question
            assert response.headers["Access-Control-Allow-Headers"] == "authorization"
        for origin, path, marked in (
            (page, "/v1/chat/completions", page),
            ("http://evil.example", "/v1/chat/completions", None),
            (page, "/pause_generation", None),
        ):
            sent = {"Origin": origin, "Authorization": "Bearer k"}
            async with session.post(f"{url}{path}", json={}, headers=sent) as response:
                assert response.headers.get("Access-Control-Allow-Origin") == marked, path
        async with session.options(f"{url}/pause_generation", headers=asks) as response:
            assert response.status in (401, 405)
    with pytest.raises(ConfigError, match="expected an origin"):
        AllowedOrigins(["localhost:3000"])


async def test_without_a_key_a_page_of_a_named_origin_still_sends_json_to_this_machine(models: list[Path]) -> None:
    page = "http://localhost:3000"
    engine = EmbeddedEngine(EngineOptions(model_path=str(models[0]), max_context_tokens=2048, turn_s=0))
    async with serving(engine, origins=AllowedOrigins([page])) as url, aiohttp.ClientSession() as session:
        for headers, status in (
            ({"Origin": page, "Content-Type": "application/json"}, 404),  # no such route, so it passed
            ({"Origin": page, "Content-Type": "application/json", "Sec-Fetch-Site": "same-site"}, 404),
            ({"Content-Type": "application/json", "Sec-Fetch-Site": "same-site"}, 403),
            ({"Origin": page, "Content-Type": "text/plain"}, 403),
            ({"Origin": page, "Content-Type": "application/json", "Host": "evil.example"}, 403),
        ):
            async with session.post(f"{url}/v1/chat/completions", data=b"{}", headers=headers) as response:
                assert response.status == status, headers
