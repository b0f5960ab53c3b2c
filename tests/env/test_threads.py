"""A plain tool runs in a thread: it delays no other episode, and a deadline passes in spite of it."""

from __future__ import annotations

import logging
import threading
from contextvars import ContextVar
from typing import Any

import anyio
import pytest

from agentrl.client.tools import Tool, tool
from agentrl.env.threads import MAX_ABANDONED, MAX_THREADS, call_in_thread
from agentrl.errors import EnvironmentFault

PATIENCE_S = 60
which: ContextVar[str] = ContextVar("which", default="none")


def call(name: str) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": "{}"}}


async def test_a_tool_that_blocks_delays_no_other_episode() -> None:
    release = threading.Event()

    @tool
    def blocks() -> bool:
        return release.wait(PATIENCE_S)

    replies: list[str] = []

    async def first_episode() -> None:
        replies.append(str((await blocks.reply(call("blocks")))["content"]))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(first_episode)
        await anyio.wait_all_tasks_blocked()
        assert replies == []  # another task of the loop runs while the tool blocks
        release.set()
    assert replies == ["true"]


async def test_the_deadline_of_an_episode_is_kept_and_the_thread_is_named(caplog: pytest.LogCaptureFixture) -> None:
    entered, release, ended = anyio.Event(), threading.Event(), threading.Event()
    names: list[str] = []

    @tool
    def blocks() -> None:
        names.append(threading.current_thread().name)
        anyio.from_thread.run_sync(entered.set)
        release.wait(PATIENCE_S)
        ended.set()

    with caplog.at_level(logging.WARNING):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(blocks.reply, call("blocks"))
            await entered.wait()
            tasks.cancel_scope.cancel()
    assert not ended.is_set()
    assert names == ["agentrl tool blocks"]
    assert "tool blocks still runs in its thread after its call was cancelled" in caplog.text
    assert "1 such calls run: tool blocks (1)" in caplog.text
    release.set()
    assert await anyio.to_thread.run_sync(ended.wait, PATIENCE_S)


async def test_a_timeout_of_a_tool_is_a_fault_that_names_it() -> None:
    release = threading.Event()

    @tool(timeout=0.01)
    def blocks() -> None:
        release.wait(PATIENCE_S)

    @tool(timeout=0.01)
    async def waits() -> None:
        await anyio.sleep_forever()

    for slow in (blocks, waits):
        with pytest.raises(EnvironmentFault, match=rf"tool {slow.name}: no result within its timeout of 0\.01 s"):
            await slow.reply(call(slow.name))
    release.set()


async def test_a_thread_sees_the_context_variables_of_its_episode() -> None:
    @tool
    def show() -> str:
        return which.get()

    which.set("mine")
    assert (await show.reply(call("show")))["content"] == "mine"


async def test_only_so_many_calls_run_at_once_and_other_threads_stay_free() -> None:
    release, lock = threading.Event(), threading.Lock()
    full = anyio.Event()
    running = most = 0

    @tool
    def blocks() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
            if running == MAX_THREADS:
                anyio.from_thread.run_sync(full.set)
        release.wait(PATIENCE_S)
        with lock:
            running -= 1

    async with anyio.create_task_group() as tasks:
        for _ in range(MAX_THREADS + 5):
            tasks.start_soon(blocks.reply, call("blocks"))
        with anyio.fail_after(PATIENCE_S):
            await full.wait()
            assert await anyio.to_thread.run_sync(lambda: "free") == "free"
        release.set()
    assert most == MAX_THREADS


async def test_a_tool_that_always_hangs_is_refused_in_the_end() -> None:
    release, lock = threading.Event(), threading.Lock()
    all_hang, num_hanging = anyio.Event(), 0

    def hang() -> None:
        nonlocal num_hanging
        with lock:
            num_hanging += 1
            if num_hanging == MAX_ABANDONED:
                anyio.from_thread.run_sync(all_hang.set)
        release.wait(PATIENCE_S)

    try:
        async with anyio.create_task_group() as tasks:
            for _ in range(MAX_ABANDONED):
                tasks.start_soon(call_in_thread, hang, "tool search")
            await all_hang.wait()
            tasks.cancel_scope.cancel()
        with pytest.raises(EnvironmentFault, match=r"tool find gets no thread: 64 .* still run: tool search \(64\)"):
            await call_in_thread(lambda: 1, "tool find")
    finally:
        release.set()


async def test_a_call_that_is_cancelled_before_its_thread_starts_never_runs() -> None:
    ran: list[int] = []
    with anyio.CancelScope() as scope:
        scope.cancel()
        await call_in_thread(lambda: ran.append(1), "tool late")
    assert ran == []


@pytest.mark.parametrize("error", [StopIteration("x"), SystemExit(2), KeyError("x")])
async def test_whatever_a_thread_raises_is_the_environments_fault(error: BaseException) -> None:
    @tool
    def fail() -> None:
        raise error

    with pytest.raises(EnvironmentFault, match=f"tool fail raised .*{type(error).__name__}"):
        await fail.reply(call("fail"))


async def test_a_plain_function_in_the_loop_runs_there() -> None:
    def where() -> str:
        return threading.current_thread().name

    here = threading.current_thread().name
    assert (await tool(where).reply(call("where")))["content"] != here
    assert (await tool(run_in="loop")(where).reply(call("where")))["content"] == here


def test_a_place_that_does_not_fit_the_function_is_refused() -> None:
    async def waits() -> None: ...

    def quick() -> None: ...

    with pytest.raises(TypeError, match="an async function runs in the loop"):
        tool(run_in="thread")(waits)
    with pytest.raises(TypeError, match="nothing can interrupt a plain function in the loop"):
        tool(run_in="loop", timeout=1)(quick)
    with pytest.raises(ValueError, match="more than 0 seconds"):
        tool(timeout=0)(quick)
    with pytest.raises(TypeError, match="'loop', 'thread' or 'process', got 'gpu'"):
        Tool(quick, run_in="gpu")  # pyright: ignore[reportArgumentType] - the error is tested
