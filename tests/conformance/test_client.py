"""agentrl's own client against both servers: what it promises holds whichever of them answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import NamedTuple

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from anyio.abc import TaskGroup

from agentrl.client import Client, EpisodeSettings, PolicyBackend, SamplingConfig
from agentrl.errors import ConfigError, EpisodeLimit, RequestRejected
from agentrl.inference.backend import CONTEXT_HEADROOM, Probe, SamplingParams
from agentrl.inference.config import InferenceConfig
from agentrl.inference.launch.pool import launch_pool
from agentrl.inference.pool.pool import ServerPool
from agentrl.inference.sglang.server import SGLangServer
from agentrl.tokens.renderer import Renderer
from agentrl.types import StopReason
from tests.support.api import Api
from tests.support.calls import ENDLESS, Call, ask, begin, begin_whole, give_up_update
from tests.support.embedded import ReferenceModel
from tests.support.servers import CONTROL_S, RunningServer, publication
from tests.support.tap import Tap, tapped

pytestmark = pytest.mark.starts

PROMPT = [5, 6, 7, 8]
TOLERANCE = 1e-5


@pytest.fixture
async def client(server: RunningServer) -> AsyncGenerator[SGLangServer]:
    async with SGLangServer(server.url, vocab_size=server.vocab_size, control_timeout_s=CONTROL_S) as connected:
        yield connected


class TappedClient(NamedTuple):
    client: SGLangServer
    tap: Tap


@pytest.fixture
async def tapped_client(server: RunningServer) -> AsyncGenerator[TappedClient]:
    async with (
        tapped(server.url) as tap,
        SGLangServer(tap.url, vocab_size=server.vocab_size, control_timeout_s=CONTROL_S) as connected,
    ):
        yield TappedClient(connected, tap)


@pytest.fixture(scope="session")
def references(checkpoints: dict[int, Path]) -> list[ReferenceModel]:
    return [ReferenceModel(checkpoints[version]) for version in (0, 1)]


async def test_a_generation_is_what_the_model_says(client: SGLangServer, references: list[ReferenceModel]) -> None:
    generation = await client.generate(ask(PROMPT, 40, sampling=SamplingParams(max_new_tokens=40, temperature=0.7)))
    expected = references[0].logprobs([*PROMPT, *generation.output_ids.tolist()], 0.7)[len(PROMPT) :]
    assert np.abs(generation.output_logprobs - expected).max() < TOLERANCE
    assert [(span.start, span.end, span.version) for span in generation.spans] == [(0, len(generation.output_ids), 0)]
    assert generation.stop_reason in (StopReason.LENGTH, StopReason.STOP)
    assert (client.version, client.info.version, await client.check()) == (0, "0.5.23", 0)


async def test_stops_are_reported(client: SGLangServer) -> None:
    greedy = SamplingParams(max_new_tokens=12, temperature=0, ignore_eos=True)
    free = await client.generate(ask(PROMPT, 12, sampling=greedy))
    token = int(free.output_ids[4])
    sampling = SamplingParams(max_new_tokens=12, temperature=0, stop_token_ids=(token,))
    cut = await client.generate(ask(PROMPT, 12, sampling=sampling))
    assert (cut.stop_reason, cut.matched_stop, int(cut.output_ids[-1])) == (StopReason.STOP, token, token)
    assert (free.stop_reason, free.matched_stop, len(free.output_ids)) == (StopReason.LENGTH, None, 12)


async def test_a_second_turn_reuses_the_first(client: SGLangServer) -> None:
    first = await client.generate(ask(list(range(40, 80)), 20))
    context = [*range(40, 80), *first.output_ids.tolist()]
    second = await client.generate(ask([*context, 7, 8], 4))
    assert (first.cached_tokens, second.cached_tokens) == (0, len(context) - 1)


async def test_every_length_up_to_the_promised_context_is_served(client: SGLangServer, server: RunningServer) -> None:
    promised = client.max_context_tokens or 0
    assert promised == server.context - CONTEXT_HEADROOM
    for room in (1, 2, 7, 8, 40):
        generation = await client.generate(ask([1] * (promised - room), room))
        assert (len(generation.output_ids), generation.stop_reason) == (room, StopReason.LENGTH)


async def test_episodes_on_a_server_that_was_running_end_with_their_context_and_not_with_a_rejection(
    server: RunningServer, tmp_path: Path
) -> None:
    renderer = Renderer.load(server.checkpoints[0])
    assert renderer.max_context is not None
    config = InferenceConfig(urls=(server.url,))
    async with launch_pool(config, model_path="", vocab_size=renderer.vocab_size, log_dir=tmp_path) as pool:
        fitted = renderer.within(pool.max_context_tokens)
        limit = fitted.max_context or 0
        assert limit == min(renderer.max_context, server.context - CONTEXT_HEADROOM)
        sampling = SamplingConfig()
        for left in range(1, CONTEXT_HEADROOM + 2):
            episode = Client(PolicyBackend(pool, fitted, sampling, EpisodeSettings(episode_id=f"e{left}", task_id="t")))
            generation = await episode.generate([1] * (limit - left), ignore_eos=True)
            assert (len(generation.output_ids), generation.stop_reason) == (left, StopReason.LENGTH)
            with pytest.raises(EpisodeLimit, match="no room"):
                await episode.generate([1] * limit)


async def test_a_context_longer_than_the_servers_take_is_refused_at_the_start(server: RunningServer, tmp_path: Path) -> None:
    config = InferenceConfig(urls=(server.url,), max_context_tokens=server.context)
    with pytest.raises(ConfigError, match=f"max_context_tokens: {server.context} is more than the"):
        async with launch_pool(config, model_path="", vocab_size=server.vocab_size, log_dir=tmp_path):
            pass


async def test_what_the_server_refuses_is_a_rejection(client: SGLangServer, server: RunningServer) -> None:
    with pytest.raises(RequestRejected, match="context"):
        await client.generate(ask([1] * server.context, 1))
    with pytest.raises(RequestRejected, match="context"):
        async with client.stream(ask([1] * server.context, 1)) as chunks:
            await anext(aiter(chunks))
    with pytest.raises(RequestRejected, match="outside the vocabulary"):
        await client.generate(ask([server.vocab_size], 1))


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_calls_go_on_across_an_update_and_say_which_tokens_are_whose(
    mode: str, client: SGLangServer, server: RunningServer, tasks: TaskGroup, references: list[ReferenceModel]
) -> None:
    exact = mode == "retract"
    calls = [begin(tasks, client, [5, 6, 7 + at]) for at in range(2)]
    for call in calls:
        await call.more(10)
    await client.pause("retract" if exact else "in_place")
    late = Call(client, ask([5, 6, 7], 10))
    tasks.start_soon(late.run)
    await client.load_weights(publication(server, 1))
    assert (client.in_flight, late.tokens) == (2, 0)
    await client.resume()
    for at, call in enumerate(calls):
        await call.more(10)
        await client.abort(call.request.request_id)
        generation = await call.finished()
        first, second = generation.spans
        assert (first.version, second.version, second.end) == (0, 1, len(generation.output_ids))
        assert generation.num_retractions == int(exact)
        ids = [5, 6, 7 + at, *generation.output_ids.tolist()]
        for span in generation.spans[: 2 if exact else 1]:
            expected = references[span.version].logprobs(ids)[3 + span.start : 3 + span.end]
            assert np.abs(generation.output_logprobs[span.start : span.end] - expected).max() < TOLERANCE
    held = await late.finished()
    assert [(span.start, span.end, span.version) for span in held.spans] == [(0, 10, 1)]
    assert (client.version, await client.check()) == (1, 1)


async def test_an_update_that_is_given_up_is_waited_out_before_the_next(
    tapped_client: TappedClient, server: RunningServer, references: list[ReferenceModel]
) -> None:
    client, tap = tapped_client
    for version in range(2, 8):
        await client.pause("retract")
        await give_up_update(client, tap, publication(server, 1))
        await client.load_weights(publication(server, version, checkpoint=0))
        await client.resume()
        generation = await client.generate(ask(PROMPT, 4))
        assert [span.version for span in generation.spans] == [version]
        expected = references[0].logprobs([*PROMPT, *generation.output_ids.tolist()])[len(PROMPT) :]
        assert np.abs(generation.output_logprobs - expected).max() < TOLERANCE


@pytest.mark.parametrize("paused", [False, True])
async def test_a_call_goes_on_with_what_it_has_when_somebody_else_aborts_it(
    paused: bool,
    tapped_client: TappedClient,
    api: Api,
    server: RunningServer,
    tasks: TaskGroup,
    references: list[ReferenceModel],
) -> None:
    client, tap = tapped_client
    shorter = server.tokens_of_a_second
    longer = shorter + 600
    whole = begin_whole(tasks, client, [5, 6, 7], longer)
    streamed = begin(tasks, client, [5, 6, 8], shorter)
    await streamed.more(120)
    await api.until(lambda load: load["num_running_reqs"] == 2, "both run")
    if paused:
        await client.pause("retract")
    for request in (whole.request, streamed.request):
        await api.post("/abort_request", {"rid": request.request_id})
    if paused:
        await client.resume()
    for call, room in ((whole, longer), (streamed, shorter)):
        generation = await call.finished()
        assert (len(generation.output_ids), generation.stop_reason) == (room, StopReason.LENGTH)
        assert [(span.start, span.end, span.version) for span in generation.spans] == [(0, room, 0)]
        context, ids = call.request.input_ids.tolist(), generation.output_ids.tolist()
        expected = references[0].logprobs([*context, *ids])[len(context) :]
        assert np.abs(generation.output_logprobs - expected).max() < TOLERANCE
        first, second = tap.pieces(call.request)
        assert first.output_ids + second.output_ids == tuple(ids)
    assert streamed.tokens == shorter


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_no_new_request_uses_what_former_weights_computed(
    mode: str, client: SGLangServer, server: RunningServer, references: list[ReferenceModel]
) -> None:
    context = list(range(40, 100))
    for version, reference in ((0, references[0]), (1, references[1])):
        if version:
            await client.pause("retract" if mode == "retract" else "in_place")
            await client.load_weights(publication(server, version))
            await client.resume()
        generations = [await client.generate(ask(context, 8)) for _ in range(2)]
        assert [generation.cached_tokens for generation in generations] == [0, 59]
        for generation in generations:
            expected = reference.logprobs([*context, *generation.output_ids.tolist()])[len(context) :]
            assert np.abs(generation.output_logprobs - expected).max() < TOLERANCE


async def test_scores_and_digests_follow_the_weights(
    client: SGLangServer, server: RunningServer, references: list[ReferenceModel]
) -> None:
    ids = np.arange(20, 60, dtype=np.int32)
    seen: list[object] = []
    for version in (1, 0):
        await client.pause("retract")
        await client.load_weights(publication(server, version))
        await client.resume()
        assert np.abs(await client.score(ids) - references[version].logprobs(ids.tolist())[1:]).max() < TOLERANCE
        seen.append(await client.checksums())
    assert seen[0] != seen[1]
    kind = "agentrl" if server.kind == "embedded" else "sglang 0.5.23"
    assert client.checksum_kind == kind
    if kind == "agentrl":
        assert seen == [publication(server, version).tensor_checksums for version in (1, 0)]


async def test_an_abort_returns_what_there_is(client: SGLangServer, tasks: TaskGroup) -> None:
    call = begin(tasks, client, PROMPT)
    await call.more(5)
    await client.abort(call.request.request_id)
    generation = await call.finished()
    assert generation.stop_reason is StopReason.ABORT
    assert 5 <= len(generation.output_ids) == len(generation.output_logprobs) < ENDLESS


async def test_a_call_that_is_cancelled_ends_at_the_server(client: SGLangServer, api: Api) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(client.generate, ask(PROMPT, ENDLESS))
        await api.until(lambda load: load["num_running_reqs"] == 1, "the call runs")
        group.cancel_scope.cancel()
    await api.idle()


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_a_call_aborted_during_a_pause_ends_at_once_and_nothing_of_it_runs_on(
    mode: str, client: SGLangServer, api: Api, tasks: TaskGroup
) -> None:
    running = begin_whole(tasks, client, PROMPT)
    await api.until(lambda load: load["num_running_reqs"] == 1, "the call runs")
    await client.pause("retract" if mode == "retract" else "in_place")
    held = begin_whole(tasks, client, [5, 6])
    await anyio.lowlevel.checkpoint()
    for call in (running, held):
        await client.abort(call.request.request_id)
        assert (await call.finished()).stop_reason is StopReason.ABORT
    await client.resume()
    await api.idle()


async def test_a_pool_updates_its_server_and_proves_it(
    server: RunningServer, tasks: TaskGroup, references: list[ReferenceModel]
) -> None:
    ids = np.arange(20, 60, dtype=np.int32)
    probe = Probe(token_ids=ids, logprobs=references[1].logprobs(ids.tolist())[1:].astype(np.float32))
    config = InferenceConfig(urls=(server.url,), health_interval_s=3600.0)
    one = SGLangServer(server.url, vocab_size=server.vocab_size)
    async with ServerPool([one], config) as pool:
        call = begin(tasks, one, PROMPT)
        await call.more(10)
        report = await pool.update_weights(publication(server, 1), probe)
        assert (report.version, report.updated, pool.policy_version) == (1, (server.url,), 1)
        assert report.probe_difference is not None
        assert report.probe_difference < TOLERANCE
        await call.more(10)
        await one.abort(call.request.request_id)
        assert [span.version for span in (await call.finished()).spans] == [0, 1]
        generation = await pool.generate(ask(PROMPT, 3))
        assert [span.version for span in generation.spans] == [1]


async def test_the_load_reaches_the_client(client: SGLangServer, tasks: TaskGroup) -> None:
    call = begin(tasks, client, PROMPT)
    (load,) = await client.loads()
    with anyio.fail_after(CONTROL_S):
        while load.num_running_reqs != 1:  # SGLang tells what it last published
            (load,) = await client.loads()
    assert load.max_total_num_tokens > 0
    await client.abort(call.request.request_id)
    await call.finished()
    with anyio.fail_after(CONTROL_S):
        while load.num_running_reqs:
            (load,) = await client.loads()
