"""The client of one server over real sockets, in front of agentrl's own HTTP app: calls, faults, guards."""

from __future__ import annotations

import gc
import json
import socket
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from agentrl.errors import (
    InvariantError,
    ReplyError,
    RequestRejected,
    ServerError,
    ServerTimeout,
    ServerUnavailable,
    WeightSyncError,
)
from agentrl.inference.backend import GenerateRequest, Generation, GenerationChunk
from agentrl.inference.sglang.calls import Assembly
from agentrl.inference.sglang.server import SGLangServer
from agentrl.inference.sglang.wire import GenerateReply
from agentrl.servers.scripted.server import (
    Fault,
    Hold,
    Script,
    ScriptedReply,
    ScriptedServer,
    scripted_logprobs,
)
from agentrl.servers.scripted.socket_server import ScriptedHTTP, serve_scripted
from agentrl.types import StopReason, VersionSpan
from agentrl.weights.types import Publication
from tests.support.impatient import Impatient
from tests.support.scripted import FAULTS, VOCAB, publication, request


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Rig:
    """A script behind a socket, and a client of it."""

    def __init__(self, script: ScriptedServer, http: ScriptedHTTP, client: SGLangServer) -> None:
        self.script, self.http, self.client = script, http, client


@asynccontextmanager
async def rig(script: Script | None = None, *, request_timeout_s: float = 60) -> AsyncGenerator[Rig, None]:
    scripted = ScriptedServer(script or (lambda _: range(10, 20)), vocab_size=VOCAB, eos_id=19)
    async with (
        serve_scripted(scripted) as http,
        SGLangServer(http.url, vocab_size=VOCAB, request_timeout_s=request_timeout_s) as client,
    ):
        yield Rig(scripted, http, client)


def stored(path: Path, version: int) -> Publication:
    return publication(version, path=str(path))


async def collect(stream: AsyncIterator[GenerationChunk]) -> list[GenerationChunk]:
    return [chunk async for chunk in stream]


async def drain(client: SGLangServer, sent: GenerateRequest) -> None:
    async with client.stream(sent) as stream:
        await collect(stream)


async def test_a_call_brings_ids_log_probs_and_spans() -> None:
    async with rig() as r:
        generation = await r.client.generate(request(1, 2, 3))
        assert r.client.info.engine == "scripted"
    assert generation.output_ids.tolist() == list(range(10, 20))
    expected = scripted_logprobs(np.array([3, *range(10, 20)], np.int32), version=0)
    np.testing.assert_array_equal(generation.output_logprobs, expected)
    assert [(span.start, span.end, span.version) for span in generation.spans] == [(0, 10, 0)]
    assert (generation.stop_reason, generation.matched_stop) == (StopReason.STOP, 19)


async def test_a_stream_gives_each_id_once_and_the_same_generation() -> None:
    async with rig() as r:
        async with r.client.stream(request(1, 2, 3)) as stream:
            chunks = await collect(stream)
        whole = await r.client.generate(request(1, 2, 3))
    assert np.concatenate([chunk.output_ids for chunk in chunks]).tolist() == list(range(10, 20))
    assert len(chunks) > 1
    last = chunks[-1].generation
    assert last is not None
    np.testing.assert_array_equal(last.output_logprobs, whole.output_logprobs)
    assert all(chunk.generation is None for chunk in chunks[:-1])


@pytest.mark.parametrize(("fault", "error"), FAULTS.items())
async def test_every_fault_on_the_wire_ends_in_its_named_error(fault: Fault, error: type[ServerError]) -> None:
    patience = 0.3 if error is ServerTimeout else 60
    async with rig(lambda _: ScriptedReply(output=[4, 5, 6, 7], fault=fault), request_timeout_s=patience) as r:
        with anyio.fail_after(300):
            with pytest.raises(ServerError) as called:
                await r.client.generate(request())
            with pytest.raises(ServerError) as streamed:
                await drain(r.client, request())
    assert type(called.value) is error
    stream_errors = (ReplyError, ServerUnavailable) if fault in (Fault.NOT_JSON, Fault.NO_FINISH) else (error,)
    assert type(streamed.value) in stream_errors
    assert called.value.url == r.http.url
    assert r.http.url in str(called.value)


async def test_a_closed_port_is_unavailable() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ServerUnavailable, match="refused the connection"):
            async with SGLangServer(url, vocab_size=VOCAB):
                pass


async def test_a_half_open_connection_ends_in_the_deadline() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ServerTimeout, match=r"/server_info: agentrl waited for the server's version \(deadline 0.1 s\)"):
            async with SGLangServer(url, vocab_size=VOCAB, control_timeout_s=0.1):
                pass


async def test_what_is_not_a_server_is_told_apart() -> None:
    async with rig() as r:
        r.script.control_faults["connect"] = Fault.NOT_JSON
        with pytest.raises(ReplyError, match=r"/server_info breaks the protocol.*begins with '<html>"):
            await r.client.connect()


async def test_the_key_is_sent_and_its_lack_explained() -> None:
    scripted = ScriptedServer(lambda _: [4], vocab_size=VOCAB)
    async with serve_scripted(scripted, api_key="secret") as http:
        async with SGLangServer(http.url, vocab_size=VOCAB, api_key="secret") as client:
            assert (await client.generate(request())).output_ids.tolist() == [4]
        with pytest.raises(RequestRejected, match=r"HTTP 401.*inference.api_key_env"):
            async with SGLangServer(http.url, vocab_size=VOCAB):
                pass


@pytest.mark.parametrize("request_id", ["", "ep-1", "a" * 31, "a" * 33, "A" * 32, "g" * 32, "a" * 32 + "\n", f" {'a' * 31}"])
async def test_ids_of_which_one_could_begin_with_another_are_not_sent(request_id: str) -> None:
    async with rig() as r:
        sent = replace(request(), request_id=request_id)
        with pytest.raises(InvariantError, match=r"request id .* expected 32 lower-case hex digits"):
            await r.client.generate(sent)
        with pytest.raises(InvariantError, match=r"request id .* expected 32 lower-case hex digits"):
            await drain(r.client, sent)
        assert r.http.bodies("/generate") == []


async def test_cancelling_a_call_aborts_it_at_the_server() -> None:
    hold = Hold(at=2)
    async with rig(lambda _: ScriptedReply(output=range(10, 20), holds=(hold,))) as r:
        sent = request()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(r.client.generate, sent)
            await hold.reached.wait()
            assert r.client.in_flight == 1
            tasks.cancel_scope.cancel()
        assert r.http.bodies("/abort_request") == [{"rid": sent.request_id}]
        assert sent.request_id in r.script.aborted
        assert r.client.in_flight == 0


async def test_a_deadline_aborts_the_call_at_the_server_too() -> None:
    hold = Hold()
    async with rig(lambda _: ScriptedReply(output=[4], holds=(hold,)), request_timeout_s=0.1) as r:
        with pytest.raises(
            ServerTimeout, match=r"episode 'e' \(3 tokens, at most 64 more\) got no answer; it was at the server"
        ):
            await r.client.generate(request())
        assert len(r.http.bodies("/abort_request")) == 1


async def test_leaving_a_stream_early_aborts_it_at_the_server() -> None:
    hold = Hold(at=2)
    async with rig(lambda _: ScriptedReply(output=range(10, 20), holds=(hold,))) as r:
        sent = request()
        async with r.client.stream(sent) as stream:
            await anext(stream)
        assert r.http.bodies("/abort_request") == [{"rid": sent.request_id}]
        assert (await r.client.check()) == 0


async def test_cancelling_a_stream_aborts_it_at_the_server() -> None:
    hold = Hold(at=2)
    async with rig(lambda _: ScriptedReply(output=range(10, 20), holds=(hold,))) as r:
        sent = request()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(drain, r.client, sent)
            await hold.reached.wait()
            tasks.cancel_scope.cancel()
        assert r.http.bodies("/abort_request") == [{"rid": sent.request_id}]


@pytest.mark.parametrize("played", [4, 0])
async def test_an_aborted_call_returns_what_it_has(played: int) -> None:
    hold = Hold(at=played)
    async with rig(lambda _: ScriptedReply(output=range(10, 20), holds=(hold,))) as r:
        sent = request()
        results: list[Generation] = []

        async def call() -> None:
            results.append(await r.client.generate(sent))

        with anyio.fail_after(300):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(call)
                await hold.reached.wait()
                await r.client.abort(sent.request_id)
        assert results[0].stop_reason is StopReason.ABORT
        assert results[0].output_ids.tolist() == [10, 11, 12, 13][:played]
        assert [(span.start, span.end) for span in results[0].spans] == ([(0, played)] if played else [])
        await r.client.abort(uuid4().hex)  # unknown: nothing happens


async def test_a_call_aborted_while_held_back_returns_nothing_and_is_never_sent() -> None:
    async with rig() as r:
        sent = request()
        results: list[Generation] = []

        async def call() -> None:
            results.append(await r.client.generate(sent))

        await r.client.pause("retract")
        with anyio.fail_after(300):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(call)
                await anyio.wait_all_tasks_blocked()
                await r.client.abort(sent.request_id)
        await r.client.resume()
        assert (results[0].stop_reason, results[0].output_ids.tolist()) == (StopReason.ABORT, [])
        assert r.http.bodies("/generate") == []


async def test_a_server_side_abort_is_sent_again_with_what_was_sampled() -> None:
    async with rig(lambda _: ScriptedReply(output=range(10, 20), fault=Fault.ABORT)) as r:
        generation = await r.client.generate(request(1, 2, 3, max_new_tokens=30))
        first, second = r.http.bodies("/generate")
    assert generation.output_ids.tolist() == list(range(10, 20))
    assert second["input_ids"] == [1, 2, 3, 10, 11, 12, 13, 14]
    assert second["sampling_params"]["max_new_tokens"] == 25
    assert first["rid"] != second["rid"]


@pytest.mark.parametrize("seed", [11, 2**63 - 3, -(2**63)])
async def test_the_rest_of_an_interrupted_call_draws_noise_of_its_own(seed: int) -> None:
    async with rig(lambda _: ScriptedReply(output=range(10, 20), fault=Fault.ABORT)) as r:
        sent = request(1, 2, 3, max_new_tokens=30)
        await r.client.generate(replace(sent, sampling=replace(sent.sampling, seed=seed)))
        first, rest = (body["sampling_params"]["sampling_seed"] for body in r.http.bodies("/generate"))
    assert first == seed
    assert rest != seed
    assert -(2**63) <= rest < 2**63


@pytest.mark.parametrize("seed", [0, 5, 2**63 - 2])
def test_no_two_pieces_of_a_call_draw_the_same_noise(seed: int) -> None:
    sent = request(1, 2, 3, max_new_tokens=30)
    assembly = Assembly(replace(sent, sampling=replace(sent.sampling, seed=seed)), "http://server")
    ids, logprobs, spans = np.array([7], np.int32), np.array([-1.0], np.float32), (VersionSpan(0, 1, 1),)
    piece = GenerateReply(output_ids=ids, output_logprobs=logprobs, spans=spans, finish="abort")
    seeds: list[int] = []
    for _ in range(4):
        seeds.append(json.loads(assembly.body()[1])["sampling_params"]["sampling_seed"])
        assembly.take(piece, caller_aborted=False)
    assert len({seed, *seeds}) == 4


async def test_a_stream_goes_on_after_a_server_side_abort() -> None:
    script: Script = lambda _: ScriptedReply(output=range(10, 20), fault=Fault.ABORT)  # noqa: E731
    async with rig(script) as r, r.client.stream(request(1, 2, 3)) as stream:
        chunks = await collect(stream)
    assert np.concatenate([chunk.output_ids for chunk in chunks]).tolist() == list(range(10, 20))


async def test_in_place_never_flushes_and_salts_the_cache_instead(tmp_path: Path) -> None:
    async with rig() as r:
        await r.client.pause("in_place")
        await r.client.load_weights(replace(stored(tmp_path, 1), checksum="c0ffee"))
        await r.client.resume()
        await r.client.generate(request())
        assert r.http.bodies("/pause_generation") == [{"mode": "in_place"}]
        assert r.http.bodies("/update_weights_from_disk")[0]["flush_cache"] is False
        assert r.http.bodies("/generate")[0]["cache_salt"] == "v1-c0ffee"


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_an_update_is_these_calls_and_no_other(mode: str, tmp_path: Path) -> None:
    async with rig() as r:
        connected = len(r.http.seen)
        await r.client.pause("retract" if mode == "retract" else "in_place")
        await r.client.load_weights(stored(tmp_path, 1))
        await r.client.resume()
        # /update_weight_version is not among them: it would abort every call in flight.
        assert [path for path, _ in r.http.seen[connected:]] == [
            "/pause_generation",
            "/update_weights_from_disk",
            "/model_info",
            "/continue_generation",
        ]
        assert r.http.bodies("/update_weights_from_disk") == [
            {
                "model_path": str(tmp_path),
                "weight_version": "1",
                "flush_cache": mode == "retract",
                "abort_all_requests": False,
            }
        ]


async def test_weights_are_not_changed_without_a_pause(tmp_path: Path) -> None:
    async with rig() as r:
        with pytest.raises(InvariantError, match=r"call pause\(\) before"):
            await r.client.load_weights(stored(tmp_path, 1))
        assert r.http.bodies("/update_weights_from_disk") == []


async def test_a_refused_update_says_why() -> None:
    async with rig() as r:
        r.script.control_faults["load_weights"] = Fault.BAD_REQUEST
        await r.client.pause("retract")
        with pytest.raises(WeightSyncError, match=r"did not load weights of version 1 from gone: .*HTTP 400: scripted"):
            await r.client.load_weights(publication(1, path="gone"))
        await r.client.resume()


async def test_no_abort_is_sent_while_paused_but_after_it() -> None:
    hold = Hold(at=2)
    async with rig(lambda _: ScriptedReply(output=range(10, 20), holds=(hold,))) as r:
        sent = request()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(r.client.generate, sent)
            await hold.reached.wait()
            await r.client.pause("retract")
            tasks.cancel_scope.cancel()
        assert r.http.bodies("/abort_request") == []
        with anyio.CancelScope(shield=True):
            await r.client.resume()
        assert r.http.bodies("/abort_request") == [{"rid": sent.request_id}]


@pytest.mark.parametrize("waits", [True, False])
async def test_a_stream_aborted_while_paused_ends_although_the_server_does_not_hear_of_it(waits: bool) -> None:
    hold = Hold(at=2)
    async with rig(lambda _: ScriptedReply(output=range(10, 20), holds=(hold,))) as r:
        sent = request()
        with anyio.fail_after(300):
            async with r.client.stream(sent) as stream:
                await anext(stream)
                await hold.reached.wait()
                await anext(stream)
                await r.client.pause("retract")
                async with anyio.create_task_group() as tasks:
                    if waits:
                        tasks.start_soon(r.client.abort, sent.request_id)
                    else:
                        await r.client.abort(sent.request_id)
                    with pytest.raises(ServerUnavailable, match="was aborted before the server reported"):
                        await anext(stream)
        assert r.http.bodies("/abort_request") == []
        assert r.client.in_flight == 0
        await r.client.resume()


async def test_nothing_is_sent_while_paused() -> None:
    async with rig() as r:
        await r.client.pause("retract")
        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(r.client.generate, request())
            await anyio.wait_all_tasks_blocked()
            assert r.http.bodies("/generate") == []
            await r.client.resume()
        assert len(r.http.bodies("/generate")) == 5


async def test_a_call_that_a_pause_stops_too_long_says_that_it_was_at_the_server() -> None:
    hold = Hold(at=1)
    async with rig(lambda _: ScriptedReply(output=[4, 19], holds=(hold,)), request_timeout_s=1) as r:

        async def pause() -> None:
            await hold.reached.wait()
            await r.client.pause("retract")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pause)
            with pytest.raises(ServerTimeout, match="it was at the server"):
                await r.client.generate(request())
        await r.client.resume()


async def test_a_call_held_back_too_long_says_that_the_server_is_paused() -> None:
    async with rig(request_timeout_s=0.05) as r:
        await r.client.pause("retract")
        with pytest.raises(ServerTimeout, match="agentrl held it back, because the server is paused"):
            await r.client.generate(request())
        await r.client.resume()


@pytest.mark.parametrize("call", ["pause", "resume", "load_weights", "checksums", "check"])
async def test_every_control_call_has_a_deadline_that_says_what_was_waited_for(call: str, tmp_path: Path) -> None:
    async with rig() as r:
        client = Impatient(r.http.url, vocab_size=VOCAB)
        calls = {
            "pause": lambda: client.pause("retract"),
            "load_weights": lambda: client.load_weights(stored(tmp_path, 1)),
        }
        async with client:
            await client.pause("retract")
            r.script.control_faults[call] = Fault.HANG  # pyright: ignore[reportArgumentType] - parametrized
            with client.waiting_only(0.3), pytest.raises(ServerTimeout, match=r"waited for .*\(deadline 0.3 s\)"):
                await calls.get(call, getattr(client, call, client.resume))()


@pytest.mark.parametrize("call", ["connect", "check", "checksums", "score", "pause", "resume", "load_weights"])
async def test_a_cancelled_control_call_leaves_the_client_usable(call: str, tmp_path: Path) -> None:
    async with rig() as r:
        await r.client.pause("retract")
        if call != "score":
            r.script.control_faults[call] = Fault.HANG  # pyright: ignore[reportArgumentType] - parametrized
        arguments = {"score": [np.array([1, 2], np.int32)], "pause": ["retract"], "load_weights": [stored(tmp_path, 1)]}
        with anyio.move_on_after(0.05):
            await getattr(r.client, call)(*arguments.get(call, []))
        r.script.control_faults.clear()
        await r.client.resume()
        assert len((await r.client.generate(request())).output_ids) == 10


async def test_a_call_that_has_ended_keeps_nothing_until_a_garbage_collection() -> None:
    async with rig() as r:
        gc.collect()
        gc.disable()
        try:
            sent, streamed = request(), request()
            pieces = [sent.context.packed[0], streamed.context.packed[0]]
            before = [sys.getrefcount(piece) for piece in pieces]
            await r.client.generate(sent)
            await drain(r.client, streamed)
            del sent, streamed
            with anyio.fail_after(300):  # what the event loop has yet to do may hold them for a turn
                while [sys.getrefcount(piece) for piece in pieces] != [count - 1 for count in before]:
                    await anyio.lowlevel.checkpoint()
        finally:
            gc.enable()


async def test_a_request_id_is_in_use_until_the_server_has_heard_that_nobody_waits() -> None:
    hold = Hold(at=1)
    async with rig(lambda _: ScriptedReply(output=[4, 19], holds=(hold,))) as r, anyio.create_task_group() as tasks:
        r.script.control_faults["score"] = Fault.HANG  # and whatever has no name of its own: aborts
        sent = request()

        async def leave_early() -> None:
            async with r.client.stream(sent) as stream:
                await anext(stream)

        tasks.start_soon(leave_early)
        with anyio.fail_after(300):
            while not r.http.bodies("/abort_request"):  # noqa: ASYNC110 - what arrived at the server is observed
                await anyio.sleep(0.002)
        with pytest.raises(RequestRejected, match="is in use"):
            await r.client.generate(sent)


async def test_a_request_id_is_used_once_at_a_time() -> None:
    hold = Hold()
    async with rig(lambda _: ScriptedReply(output=[4], holds=(hold,))) as r:
        sent = request()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(r.client.generate, sent)
            await hold.reached.wait()
            with pytest.raises(RequestRejected, match="is in use"):
                await r.client.generate(sent)
            hold.release.set()
