"""Deadlines: what ends a wait, and what is said then; in virtual time, which jumps to the next thing that happens."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import pytest

from agentrl.errors import ServerTimeout, ServerUnavailable, WorkflowError
from agentrl.inference.pool.pool import ServerPool
from agentrl.servers.scripted.server import Fault, Hold, ScriptedCall, ScriptedReply, ScriptedServer
from agentrl.support.concurrency import Deadline, SharedContext, task_group
from tests.support.scripted import VOCAB, in_virtual_time, pool_of, request


def unasked() -> str:
    raise AssertionError("nobody waited too long")


async def test_a_block_that_ends_in_time_is_left_alone() -> None:
    with Deadline(60, unasked, "http://a"):
        await anyio.lowlevel.checkpoint()
    with pytest.raises(ValueError, match="of the block"), Deadline(60, unasked, "http://a"):
        raise ValueError("of the block")


async def test_a_deadline_says_who_waited_for_what_where_and_how_long() -> None:
    wait = Deadline(0.01, lambda: "waited for an answer", "http://a")
    with pytest.raises(ServerTimeout, match=r"^waited for an answer \(deadline 0\.01 s\)$") as caught, wait:
        await anyio.sleep_forever()
    assert caught.value.url == "http://a"


async def test_the_seconds_may_have_begun_earlier() -> None:
    wait = Deadline(60, lambda: "waited", since=anyio.current_time() - 61)
    with pytest.raises(ServerTimeout, match=r"deadline 60 s"), wait:
        await anyio.sleep_forever()


async def test_a_wait_that_is_called_off_ends_without_an_error() -> None:
    reached = False
    with Deadline(60, unasked) as wait:
        wait.call_off()
        await anyio.sleep_forever()
        reached = True
    assert not reached


async def test_a_wait_that_is_called_off_after_its_deadline_is_too_late_all_the_same() -> None:
    wait = Deadline(60, lambda: "waited", since=anyio.current_time() - 61)
    wait.call_off()
    with pytest.raises(ServerTimeout), wait:
        await anyio.sleep_forever()


async def test_a_cancellation_from_outside_passes_through() -> None:
    with anyio.CancelScope() as outer:
        with Deadline(60, unasked):
            outer.cancel()
            await anyio.sleep_forever()
        raise AssertionError("the cancellation was swallowed")
    assert outer.cancelled_caught


async def test_a_wait_is_among_others_until_its_block_is_left() -> None:
    waits: set[Deadline] = set()
    with Deadline(60, unasked) as wait:
        wait.join(waits)
        assert waits == {wait}
    assert waits == set()
    with Deadline(60, unasked) as wait:
        wait.join(waits)
        wait.call_off()
        await anyio.sleep_forever()
    assert waits == set()


async def whole(pool: ServerPool) -> None:
    await pool.generate(request())


async def streamed(pool: ServerPool) -> None:
    async with pool.stream(request()) as stream:
        await anext(stream)


@pytest.mark.parametrize("ask", [whole, streamed])
def test_a_call_has_one_deadline_however_many_servers_it_tries(ask: Callable[[ServerPool], Awaitable[None]]) -> None:
    hold = Hold()
    first = ScriptedServer(lambda _: ScriptedReply(fault=Fault.DIE, holds=(hold,)), vocab_size=VOCAB, url="a", timeout_s=99)
    second = ScriptedServer(lambda _: ScriptedReply(fault=Fault.HANG), vocab_size=VOCAB, url="b", timeout_s=99)

    async def main() -> None:
        async with pool_of(first, second, request_timeout_s=10.0) as pool, anyio.create_task_group() as tasks:

            async def let_go_after_seven_seconds() -> None:
                await hold.reached.wait()
                await anyio.sleep(7)
                hold.release.set()

            tasks.start_soon(let_go_after_seven_seconds)
            started = anyio.current_time()
            with pytest.raises(ServerTimeout, match=r"waiting for b after 1 failures .*\(deadline 10 s\)"):
                await ask(pool)
            assert anyio.current_time() - started == pytest.approx(10)
            assert [server.in_flight for server in pool.describe().servers] == [0, 0]

    in_virtual_time(main)
    assert len(first.calls) == len(second.calls) == 1


def test_asking_whether_a_server_lives_counts_towards_the_deadline_of_the_call() -> None:
    only = ScriptedServer(lambda _: ScriptedReply(fault=Fault.DIE), vocab_size=VOCAB, url="a", timeout_s=99)

    async def main() -> None:
        async with pool_of(only, request_timeout_s=10.0, health_interval_s=60.0) as pool:
            only.control_faults["check"] = Fault.HANG
            started = anyio.current_time()
            with pytest.raises(ServerTimeout, match=r"waiting for a after 1 failures .*\(deadline 10 s\)"):
                await pool.generate(request())
            assert anyio.current_time() - started == pytest.approx(10)

    in_virtual_time(main)


def test_between_two_chunks_a_stream_counts_the_seconds_of_the_whole_call() -> None:
    holds = (Hold(at=1), Hold(at=2))

    def script(call: ScriptedCall) -> ScriptedReply:
        return ScriptedReply(output=[1, 2, 3], holds=holds)

    only = ScriptedServer(script, vocab_size=VOCAB, url="a", timeout_s=99)

    async def main() -> None:
        async with pool_of(only, request_timeout_s=10.0) as pool, pool.stream(request()) as stream:
            started = anyio.current_time()
            await anext(stream)
            await anyio.sleep(7)  # the caller's own time counts as well
            holds[0].release.set()
            await anext(stream)
            with pytest.raises(ServerTimeout, match=r"waiting for a \(deadline 10 s\)"):
                await anext(stream)
            assert anyio.current_time() - started == pytest.approx(10)

    in_virtual_time(main)


def test_a_call_whose_server_is_evicted_goes_elsewhere_and_is_in_flight_nowhere_else() -> None:
    first = ScriptedServer(lambda _: ScriptedReply(fault=Fault.HANG), vocab_size=VOCAB, url="a", timeout_s=99)
    hold = Hold()
    second = ScriptedServer(lambda _: ScriptedReply(output=[7], holds=(hold,)), vocab_size=VOCAB, url="b", timeout_s=99)

    async def main() -> None:
        async with pool_of(first, second) as pool, anyio.create_task_group() as tasks:

            async def evict() -> None:
                await anyio.sleep(1)
                assert [server.in_flight for server in pool.describe().servers] == [1, 0]
                pool.report_dead("a", "exit code 1")
                await hold.reached.wait()
                assert [server.in_flight for server in pool.describe().servers] == [0, 1]
                hold.release.set()

            tasks.start_soon(evict)
            generation = await pool.generate(request())
            assert generation.output_ids.tolist() == [7]

    in_virtual_time(main)


def test_without_retries_the_first_failure_is_the_error() -> None:
    only = ScriptedServer(lambda _: ScriptedReply(fault=Fault.SERVER_ERROR), vocab_size=VOCAB, url="a")

    async def main() -> None:
        async with pool_of(only, request_retries=0) as pool:
            with pytest.raises(ServerUnavailable, match=r"^a:"):
                await pool.generate(request())

    in_virtual_time(main)
    assert len(only.calls) == 1


async def test_a_wait_that_joins_others_leaves_those_before() -> None:
    before: set[Deadline] = set()
    after: set[Deadline] = set()
    with Deadline(60, unasked) as wait:
        wait.join(before)
        wait.join(after)
        assert (before, after) == (set(), {wait})
    assert after == set()


def test_a_stream_that_is_asked_again_after_its_caller_gave_up_counts_at_its_new_server_only() -> None:
    first = ScriptedServer(lambda _: ScriptedReply(fault=Fault.SERVER_ERROR), vocab_size=VOCAB, url="a", timeout_s=99)
    second = ScriptedServer(lambda _: ScriptedReply(output=[7]), vocab_size=VOCAB, url="b", timeout_s=99)

    async def main() -> None:
        async with pool_of(first, second, health_interval_s=60.0) as pool:
            first.control_holds["check"] = Hold()
            async with pool.stream(request()) as stream:
                with anyio.move_on_after(1):
                    await anext(stream)  # while the pool asks whether the first one lives
                pool.report_dead("a", "exit code 1")
                del first.control_holds["check"]
                *_, last = [chunk async for chunk in stream]
            assert last.generation is not None
            assert last.generation.output_ids.tolist() == [7]
            assert [server.in_flight for server in pool.describe().servers] == [0, 0]

    in_virtual_time(main)


async def fail_with(error: BaseException) -> None:
    raise error


async def test_a_task_group_with_one_error_raises_it_by_itself() -> None:
    with pytest.raises(KeyError, match="one"):
        async with task_group() as tasks:
            tasks.start_soon(fail_with, KeyError("one"))


async def test_a_task_group_with_one_keyboard_interrupt_raises_it_by_itself() -> None:
    with pytest.raises(KeyboardInterrupt):
        async with task_group(), task_group():
            raise KeyboardInterrupt


async def test_of_several_errors_the_first_of_agentrl_leaves_the_block_and_the_group_is_its_cause() -> None:
    with pytest.raises(ServerTimeout, match="ours") as caught:
        async with task_group():
            raise ExceptionGroup("both", [ValueError("other"), ServerTimeout("ours")])
    assert isinstance(caught.value.__cause__, ExceptionGroup)


async def test_of_several_errors_without_one_of_agentrl_the_first_leaves_the_block() -> None:
    with pytest.raises(KeyError, match="a") as caught:
        async with task_group():
            raise ExceptionGroup("both", [KeyError("a"), ValueError("b")])
    assert isinstance(caught.value.__cause__, ExceptionGroup)


async def test_a_group_of_several_with_more_than_errors_passes_unchanged() -> None:
    with pytest.raises(BaseExceptionGroup) as caught:
        async with task_group():
            raise BaseExceptionGroup("both", [KeyError("a"), KeyboardInterrupt()])
    assert len(caught.value.exceptions) == 1  # of the group that anyio adds


class Opened:
    """A context that counts how often it was opened, and how many hold it open at once."""

    def __init__(self, *, fails: bool = False) -> None:
        self.fails, self.times, self.now = fails, 0, 0
        self.let_close = anyio.Event()

    @asynccontextmanager
    async def __call__(self) -> AsyncGenerator[None]:
        self.times += 1
        await anyio.lowlevel.checkpoint()
        if self.fails:
            raise ValueError("cannot open")
        self.now += 1
        assert self.now == 1
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                await self.let_close.wait()
            self.now -= 1


async def test_blocks_inside_a_block_share_what_it_opened() -> None:
    opened = Opened()
    opened.let_close.set()
    shared = SharedContext(opened, "W")
    async with shared.block():
        for _ in range(2):
            async with shared.block():
                assert (opened.times, opened.now) == (1, 1)
    assert opened.now == 0
    async with shared.block():
        assert (opened.times, opened.now) == (2, 1)


async def test_a_task_inside_a_block_shares_and_one_outside_is_refused() -> None:
    opened = Opened()
    opened.let_close.set()
    shared = SharedContext(opened, "W")
    entered, leave = anyio.Event(), anyio.Event()

    async def child() -> None:
        async with shared.block():
            assert opened.times == 1

    async def holder() -> None:
        async with shared.block(), task_group() as tasks:
            tasks.start_soon(child)
            entered.set()
            await leave.wait()

    async with task_group() as tasks:
        tasks.start_soon(holder)
        await entered.wait()
        with pytest.raises(WorkflowError, match="W is open in another task"):
            async with shared.block():
                pass
        leave.set()
    async with shared.block():
        assert (opened.times, opened.now) == (2, 1)


async def test_a_context_that_cannot_open_is_tried_again_by_the_next_block() -> None:
    opened = Opened(fails=True)
    opened.let_close.set()
    shared = SharedContext(opened, "W")
    for _ in range(2):
        with pytest.raises(ValueError, match="cannot open"):
            async with shared.block():
                pass
    assert opened.times == 2
    opened.fails = False
    async with shared.block():
        assert opened.now == 1


async def test_a_cancelled_opener_closes_at_once() -> None:
    opened = Opened()
    opened.let_close.set()
    shared = SharedContext(opened, "W")
    with anyio.CancelScope() as scope:
        async with shared.block():
            scope.cancel()
            await anyio.sleep_forever()
    assert opened.now == 0
