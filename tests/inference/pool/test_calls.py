"""The pool's model calls: affinity, load, retries, eviction and return, under both event loops."""

from __future__ import annotations

import anyio
import numpy as np
import pytest
import trio.testing

from agentrl.errors import ReplyError, RequestRejected, ServerError, ServerTimeout, ServerUnavailable
from agentrl.inference.backend import Generation, GenerationChunk
from agentrl.inference.pool.members import State
from agentrl.inference.pool.pool import ServerPool
from agentrl.servers.scripted.server import ControlCall, Fault, Hold, Script, ScriptedCall, ScriptedReply, ScriptedServer
from tests.support.scripted import OFTEN, VOCAB, all_serving, in_virtual_time, pool_of, publication, request, seen


def server(script: Script | None = None, number: int = 0, **settings: float) -> ScriptedServer:
    settings = {"timeout_s": 60.0, **settings}
    return ScriptedServer(script or (lambda _: [10 + number]), vocab_size=VOCAB, url=f"scripted://{number}", **settings)  # pyright: ignore[reportArgumentType] - test data


async def until(pool: ServerPool, url: str, state: State) -> None:
    await seen(pool, lambda status: any(one.url == url and one.state is state for one in status.servers))


async def test_an_episode_stays_on_its_server_until_released() -> None:
    servers = [server(number=n) for n in range(3)]
    async with pool_of(*servers) as pool:
        for _ in range(4):
            for episode in ("a", "b", "c"):
                await pool.generate(request(episode=episode))
        assert [len(s.calls) for s in servers] == [4, 4, 4]
        assert all(len({call.episode_id for call in s.calls}) == 1 for s in servers)
        assert [s.sessions for s in pool.describe().servers] == [1, 1, 1]
        for episode in ("a", "b", "c", "unknown"):
            pool.release(episode)
        assert [s.sessions for s in pool.describe().servers] == [0, 0, 0]


async def test_new_episodes_go_where_the_fewest_calls_are_in_flight() -> None:
    holds = [Hold() for _ in range(6)]
    servers = [server(lambda call: ScriptedReply(output=[1], holds=(holds[int(call.episode_id)],)), n) for n in range(2)]
    async with pool_of(*servers) as pool, anyio.create_task_group() as tasks:
        for index, hold in enumerate(holds):
            tasks.start_soon(pool.generate, request(episode=str(index)))
            await hold.reached.wait()
        assert [s.in_flight for s in pool.describe().servers] == [3, 3]
        for hold in holds:
            hold.release.set()
    assert pool.describe().in_flight == 0


async def test_episodes_with_a_long_context_in_common_open_on_the_server_that_holds_it() -> None:
    servers = [server(number=n) for n in range(3)]
    async with pool_of(*servers) as pool:
        for group in range(3):
            for member in range(8):
                await pool.generate(request(*[group] * 300, episode=f"{group}.{member}"))
        assert [len(s.calls) for s in servers] == [8, 8, 8]
        assert all(len({int(call.input_ids[0]) for call in s.calls}) == 1 for s in servers)
        for member in range(20):
            await pool.generate(request(*[0] * 300, episode=f"more.{member}"))
        assert max(s.sessions for s in pool.describe().servers) < 8 + 17


async def test_the_server_of_an_episode_is_told_that_it_ended() -> None:
    servers = [server(number=n) for n in range(2)]
    async with pool_of(*servers) as pool:
        for episode in ("a", "b", "c", "d"):
            await pool.generate(request(episode=episode))
        for episode in ("a", "d", "unknown"):
            pool.release(episode)
        with anyio.fail_after(300):
            while sum(len(s.ended_sessions) for s in servers) < 2:
                await anyio.lowlevel.checkpoint()
        assert [s.ended_sessions for s in servers] == [["a"], ["d"]]


async def test_a_failed_call_is_sent_to_another_server_under_another_id() -> None:
    first, second = server(lambda _: ScriptedReply(fault=Fault.DIE)), server(number=1)
    async with pool_of(first, second) as pool:
        generation = await pool.generate(request())
    assert generation.output_ids.tolist() == [11]
    assert len(first.calls) == len(second.calls) == 1
    assert first.calls[0].request_id != second.calls[0].request_id


async def test_a_server_that_is_alive_after_a_failed_call_stays() -> None:
    faults = [Fault.SERVER_ERROR, None]
    only = server(lambda call: ScriptedReply(output=[4], fault=faults[call.index]))
    async with pool_of(only) as pool:
        assert (await pool.generate(request())).output_ids.tolist() == [4]
        assert pool.describe().servers[0].state is State.SERVING


async def test_retries_end_with_an_error_that_tells_each_failure() -> None:
    only = server(lambda _: ScriptedReply(fault=Fault.SERVER_ERROR))
    async with pool_of(only, request_retries=2) as pool:
        with pytest.raises(ServerUnavailable, match=r"failed 3 times: .*HTTP 500.*; .*HTTP 500.*; .*HTTP 500"):
            await pool.generate(request())
    assert len(only.calls) == 3


def overloaded(retry_after_s: float | None) -> ServerUnavailable:
    error = ServerUnavailable("scripted://0: HTTP 429: slow down", status=429, url="scripted://0")
    error.retry_after_s = retry_after_s
    return error


async def test_a_call_that_an_overloaded_server_refuses_is_sent_again_when_the_server_asked_for_it() -> None:
    def busy_once(call: ScriptedCall) -> ScriptedReply:
        if call.index == 0:
            raise overloaded(0.0)
        return ScriptedReply(output=[4])

    async with pool_of(server(busy_once)) as pool:
        assert (await pool.generate(request())).output_ids.tolist() == [4]


def test_the_only_server_is_left_in_peace_as_long_as_it_asked_for() -> None:
    def busy(call: ScriptedCall) -> ScriptedReply:
        raise overloaded(25.0)

    async def main() -> None:
        only = server(busy)
        async with pool_of(only, request_timeout_s=20) as pool:
            with pytest.raises(ServerTimeout, match="slow down"):
                await pool.generate(request())
            assert pool.describe().servers[0].state is State.SERVING
        assert len(only.calls) == 1

    in_virtual_time(main)


async def test_another_server_takes_the_call_of_an_overloaded_one_at_once() -> None:
    def busy(call: ScriptedCall) -> ScriptedReply:
        raise overloaded(25.0)

    async with pool_of(server(busy), server(number=1), request_timeout_s=60.0) as pool:
        assert (await pool.generate(request())).output_ids.tolist() == [11]


class WithoutDescriptors(ScriptedServer):
    """A server that this process cannot reach, because it has no free file descriptor."""

    checked = 0

    async def check(self) -> int:
        self.checked += 1
        raise ServerError("this process cannot open a connection: Too many open files")


async def test_a_server_is_not_evicted_when_this_process_has_no_free_file_descriptor() -> None:
    only = WithoutDescriptors(lambda _: [4], vocab_size=VOCAB)
    async with pool_of(only, **OFTEN) as pool:
        await seen(pool, lambda _: only.checked > 2)
        assert pool.describe().servers[0].state is State.SERVING


@pytest.mark.parametrize(("fault", "error"), [(Fault.BAD_REQUEST, RequestRejected), (Fault.NAN_LOGPROB, ReplyError)])
async def test_what_another_server_cannot_mend_is_not_sent_again(fault: Fault, error: type[Exception]) -> None:
    servers = [server(lambda _: ScriptedReply(fault=fault), n) for n in range(2)]
    async with pool_of(*servers) as pool:
        with pytest.raises(error):
            await pool.generate(request())
    assert sum(len(s.calls) for s in servers) == 1


async def test_a_server_that_hangs_ends_in_the_deadline_naming_it() -> None:
    only = server(lambda _: ScriptedReply(fault=Fault.HANG), timeout_s=60)
    async with pool_of(only, request_timeout_s=0.05) as pool:
        with pytest.raises(ServerTimeout, match=r"episode 'e' \(3 tokens, at most 64 more\).*waiting for scripted://0"):
            await pool.generate(request())


async def test_a_frozen_server_is_taken_out_and_its_calls_go_elsewhere() -> None:
    first = server(lambda _: ScriptedReply(fault=Fault.HANG), timeout_s=60)
    second = server(number=1)
    async with pool_of(first, second, **OFTEN) as pool:
        first.control_faults["check"] = first.control_faults["connect"] = Fault.HANG
        with anyio.fail_after(300):
            generation = await pool.generate(request())
        assert generation.output_ids.tolist() == [11]
        frozen = pool.describe().servers[0]
        assert frozen.state is State.DEAD
        assert "the pool waited for its health check" in frozen.reason


def test_a_server_is_not_frozen_where_this_process_stood_still() -> None:
    clock = trio.testing.MockClock(autojump_threshold=0)

    class Waiting(ScriptedServer):
        checked = 0

        async def check(self) -> int:
            self.checked += 1
            if self.checked == 1:
                clock.jump(10)  # longer than all health checks of a frozen server
            return await super().check()

    async def main() -> None:
        only = Waiting(lambda _: [4], vocab_size=VOCAB)
        async with pool_of(only, health_interval_s=1) as pool:
            await seen(pool, lambda _: only.checked == 3)
            with anyio.move_on_after(0.5) as frozen:
                await pool.until_frozen(only.url)
            assert frozen.cancelled_caught
            assert pool.describe().servers[0].state is State.SERVING

    in_virtual_time(main, clock)


@pytest.mark.parametrize("stage", ["pause", "load_weights", "checksums", "resume"])
async def test_an_update_gives_up_a_server_that_freezes_and_the_others_get_the_weights(stage: ControlCall) -> None:
    frozen, healthy = server(timeout_s=60), server(number=1)
    async with pool_of(frozen, healthy, **OFTEN) as pool:
        for name in (stage, "check", "connect", "resume"):
            frozen.control_faults[name] = Fault.HANG
        with anyio.fail_after(300):
            report = await pool.update_weights(publication(1))
        assert report.updated == ("scripted://1",)
        assert "the pool waited for its health check" in pool.describe().servers[0].reason
        frozen.control_faults.clear()
        await until(pool, "scripted://0", State.SERVING)
        assert frozen.version == 1


async def test_no_server_left_names_each_and_why() -> None:
    servers = [server(number=n) for n in range(2)]
    async with pool_of(*servers) as pool:
        servers[0].die("killed by the kernel")
        servers[1].die("full disk")
        with pytest.raises(ServerUnavailable, match=r"scripted://0 is dead: .*kernel.*scripted://1 is dead: .*full disk"):
            await pool.generate(request())


async def test_a_reported_death_frees_its_calls_at_once() -> None:
    hold = Hold()
    first = server(lambda _: ScriptedReply(output=[1], holds=(hold,)), timeout_s=60)
    second = server(number=1)
    results: list[Generation] = []
    async with pool_of(first, second, health_interval_s=60) as pool:

        async def call() -> None:
            results.append(await pool.generate(request()))

        with anyio.fail_after(300):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(call)
                await hold.reached.wait()
                pool.report_dead("scripted://0", "exit code -9")
        assert results[0].output_ids.tolist() == [11]


async def test_a_returning_server_gets_the_current_weights_before_it_serves() -> None:
    servers = [server(number=n) for n in range(2)]
    async with pool_of(*servers, **OFTEN) as pool:
        servers[0].die()
        await until(pool, "scripted://0", State.DEAD)
        report = await pool.update_weights(publication(1))
        assert report.updated == ("scripted://1",)
        servers[0].revive(version=0)
        await until(pool, "scripted://0", State.SERVING)
        assert servers[0].version == 1
        assert [update.version for update in servers[0].updates] == [1]
        assert not servers[0].paused
        assert (await pool.generate(request(episode="new"))).spans[0].version == 1


async def test_a_server_restarted_between_two_probes_is_not_believed() -> None:
    first, second = server(), server(number=1)
    async with pool_of(first, second, health_interval_s=60) as pool:
        await pool.update_weights(publication(3))
        first.revive(version=0)  # a new process, with the weights it was started with
        generation = await pool.generate(request())
        assert generation.output_ids.tolist() == [11]
        assert generation.spans[0].version == 3


async def test_a_call_leaves_a_server_that_was_restarted_between_its_pieces() -> None:
    class Restarted(ScriptedServer):
        ending = False

        async def misbehave(self, fault: Fault | None) -> None:
            await super().misbehave(fault)
            if self.ending:  # the first piece has been sampled
                self.revive(version=0)  # a new process, with the weights it was started with
            self.ending = fault is Fault.ABORT

    def script(_: ScriptedCall) -> ScriptedReply:
        return ScriptedReply(output=[20, 21, 22, 23], fault=Fault.ABORT)

    first, second = Restarted(script, vocab_size=VOCAB), server(number=1)
    async with pool_of(first, second) as pool:
        await pool.update_weights(publication(1))
        generation = await pool.generate(request())
        assert ([span.version for span in generation.spans], generation.output_ids.tolist()) == ([1], [11])
        await until(pool, "scripted://0", State.SERVING)
        assert first.version == 1


async def test_a_server_that_comes_back_with_less_context_than_calls_may_have_does_not_serve() -> None:
    servers = [server(number=n) for n in range(2)]
    for each in servers:
        each.max_context_tokens = 100
    async with pool_of(*servers, **OFTEN) as pool:
        assert pool.max_context_tokens == 100
        servers[0].die()
        await until(pool, "scripted://0", State.DEAD)
        servers[0].max_context_tokens = 60
        servers[0].revive()
        await until(pool, "scripted://0", State.STUCK)
        assert "grants a context of 60 tokens; the pool promised 100" in pool.describe().servers[0].reason
        servers[0].max_context_tokens = 120
        await until(pool, "scripted://0", State.SERVING)


async def test_a_call_waits_for_the_only_server_while_it_is_being_caught_up() -> None:
    only = server()
    async with pool_of(only) as pool:
        await pool.update_weights(publication(3))
        only.revive(version=0)
        with anyio.fail_after(300):
            assert (await pool.generate(request())).spans[0].version == 3


async def test_a_cancelled_call_is_aborted_at_the_server() -> None:
    hold = Hold()
    only = server(lambda _: ScriptedReply(output=[1], holds=(hold,)))
    sent = request()
    async with pool_of(only) as pool:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pool.generate, sent)
            await hold.reached.wait()
            tasks.cancel_scope.cancel()
        assert only.aborted == [sent.request_id]
        assert pool.describe().in_flight == 0


async def test_starting_without_any_server_names_each() -> None:
    servers = [server(number=n) for n in range(2)]
    for one in servers:
        one.die("not up yet")
    with pytest.raises(ServerUnavailable, match=r"scripted://0 is dead.*scripted://1 is dead"):
        async with pool_of(*servers):
            pass


async def test_starting_with_some_servers_depends_on_the_policy() -> None:
    servers = [server(number=n) for n in range(2)]
    servers[0].die()
    async with pool_of(*servers) as pool:
        assert (await pool.generate(request())).output_ids.tolist() == [11]
    with pytest.raises(ServerUnavailable, match="scripted://0 is dead"):
        async with pool_of(*servers, on_server_failure="stop"):
            pass


async def test_by_policy_a_dead_server_stops_the_run() -> None:
    servers = [server(number=n) for n in range(2)]

    async def run() -> None:
        async with pool_of(*servers, on_server_failure="stop", **OFTEN):
            servers[1].die()
            with anyio.fail_after(300):
                await anyio.sleep_forever()

    with pytest.raises(ServerUnavailable, match=r"inference.on_server_failure: scripted://1"):
        await run()


async def test_an_error_in_the_block_comes_out_as_itself() -> None:
    with pytest.raises(KeyError, match="mine"):
        async with pool_of(server()):
            raise KeyError("mine")


async def test_a_cancelled_start_leaves_nothing_behind() -> None:
    only = server(timeout_s=60)
    only.control_faults["connect"] = Fault.HANG
    with anyio.move_on_after(0.02) as scope:
        async with pool_of(only, control_timeout_s=60):
            pass
    assert scope.cancelled_caught


async def test_a_stream_moves_to_another_server_before_its_first_chunk() -> None:
    first, second = server(lambda _: ScriptedReply(fault=Fault.REFUSE)), server(number=1)
    async with pool_of(first, second) as pool, pool.stream(request()) as stream:
        chunks = [chunk async for chunk in stream]
    assert np.concatenate([chunk.output_ids for chunk in chunks]).tolist() == [11]
    assert chunks[-1].generation is not None


async def test_a_stream_that_breaks_after_its_first_chunk_fails() -> None:
    hold = Hold(at=1)
    first = server(lambda _: ScriptedReply(output=[1, 2], holds=(hold,)))
    second = server(number=1)
    chunks: list[GenerationChunk] = []

    async def read(pool: ServerPool) -> None:
        async with pool.stream(request()) as stream:
            chunks.append(await anext(stream))
            pool.report_dead("scripted://0", "exit code 1")
            chunks.append(await anext(stream))

    async with pool_of(first, second) as pool:
        with anyio.fail_after(300), pytest.raises(ServerUnavailable, match="evicted while"):
            await read(pool)
        assert [chunk.output_ids.tolist() for chunk in chunks] == [[1]]
        assert second.calls == []


async def test_leaving_a_stream_early_aborts_it_at_the_server() -> None:
    only = server(lambda _: [1, 2, 3])
    sent = request()
    async with pool_of(only) as pool:
        async with pool.stream(sent) as stream:
            await anext(stream)
        assert only.aborted == [sent.request_id]
        assert pool.describe().in_flight == 0


async def test_a_cancelled_stream_is_aborted_at_the_server() -> None:
    hold = Hold(at=1)
    only = server(lambda _: ScriptedReply(output=[1, 2], holds=(hold,)))
    sent = request()
    async with pool_of(only) as pool:

        async def read() -> None:
            async with pool.stream(sent) as stream:
                async for _ in stream:
                    pass

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            await hold.reached.wait()
            tasks.cancel_scope.cancel()
        assert only.aborted == [sent.request_id]


async def test_the_description_says_who_is_doing_what() -> None:
    servers = [server(number=n) for n in range(2)]
    async with pool_of(*servers, **OFTEN) as pool:
        servers[1].die("gone")
        await until(pool, "scripted://1", State.DEAD)
        text = str(pool.describe())
    assert text.startswith("version 0: scripted://0 serving v0, 0 in flight; scripted://1 dead v0, 0 in flight (")


async def test_hundreds_of_calls_survive_a_server_that_keeps_dying() -> None:
    def script(call: ScriptedCall) -> ScriptedReply:
        return ScriptedReply(output=[1, 2, 3], fault=Fault.DIE if call.index % 3 == 0 else None)

    servers = [server(script, timeout_s=60), server(number=1, timeout_s=60), server(number=2, timeout_s=60)]
    done: list[Generation] = []
    async with pool_of(*servers, request_retries=5) as pool:

        async def call(index: int) -> None:
            done.append(await pool.generate(request(episode=str(index % 40))))

        with anyio.fail_after(300):
            async with anyio.create_task_group() as tasks:
                for index in range(300):
                    tasks.start_soon(call, index)
    assert len(done) == 300


@pytest.mark.parametrize("end", ["", "/"])
async def test_a_server_is_found_by_its_url_whether_or_not_that_ends_in_a_slash(end: str) -> None:
    first, second = (ScriptedServer(lambda _: [4], vocab_size=VOCAB, url=f"scripted://{n}") for n in range(2))
    url = first.url + end
    async with pool_of(first, second) as pool:
        assert (await pool.sample(url, request())).output_ids.tolist() == [4]
        pool.report_kept(url)
        pool.take_out(url, "its log-probs are wrong")
        assert await pool.until_taken_out(url) == "its log-probs are wrong"
        pool.report_dead(url, "its process ended", starting=True)
        assert pool.describe().servers[0].state is State.STARTING
        pool.report_started(url)
        await all_serving(pool)
        await pool.replace(url, ScriptedServer(lambda _: [5], vocab_size=VOCAB, url="scripted://elsewhere"))
        assert pool.serving == ("scripted://elsewhere", "scripted://1")


async def test_a_server_that_was_started_elsewhere_is_not_found_at_its_former_url() -> None:
    former, other = (ScriptedServer(lambda _: [4], vocab_size=VOCAB, url=f"scripted://{n}") for n in range(2))
    async with pool_of(former, other) as pool:
        await pool.replace(former.url, ScriptedServer(lambda _: [5], vocab_size=VOCAB, url="scripted://elsewhere"))
        with pytest.raises(ServerUnavailable, match="the pool, which has scripted://elsewhere, scripted://1"):
            await pool.sample(former.url, request())
        pool.take_out(former.url, "its log-probs are wrong")  # those of a process that has ended
        assert pool.serving == ("scripted://elsewhere", "scripted://1")
