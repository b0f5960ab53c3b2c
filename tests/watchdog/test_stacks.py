"""Where a workflow is suspended, as told of one that does not end."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import anyio
import pytest

from agentrl.client import Client
from agentrl.processes.watchdog.stacks import blocking_code, workflow_code
from agentrl.types import Task
from tests.rollout.harness import episode, make_renderer, workflow_of


@pytest.fixture
def anyio_backend() -> str:
    """What is looked at are tasks of asyncio."""
    return "asyncio"


async def test_the_line_a_workflow_waits_in_is_told(tmp_path: Path) -> None:
    begun, renderer = anyio.Event(), make_renderer(tmp_path)

    async def run(task: Task, client: Client) -> float:
        begun.set()
        await anyio.sleep_forever()  # the line
        return 1.0

    running: list[asyncio.Task[object]] = []

    async def play() -> None:
        current = asyncio.current_task()
        assert current is not None
        running.append(current)
        await episode(workflow_of(run), renderer)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(play)
        await begun.wait()
        await anyio.wait_all_tasks_blocked()
        code = workflow_code(running[0])
        assert code is not None
        assert code[0].endswith(".run: await anyio.sleep_forever()  # the line")
        tasks.cancel_scope.cancel()
    here = asyncio.current_task()
    assert here is not None
    assert workflow_code(here) is None


def test_code_without_lines_is_told_by_the_first_line_of_its_function() -> None:
    begun, done = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        done.wait()

    line = work.__code__.co_firstlineno
    work.__code__ = work.__code__.replace(co_linetable=b"")
    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    assert thread.ident is not None
    told = blocking_code(thread.ident)
    done.set()
    thread.join()
    assert any(f"test_stacks.py:{line} in " in entry for entry in told), told
