"""Where a workflow is suspended, as told of one that does not end."""

from __future__ import annotations

import asyncio
from pathlib import Path

import anyio
import pytest

from agentrl.client import Client
from agentrl.env import open_environment
from agentrl.launch.culprit import is_leaving, workflow_code
from agentrl.types import Task
from tests.rollout.harness import episode, make_renderer, workflow_of


@pytest.fixture
def anyio_backend() -> str:
    """What is looked at are tasks of asyncio."""
    return "asyncio"


class Slow:
    """An environment that closes when it is told to."""

    def __init__(self) -> None:
        self.begun, self.closing, self.may_close = anyio.Event(), anyio.Event(), anyio.Event()

    async def reset(self) -> None:
        await anyio.lowlevel.checkpoint()

    @property
    def observation(self) -> str:
        return ""

    async def step(self, action: str) -> None:
        await anyio.lowlevel.checkpoint()

    @property
    def reward(self) -> float:
        return 0.0

    @property
    def is_done(self) -> bool:
        return False

    async def close(self) -> None:
        self.closing.set()
        await self.may_close.wait()


async def test_the_line_a_workflow_waits_in_is_told_and_whether_it_closes_its_environment(tmp_path: Path) -> None:
    slow, renderer = Slow(), make_renderer(tmp_path)

    async def run(task: Task, client: Client) -> float:
        async with open_environment(slow, "slow"):
            slow.begun.set()
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
        await slow.begun.wait()
        await anyio.wait_all_tasks_blocked()
        code = workflow_code(running[0])
        assert not is_leaving(running[0])
        assert code is not None
        assert code[0].endswith(".run: await anyio.sleep_forever()  # the line")
        tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await slow.closing.wait()
            assert is_leaving(running[0])
            slow.may_close.set()
    here = asyncio.current_task()
    assert here is not None
    assert workflow_code(here) is None
