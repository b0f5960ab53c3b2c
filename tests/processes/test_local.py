"""Processes on this machine: the description of an end has the last lines of the log."""

from __future__ import annotations

import os
from pathlib import Path

import anyio
import pytest

from agentrl.processes.base import Exit, LocalChild, LocalLauncher, ProcessSpec
from tests.support.processes import until_ended

pytestmark = pytest.mark.starts


async def started(tmp_path: Path, script: str) -> LocalChild:
    log_path = tmp_path / "logs" / "server-0.log"
    command = ("/bin/sh", "-c", script)
    [child] = await LocalLauncher().start(
        [ProcessSpec(name="a server", role="server", command=command, environment={}, log_path=log_path)]
    )
    return child


async def test_the_end_of_a_process_waits_for_the_reader_of_its_last_lines(tmp_path: Path) -> None:
    child = await started(tmp_path, "echo ready; echo 'out of memory' >&2; exit 3")
    ends: list[Exit] = []

    async def watch() -> None:
        ends.append(await child.ended())

    async with anyio.create_task_group() as tasks:
        output = child.lines()
        await until_ended(child.pid)
        tasks.start_soon(watch)
        await anyio.wait_all_tasks_blocked()
        assert [line async for line in output] == ["ready", "out of memory"]
    await child.stop()
    assert [(end.code, end.log_tail) for end in ends] == [(3, "ready\nout of memory")]


async def test_a_cancelled_start_gives_its_caller_the_process_to_end(tmp_path: Path) -> None:
    child = None
    with anyio.CancelScope() as scope:
        scope.cancel()
        child = await started(tmp_path, "sleep 60")
    assert child is not None
    await child.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)


async def test_output_that_stays_open_does_not_hold_up_the_end(tmp_path: Path) -> None:
    child = await started(tmp_path, "echo ready; sleep 60 & exit 3")
    output = aiter(child.lines())
    assert await anext(output) == "ready"
    with anyio.fail_after(30):
        end = await child.ended()
    assert (end.code, end.log_tail) == (3, "ready")
    await child.stop()
