"""Episodes against any OpenAI-compatible endpoint end like those against our own servers."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from functools import partial

import anyio
import pytest
from aiohttp import web
from openai import AsyncOpenAI

from agentrl.client import Client
from agentrl.engine.evaluate import evaluate_with
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.episode import run_endpoint_episode
from agentrl.types import StopReason, Task, Trajectory
from agentrl.workflow import RolloutWorkflow
from tests.rollout.harness import PATIENCE_S, TASK, Judge, ask, workflow_of
from tests.support.endpoints import serving


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def endpoint(answer: Callable[[], web.Response]) -> AsyncGenerator[AsyncOpenAI]:
    async def complete(request: web.Request) -> web.Response:
        return answer()

    async with serving(complete) as connection:
        yield connection


_ids = itertools.count()


def good() -> web.Response:
    choice = {"index": 0, "message": {"role": "assistant", "content": "good"}, "finish_reason": "stop"}
    head = {"id": f"c{next(_ids)}", "created": 1, "model": "served", "object": "chat.completion"}
    return web.json_response({**head, "choices": [choice]})


def broken() -> web.Response:
    return web.json_response({"error": {"message": "out of order"}}, status=500)


def silent() -> web.Response:
    choice = {"index": 0, "message": {"role": "assistant", "content": ""}, "finish_reason": "stop"}
    return web.json_response({"id": "c", "created": 1, "model": "served", "choices": [choice]})


async def one(workflow: RolloutWorkflow, answer: Callable[[], web.Response] = good) -> Trajectory:
    async with endpoint(answer) as connection:
        with anyio.fail_after(PATIENCE_S):
            return await run_endpoint_episode(
                workflow, TASK, endpoint=connection, model="served", rollout=RolloutConfig(max_turns=3)
            )


async def test_a_workflow_is_judged_by_its_reward() -> None:
    trajectory = await one(Judge())
    assert (trajectory.stop_reason, trajectory.final_reward, len(trajectory.turns)) == (StopReason.COMPLETED, 1.0, 1)


async def test_an_endpoint_that_breaks_is_a_failed_episode() -> None:
    trajectory = await one(Judge(), broken)
    assert trajectory.stop_reason is StopReason.SERVER_ERROR
    assert trajectory.failure is not None
    assert "out of order" in trajectory.failure.message


async def test_an_endpoint_that_says_nothing_is_to_blame_and_not_the_workflow() -> None:
    trajectory = await one(Judge(), silent)
    assert (trajectory.stop_reason, trajectory.turns) == (StopReason.SERVER_ERROR, ())
    assert trajectory.failure is not None
    assert trajectory.failure.kind == "ReplyError"


async def test_a_turn_limit_holds_for_endpoints_too() -> None:
    async def endless(task: Task, client: Client) -> float:
        while True:
            await ask(client, "more")

    trajectory = await one(workflow_of(endless))
    assert trajectory.stop_reason is StopReason.TURN_LIMIT


async def test_an_evaluation_takes_an_endpoint_as_its_runner() -> None:
    async with endpoint(good) as connection:
        run = partial(run_endpoint_episode, Judge(), endpoint=connection, model="served", rollout=RolloutConfig())
        report = await evaluate_with(run, [TASK], max_concurrent=2, episodes=3)
    assert (report.success_rate, report.failed, report.versions) == (1.0, 0, None)
