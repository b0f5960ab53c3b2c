"""A function in a worker process: JSON crosses, hung calls are killed, and what breaks is the infrastructure's fault."""

from __future__ import annotations

import json
import os
import select
from pathlib import Path
from typing import Any

import anyio
import pytest

import agentrl
from agentrl.client.tools import ToolError, in_process, tool
from agentrl.env import watch_faults
from agentrl.errors import EnvironmentFault
from tests.support import process_tools

PATIENCE_S = 60


def call(name: str, **arguments: object) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


@pytest.mark.starts
async def test_a_function_and_a_tool_run_in_a_process_that_is_kept() -> None:
    assert await agentrl.in_process(process_tools.add, 2, 3) == 5
    replies = [await process_tools.factor.reply(call("factor", number=4, limits=[1])) for _ in range(2)]
    first, second = (json.loads(str(reply["content"])) for reply in replies)
    assert first == second
    assert (first["number"], first["limits"]) == (4, [1])
    assert first["process"] != os.getpid()


@pytest.mark.starts
async def test_what_the_model_writes_is_answered_as_in_a_thread() -> None:
    for arguments, says in [
        ({"number": "x"}, "Error: wrong arguments for factor: number"),
        ({"number": 0}, "Error: the nu"),
    ]:
        assert str((await process_tools.factor.reply(call("factor", **arguments)))["content"]).startswith(says)
    with pytest.raises(EnvironmentFault, match=r"(?s)tool factor.*OSError: bad luck"):
        await process_tools.factor.reply(call("factor", number=13))
    with pytest.raises(ToolError, match="not today"):
        await in_process(process_tools.refuse)


@pytest.mark.starts
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_tool_that_hangs_is_killed_at_its_timeout_and_the_next_call_works() -> None:
    with watch_faults() as faults:
        with pytest.raises(EnvironmentFault, match=r"tool stuck: a worker has not answered within 0\.3 s"):
            await process_tools.stuck.reply(call("stuck"))
        assert await in_process(process_tools.add, 1, 1) == 2
    assert list(faults) == ["tool stuck"]


@pytest.mark.starts
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_cancelled_call_ends_its_process(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    workers: list[int] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(in_process, process_tools.announce_and_hang, str(pipe))
        workers.append(os.pidfd_open(int(await anyio.Path(pipe).read_text())))
        tasks.cancel_scope.cancel()
    try:
        assert select.select(workers, [], [], PATIENCE_S)[0]
    finally:
        os.close(workers[0])


async def test_a_function_without_a_name_to_import_is_refused_before_anything_starts() -> None:
    def inner() -> None: ...

    for function in (inner, lambda: None, process_tools.COUNTER.append):
        with pytest.raises(TypeError, match="cannot run in a worker process"):
            await in_process(function)
    for function in (inner, [].clear):
        with pytest.raises(TypeError, match="cannot run in a worker process, which imports it by its name"):
            tool(run_in="process")(function)
    with pytest.raises(TypeError, match="an async function runs in the event loop"):
        await in_process(process_tools.wait)
    with pytest.raises(TypeError, match=r"add: expected arguments that are JSON: .*not JSON serializable"):
        await in_process(process_tools.add, object(), 1)  # pyright: ignore[reportArgumentType] - the error is tested


@pytest.mark.starts
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_function_that_runs_out_of_memory_is_a_fault_with_the_fix() -> None:
    with pytest.raises(EnvironmentFault, match=r"exhaust: the function ran out of memory; give it less work in one call"):
        await in_process(process_tools.exhaust)


@pytest.mark.starts
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_function_that_hangs_ends_with_the_programs_that_it_started(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.to_thread.run_sync, pipe.read_bytes)  # ends when no process holds the pipe open
            await in_process(process_tools.add, 1, 1)  # the process that is kept has imported the module by now
            with pytest.raises(EnvironmentFault, match="has not answered within 1 s"):
                await in_process(process_tools.start_program_and_hang, str(pipe), timeout=1)
