"""The HTTP server in front of the embedded engine: SGLang's shapes, refusals, streaming, disconnects, keys."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import anyio.lowlevel
import pytest

from agentrl.errors import ConfigError
from agentrl.inference.embedded.engine import EmbeddedEngine, EngineOptions
from agentrl.inference.serve import serving
from tests.support.tiny import tiny_checkpoint


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
        with anyio.fail_after(30):
            while self.engine.load.num_running != count:
                await anyio.lowlevel.checkpoint()


@asynccontextmanager
async def server(path: Path, *, api_key: str | None = None, key_sent: str | None = None) -> AsyncGenerator[Server]:
    engine = EmbeddedEngine(EngineOptions(model_path=str(path), max_context_tokens=2048))
    headers = {} if key_sent is None else {"Authorization": f"Bearer {key_sent}"}
    async with serving(engine, api_key=api_key) as url, aiohttp.ClientSession(headers=headers) as session:
        yield Server(engine, url, session)


async def test_a_reply_has_the_shape_of_sglang(models: list[Path]) -> None:
    async with server(models[0]) as s:
        body = await s.generate([5, 6, 7], rid="f" * 32, return_prompt_token_ids=True)
        meta = body["meta_info"]
        assert set(body) == {"text", "output_ids", "meta_info", "prompt_token_ids"}
        assert body["prompt_token_ids"] == [5, 6, 7]
        assert [triple[1:] for triple in meta["output_token_logprobs"]] == [[i, None] for i in body["output_ids"]]
        assert all(triple[0] <= 0 for triple in meta["output_token_logprobs"])
        assert meta["finish_reason"] == {"type": "length", "length": 8}
        assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": 8}]
        expected = {
            "id": "f" * 32, "weight_version": "0", "prompt_tokens": 3, "completion_tokens": 8, "cached_tokens": 0,
            "num_retractions": 0, "input_token_logprobs": [], "output_token_logprobs_length": 8,
        }  # fmt: skip
        assert {key: meta[key] for key in expected} == expected
        assert body["text"] == s.engine.decode(body["output_ids"], skip_special_tokens=True)


async def test_a_stop_string_is_trimmed_from_the_text_and_kept_in_the_ids(models: list[Path]) -> None:
    async with server(models[0]) as s:
        free = await s.generate([9, 8], 40, sampling={"sampling_seed": 1})
        word = s.engine.decode(free["output_ids"], skip_special_tokens=False)[8:11]
        for trim in (True, False):
            cut = await s.generate([9, 8], 40, sampling={"sampling_seed": 1, "stop": word, "no_stop_trim": not trim})
            assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": word}
            assert (word in cut["text"]) is not trim
            assert word in s.engine.decode(cut["output_ids"], skip_special_tokens=False)
            assert cut["output_ids"] == free["output_ids"][: len(cut["output_ids"])]


async def test_scoring_returns_the_prompt_with_a_null_first(models: list[Path]) -> None:
    async with server(models[0]) as s:
        body = await s.generate([5, 6, 7, 8], 0, logprob_start_len=1)
        triples = body["meta_info"]["input_token_logprobs"]
        assert triples[0] == [None, 6, None]
        assert [triple[1] for triple in triples] == [6, 7, 8]
        assert all(triple[0] < 0 for triple in triples[1:])
        assert (body["output_ids"], body["meta_info"]["weight_versions"]) == ([], [])
        assert body["meta_info"]["finish_reason"] == {"type": "length", "length": 0}


async def test_batches_and_several_samples_come_back_in_order(models: list[Path]) -> None:
    async with server(models[0]) as s:
        sent = {
            "input_ids": [[5], [6, 7]],
            "rid": ["a" * 32, "b" * 32],
            "sampling_params": {"n": 2, "max_new_tokens": 4},
        }
        status, bodies = await s.post("/generate", sent)
        assert status == 200
        assert [body["meta_info"]["prompt_tokens"] for body in bodies] == [1, 1, 2, 2]
        assert [body["meta_info"]["id"] for body in bodies] == [
            "a" * 32 + "_0",
            "a" * 32 + "_1",
            "b" * 32 + "_0",
            "b" * 32 + "_1",
        ]
        status, bodies = await s.post(
            "/generate", {"text": ["hello", "you"], "sampling_params": [{"max_new_tokens": 1}, {"max_new_tokens": 2}]}
        )
        assert status == 200
        assert bodies[1]["meta_info"]["prompt_tokens"] == len(s.engine.encode("you"))
        assert "output_token_logprobs" not in bodies[0]["meta_info"]


async def events(response: aiohttp.ClientResponse) -> AsyncGenerator[str]:
    async for line in response.content:
        if line.strip():
            yield line.decode().strip().removeprefix("data: ")


async def test_streams_are_cumulative_and_end_with_done(models: list[Path]) -> None:
    async with server(models[0]) as s:
        whole = await s.generate([5, 6], 12, sampling={"sampling_seed": 4})
        body = {
            "input_ids": [5, 6],
            "sampling_params": {"max_new_tokens": 12, "ignore_eos": True, "sampling_seed": 4},
            "stream": True,
            "return_logprob": True,
        }
        async with s.session.post(s.url + "/generate", json=body) as response:
            assert response.headers["Content-Type"] == "text/event-stream"
            *parts, done = [event async for event in events(response)]
        chunks = [json.loads(part) for part in parts]
        assert done == "[DONE]"
        for before, after in pairwise(chunks):
            assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
            assert before["meta_info"]["finish_reason"] is None
            assert "weight_versions" not in before["meta_info"]
        last = chunks[-1]
        assert last["output_ids"] == whole["output_ids"]
        assert last["text"] == whole["text"]
        assert last["meta_info"]["weight_versions"] == [{"version": "0", "start": 0, "end": 12}]


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"input_ids": []}, "input_ids is empty"),
    ({"input_ids": [[1], []]}, "a prompt is empty"),
    ({"input_ids": [[1], 2]}, "not a mixture"),
    ({"input_ids": [1, [2]]}, "not a mixture"),
    ({"input_ids": [1.5]}, "Expected `int | array`"),
    ({"input_ids": [1, 100000]}, "id 100000 is outside the vocabulary"),
    ({"input_ids": [-1]}, "id -1 is outside the vocabulary"),
    ({}, "either text or input_ids"),
    ({"input_ids": [1], "text": "a"}, "either text or input_ids"),
    ({"input_ids": [1] * 3000}, "over the context of 2048"),
    ({"input_ids": [1] * 2000, "sampling_params": {"max_new_tokens": 49}}, "make 2049, over the context of 2048"),
    ({"input_ids": [1], "sampling_params": {"tempreature": 1}}, "unknown field `tempreature`"),
    ({"input_ids": [1], "sampling_params": {"temperature": -1}}, "temperature"),
    ({"input_ids": [1], "sampling_params": {"top_p": 0}}, "top_p"),
    ({"input_ids": [1], "sampling_params": {"top_k": 0}}, "top_k"),
    ({"input_ids": [1], "sampling_params": {"regex": "a+"}}, "regex is not supported"),
    ({"input_ids": [1], "sampling_params": {"max_new_tokens": 1, "min_new_tokens": 2}}, "min_new_tokens 2 is over"),
    ({"input_ids": [1], "return_logprob": True, "logprob_start_len": 1}, "logprob_start_len 1 must be below"),
    ({"input_ids": [1], "top_logprobs_num": 3}, "top_logprobs_num is not supported"),
    ({"input_ids": [[1], [2]], "stream": True}, "stream is supported for one prompt"),
    ({"input_ids": [[1], [2]], "rid": ["a"]}, "1 rids for 2 prompts"),
    ({"input_ids": [[1], [2]], "rid": ["a", "a"]}, "duplicate request id"),
]


@pytest.mark.parametrize(("body", "message"), REFUSALS)
async def test_bad_requests_are_refused_by_name(body: dict[str, Any], message: str, models: list[Path]) -> None:
    async with server(models[0]) as s:
        status, reply = await s.post("/generate", body)
        assert status == 400
        assert message in reply["error"]["message"]
        await s.running(0)
        assert len((await s.generate([1], 1))["output_ids"]) == 1


async def test_other_bad_calls_are_refused_and_the_server_goes_on(models: list[Path]) -> None:
    async with server(models[0]) as s:
        for path, body, message in (
            ("/pause_generation", {"mode": "soft"}, "mode"),
            ("/update_weights_from_disk", {}, "model_path"),
            ("/update_weights_from_disk", {"model_path": "x", "load_format": "npcache"}, "load_format"),
            ("/weights_checker", {"action": "reset"}, "checksum"),
            ("/flush_cache?timeout=soon", {}, "timeout must be seconds"),
            ("/abort_request", [], "object"),
        ):
            status, reply = await s.post(path, body)
            assert (status, message in reply["error"]["message"]) == (400, True), (path, reply)
        async with s.session.post(s.url + "/generate", data=b"{not json") as response:
            assert response.status == 400
        assert (await s.post("/no_such_route"))[0] == 404
        assert (await s.post("/model_info"))[0] == 405
        async with s.session.post(s.url + "/generate", data=io.BytesIO(b" " * (33 << 20))) as response:
            assert response.status == 413
        assert (await s.get("/health"))[0] == 200


async def test_a_duplicate_rid_is_refused_while_the_first_goes_on(models: list[Path]) -> None:
    async with server(models[0]) as s, anyio.create_task_group() as group:
        replies: list[dict[str, Any]] = []

        async def first() -> None:
            replies.append(await s.generate([1], 1200, rid="a" * 32))

        group.start_soon(first)
        await s.running(1)
        status, reply = await s.post("/generate", {"input_ids": [1], "rid": "a" * 32})
        assert (status, "duplicate" in reply["error"]["message"]) == (400, True)
        await s.post("/abort_request", {"rid": "a" * 32})
        with anyio.fail_after(30):
            while not replies:
                await anyio.lowlevel.checkpoint()
        assert replies[0]["meta_info"]["finish_reason"]["type"] == "abort"
        assert len(replies[0]["output_ids"]) == len(replies[0]["meta_info"]["output_token_logprobs"]) > 0


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


async def test_pause_update_continue_gives_spans_through_http(models: list[Path]) -> None:
    async with server(models[0]) as s, anyio.create_task_group() as group:
        replies: list[dict[str, Any]] = []

        async def call() -> None:
            replies.append(await s.generate([3, 4], 900, rid="a" * 32))

        group.start_soon(call)
        await s.running(1)
        assert await s.post("/pause_generation", {"mode": "retract"}) == (
            200, {"message": "Generation paused: retract.", "status": "ok"}
        )  # fmt: skip
        assert (await s.get("/ready"))[0] == 503
        assert (await s.get("/health"))[0] == 200
        loads = (await s.get("/v1/loads"))[1]["loads"][0]
        assert (loads["num_running_reqs"], loads["queues"]) == (0, {"waiting": 0, "paused": 1, "retracted": 1})
        assert (await s.post("/flush_cache"))[0] == 200
        update = {"model_path": str(models[1]), "weight_version": "7"}
        status, reply = await s.post("/update_weights_from_disk", update)
        assert (status, reply["success"], reply["num_paused_requests"]) == (200, True, 1)
        status, info = await s.get("/model_info")
        assert (info["weight_version"], info["model_path"]) == ("7", str(models[1]))
        checksums = (await s.post("/weights_checker", {"action": "checksum"}))[1]["ranks"][0]["checksums"]
        assert checksums == EmbeddedEngine(EngineOptions(model_path=str(models[1]))).checksums()
        await s.post("/continue_generation")
        assert (await s.get("/ready"))[0] == 200
        with anyio.fail_after(30):
            while not replies:
                await anyio.lowlevel.checkpoint()
        meta = replies[0]["meta_info"]
        assert meta["num_retractions"] == 1
        first, second = meta["weight_versions"]
        assert (first["version"], first["start"], second["version"], second["end"]) == ("0", 0, "7", 900)
        assert first["end"] == second["start"] > 0


async def test_refused_updates_answer_400_and_change_nothing(models: list[Path], tmp_path: Path) -> None:
    async with server(models[0]) as s:
        status, reply = await s.post("/update_weights_from_disk", {"model_path": str(tmp_path), "weight_version": "9"})
        assert (status, reply["success"]) == (400, False)
        assert "no weights at" in reply["message"]
        assert (await s.get("/model_info"))[1]["weight_version"] == "0"


async def test_renaming_the_version_aborts_everything_unless_told_otherwise(models: list[Path]) -> None:
    reasons: list[str] = []
    async with server(models[0]) as s, anyio.create_task_group() as group:

        async def call() -> None:
            reasons.append((await s.generate([1], 1800))["meta_info"]["finish_reason"]["type"])

        group.start_soon(call)
        await s.running(1)
        await s.post("/update_weight_version", {"new_version": "x", "abort_all_requests": False})
        assert s.engine.load.num_running == 1
        status, reply = await s.post("/update_weight_version", {"new_version": "y"})
        assert (status, reply["new_version"]) == (200, "y")
        await s.running(0)
        assert (await s.get("/server_info"))[1]["weight_version"] == "y"
    assert reasons == ["abort"]


async def test_server_info_names_the_dialect_and_the_engine(models: list[Path]) -> None:
    async with server(models[0]) as s:
        for path in ("/server_info", "/get_server_info"):
            status, info = await s.get(path)
            assert (status, info["version"], info["engine"]) == (200, "0.5.23", "embedded")
        assert (await s.get("/get_model_info"))[1]["is_generation"] is True
        assert (await s.get("/health_generate"))[0] == 200


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
        with anyio.fail_after(10):
            while not replies:
                await anyio.lowlevel.checkpoint()
    assert replies[0]["meta_info"]["finish_reason"]["type"] == "abort"
