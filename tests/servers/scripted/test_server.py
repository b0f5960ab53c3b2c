"""The scripted server, in process, under both event loops: replies, faults, holds, versions, cancellation."""

from __future__ import annotations

import anyio
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import ConfigError, RequestRejected, ServerError, ServerTimeout, ServerUnavailable
from agentrl.inference.backend import Generation, Probe
from agentrl.servers.scripted.server import Fault, Hold, ScriptedCall, ScriptedReply, ScriptedServer, scripted_logprobs
from agentrl.support.concurrency import task_group
from agentrl.types import StopReason
from tests.support.scripted import FAULTS, VOCAB, publication, request


def encode(text: str) -> list[int]:
    return list(text.encode())


async def drain(server: ScriptedServer) -> None:
    async with server.stream(request()) as chunks:
        async for _ in chunks:
            pass


async def test_each_episode_gets_the_texts_in_order() -> None:
    server = ScriptedServer.from_texts(encode, ["first", "second"], vocab_size=VOCAB, eos_id=299)
    for episode in ("a", "b"):
        for text in ("first", "second"):
            generation = await server.generate(request(episode=episode))
            assert bytes(generation.output_ids[:-1].tolist()).decode() == text
            assert (generation.stop_reason, generation.matched_stop) == (StopReason.STOP, 299)
    with pytest.raises(RequestRejected, match="the script has 2 turns; episode 'a' asked for one more"):
        await server.generate(request(episode="a"))


@pytest.mark.parametrize(("fault", "error"), FAULTS.items())
async def test_every_fault_ends_in_its_named_error(fault: Fault, error: type[ServerError]) -> None:
    timeout_s = 0.05 if error is ServerTimeout else 60
    server = ScriptedServer(lambda _: ScriptedReply(output=[4, 5], fault=fault), vocab_size=VOCAB, timeout_s=timeout_s)
    with anyio.fail_after(300):
        with pytest.raises(ServerError) as caught:
            await server.generate(request())
        with pytest.raises(ServerError) as streamed:
            await drain(server)
    assert type(caught.value) is error
    assert type(streamed.value) is error


async def test_a_reply_that_was_aborted_is_taken_up_by_its_own_episode() -> None:
    def script(call: ScriptedCall) -> ScriptedReply:
        return ScriptedReply(output=[10 + int(call.episode_id)], fault=Fault.ABORT)  # before its only token

    server = ScriptedServer(script, vocab_size=VOCAB)
    sampled: dict[int, list[int]] = {}

    async def call(episode: int) -> None:
        sampled[episode] = (await server.generate(request(episode=str(episode)))).output_ids.tolist()

    async with anyio.create_task_group() as tasks:
        for episode in range(4):
            tasks.start_soon(call, episode)
    assert sampled == {episode: [10 + episode] for episode in range(4)}
    assert len(server.calls) == 4


async def test_a_cancelled_update_continues_the_server() -> None:
    server = ScriptedServer(lambda _: [4], vocab_size=VOCAB)
    server.control_faults["load_weights"] = Fault.HANG
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.update_weights, publication(1))
        await anyio.wait_all_tasks_blocked()
        assert server.paused
        tasks.cancel_scope.cancel()
    assert not server.paused
    assert (await server.generate(request())).spans[0].version == 0


async def test_the_probe_tells_other_weights() -> None:
    server = ScriptedServer(lambda _: [4], vocab_size=VOCAB)
    ids = np.array([1, 5, 9], np.int32)
    report = await server.update_weights(publication(2), Probe(token_ids=ids, logprobs=scripted_logprobs(ids, version=2)))
    assert report.probe_difference == 0
    with pytest.raises(RuntimeError, match="probe differs"):
        await server.update_weights(publication(3), Probe(token_ids=ids, logprobs=scripted_logprobs(ids, version=2)))


async def test_a_dead_server_ends_its_calls_and_refuses_new_ones_until_revived() -> None:
    hold = Hold()
    server = ScriptedServer(lambda _: ScriptedReply(output=[4], holds=(hold,)), vocab_size=VOCAB)

    async def kill() -> None:
        async with task_group() as tasks:
            tasks.start_soon(server.generate, request())
            await hold.reached.wait()
            server.die("kill -9")

    with anyio.fail_after(300), pytest.raises(ServerUnavailable, match="kill -9"):
        await kill()
    with pytest.raises(ServerUnavailable):
        await server.check()
    server.revive()
    hold.release.set()
    assert (await server.generate(request())).output_ids.tolist() == [4]


async def test_a_script_that_cannot_be_played_is_a_config_error() -> None:
    for answer in ("text without encode", [], [VOCAB]):
        server = ScriptedServer(lambda _, answer=answer: answer, vocab_size=VOCAB)
        with pytest.raises(ConfigError):
            await server.generate(request())


@given(
    output=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20),
    swaps=st.lists(st.integers(0, 19), max_size=4, unique=True),
)
def test_whenever_weights_are_swapped_every_token_has_the_log_prob_of_its_version(
    output: list[int], swaps: list[int]
) -> None:
    holds = tuple(Hold(at=at) for at in sorted(swaps) if at < len(output))
    server = ScriptedServer(lambda _: ScriptedReply(output=output, holds=holds), vocab_size=VOCAB)

    async def run() -> Generation:
        result: list[Generation] = []

        async def call() -> None:
            result.append(await server.generate(request(1, 2)))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call)
            for version, hold in enumerate(holds, start=1):
                await hold.reached.wait()
                await server.update_weights(publication(version))
                hold.release.set()
        return result[0]

    generation = anyio.run(run)
    assert generation.output_ids.tolist() == output
    assert [update.version for update in server.updates] == list(range(1, len(holds) + 1))
    ids = np.array([2, *output], np.int32)
    for span in generation.spans:
        expected = scripted_logprobs(ids, span.version)[span.start : span.end]
        np.testing.assert_array_equal(generation.output_logprobs[span.start : span.end], expected)
    assert [span.version for span in generation.spans] == sorted({span.version for span in generation.spans})
