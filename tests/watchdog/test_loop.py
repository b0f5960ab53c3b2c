"""Code that blocks the event loop is named and ended from outside; a loop that runs is left alone."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import suppress

import anyio
import pytest

from agentrl.errors import StallError
from agentrl.processes.watchdog.delays import LoopDelays, ProcessorWaits, blocks_named, loop_blocked_s
from agentrl.processes.watchdog.loop import run_watched, watched_loop
from agentrl.processes.watchdog.signals import Terminated, sigterm_raises

FOREVER_S = 1000.0


def block() -> None:
    time.sleep(FOREVER_S)  # the blocking line


def stubborn() -> None:
    while True:
        with suppress(Exception):  # what agents do around their tools
            block()


async def many(job: Callable[[], None]) -> None:
    """Run `job` in tasks that are all about to run when the first one blocks."""

    async def one() -> None:
        await anyio.lowlevel.checkpoint()
        job()

    async with anyio.create_task_group() as tasks:
        for _ in range(50):
            tasks.start_soon(one)


def watched(job: Callable[[], Awaitable[None]], *, stall_timeout_s: float, warn_after_s: float = 10.0) -> None:
    async def main() -> None:
        async with watched_loop(stall_timeout_s, warn_after_s=warn_after_s, processor_wait_s=lambda: 0.0):
            await job()

    anyio.run(main)


@pytest.fixture(autouse=True)
def everything_is_put_back() -> Generator[None, None, None]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGURG)
    before = [signal.getsignal(number) for number in numbers]
    yield
    assert [signal.getsignal(number) for number in numbers] == before
    assert "agentrl heartbeat" not in {thread.name for thread in threading.enumerate()}


def test_blocking_code_is_warned_of_and_then_ended_with_its_file_and_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(StallError, match=r"has not run for 1\.5 s") as caught:
        watched(lambda: many(block), stall_timeout_s=1.5, warn_after_s=0.25)
    line = block.__code__.co_firstlineno + 1
    short = [message for message in caplog.messages if "has kept the event loop from running" in message]
    long = [message for message in caplog.messages if message not in short]
    assert f"test_loop.py:{line} in block" in short[-1]  # a busy machine may name what ran before
    assert caplog.messages.index(short[-1]) < caplog.messages.index(long[0])
    for message in (str(caught.value), long[0]):
        assert f"test_loop.py:{line} in block: time.sleep(FOREVER_S)  # the blocking line" in message
        assert "in many.<locals>.one: job()" in message
        assert "anyio.to_thread.run_sync" in message
        assert "asyncio" not in message
    named = [message.split(":")[0].rpartition(" for ")[2] for message in long]
    assert named[0] == "0.25 s"
    assert named == [after for after in ("0.25 s", "0.5 s", "1 s") if after in named]  # a busy machine may miss one


def test_code_that_swallows_the_error_is_ended_all_the_same() -> None:
    with pytest.raises(StallError):
        watched(lambda: many(stubborn), stall_timeout_s=0.5)


@pytest.mark.parametrize(("number", "kind"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)])
def test_a_signal_ends_code_that_blocks_the_loop(number: signal.Signals, kind: type[KeyboardInterrupt]) -> None:
    def interrupted() -> None:
        signal.raise_signal(number)
        block()

    with sigterm_raises(), pytest.raises(KeyboardInterrupt) as caught:
        run_watched(lambda: many(interrupted))
    assert type(caught.value) is kind


def test_a_signal_cancels_a_job_that_awaits_and_a_second_one_does_not_disturb_its_cleanup() -> None:
    ended: list[str] = []

    async def job() -> None:
        signal.raise_signal(signal.SIGINT)
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                signal.raise_signal(signal.SIGINT)
                await anyio.lowlevel.checkpoint()
                ended.append("cleanly")

    with pytest.raises(KeyboardInterrupt):
        run_watched(job)
    assert ended == ["cleanly"]


def test_an_ignored_interrupt_stays_ignored() -> None:
    async def job() -> str:
        signal.raise_signal(signal.SIGINT)
        await anyio.lowlevel.checkpoint()
        return "done"

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert run_watched(job) == "done"
    finally:
        signal.signal(signal.SIGINT, before)


def test_outside_the_main_thread_nothing_is_installed() -> None:
    seen: list[object] = []

    async def job() -> None:
        seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run_watched, args=(job,))
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]


async def test_a_cancelled_block_leaves_nothing_behind() -> None:
    with anyio.move_on_after(0) as scope:
        async with watched_loop(FOREVER_S):
            await anyio.sleep_forever()
    assert scope.cancelled_caught


async def test_an_error_passes_and_a_loop_that_runs_is_left_alone() -> None:
    async def fail() -> None:
        async with watched_loop(30.0):
            await anyio.lowlevel.checkpoint()
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        await fail()


def test_a_short_block_is_named_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> float:
        async with watched_loop(60):
            for _ in range(2):
                time.sleep(0.6)  # noqa: ASYNC251 - the blocking line
                await anyio.lowlevel.checkpoint()
                await anyio.sleep(0.1)  # until the next beat
            return loop_blocked_s()

    with caplog.at_level(logging.WARNING):
        assert anyio.run(main) > 0.8
    [message] = caplog.messages
    assert "test_loop.py" in message
    assert "the blocking line" in message


def test_code_that_waits_for_a_busy_machine_is_not_named(caplog: pytest.LogCaptureFixture) -> None:
    began = time.monotonic()

    async def main() -> None:
        async with watched_loop(60, processor_wait_s=lambda: time.monotonic() - began):
            time.sleep(0.6)  # noqa: ASYNC251 - stands for a thread that gets no processor
            await anyio.lowlevel.checkpoint()

    with caplog.at_level(logging.WARNING):
        anyio.run(main)
    assert caplog.messages == []


def test_the_waits_of_a_thread_for_a_processor_are_counted() -> None:
    own = ProcessorWaits()
    before = own.seconds()
    time.sleep(0.01)  # the thread runs again afterwards, and its count never falls
    assert own.seconds() >= before >= 0
    assert ProcessorWaits(thread=2**30).seconds() == 0  # no such thread


def test_outside_a_watched_loop_code_that_blocks_is_named_too(caplog: pytest.LogCaptureFixture) -> None:
    named = threading.Event()

    class Named(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            named.set()

    async def main() -> None:
        with blocks_named(), blocks_named():  # the inner one leaves it to the outer one
            await anyio.sleep(0.1)  # some beats
            named.wait(300)  # the blocking line

    handler = Named()
    logging.getLogger("agentrl.processes.watchdog.delays").addHandler(handler)
    try:
        with caplog.at_level(logging.WARNING):
            anyio.run(main)
    finally:
        logging.getLogger("agentrl.processes.watchdog.delays").removeHandler(handler)
    [message] = caplog.messages  # a busy machine may name an earlier line of the same function
    assert "in test_outside_a_watched_loop_code_that_blocks_is_named_too.<locals>.main: " in message


def test_the_loop_s_own_work_is_counted_and_blamed_on_no_workflow(caplog: pytest.LogCaptureFixture) -> None:
    delays = LoopDelays()
    delays.count(0.1)
    delays.count(0.5)
    delays.name(threading.get_native_id())  # no such thread
    assert (delays.blocked_s, caplog.messages) == (0.5, [])
    assert loop_blocked_s() == 0
