"""An environment that the real openenv package serves is played; what goes wrong at the server is a fault."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from agentrl.env import EnvironmentPool, EpisodeEnd
from agentrl.env.chat import ChatStep
from agentrl.errors import ConfigError, EnvironmentFault
from agentrl.types import Task
from agentrl_envs.openenv import OpenEnvEnvironment
from agentrl_workflows.environment import PlayEnvironment
from tests.rollout.harness import episode, make_renderer, says
from tests.support.external_servers import SCRIPTS, external_server

TASK = Task(id="t0", data={})
SEED = 3
NUMBER = random.Random(SEED).randint(1, 8)
SESSIONS = 3


@pytest.fixture
def anyio_backend() -> str:
    """aiohttp needs asyncio."""
    return "asyncio"


@pytest.fixture(scope="module")
def shared_url() -> Iterator[str]:
    with external_server(SCRIPTS / "openenv_server.py", str(SESSIONS)) as url:
        yield url


@pytest.fixture
def own_url() -> Iterator[str]:
    with external_server(SCRIPTS / "openenv_server.py", "1") as url:
        yield url


def guess(number: object) -> str:
    return f"Let me try. <action>{json.dumps({'number': number})}</action>"


async def play(pool: EnvironmentPool, answers: list[str], task: Task = TASK) -> tuple[list[ChatStep], EpisodeEnd | None]:
    async with pool.episode(task, seed=SEED) as running:
        steps = [await running.step({"role": "assistant", "content": answer}) for answer in answers]
        return steps, running.end


def make_pool(url: str) -> EnvironmentPool:
    return EnvironmentPool(lambda: OpenEnvEnvironment(url), name="openenv")


@pytest.mark.external
async def test_an_episode_of_a_served_environment_is_played(shared_url: str) -> None:
    pool = EnvironmentPool(lambda: OpenEnvEnvironment(shared_url, instructions="Find my number."), name="openenv")
    async with pool.episode(TASK, seed=SEED) as running:
        text = str(running.start.messages[0]["content"])
        wrong = await running.step({"role": "assistant", "content": guess(NUMBER - 1)})
        right = await running.step({"role": "assistant", "content": guess(NUMBER)})
    assert text.startswith("Find my number.\n\nEnd your answer with <action>{...}</action>")
    assert text.endswith("I have a number from 1 to 8.")
    assert '"required": ["number"]' in text
    assert "metadata" not in text
    assert (wrong.messages[0]["content"], wrong.reward, wrong.end) == ("It is higher.", 0.0, None)
    assert (right.reward, running.end) == (1.0, EpisodeEnd.TERMINATED)


@pytest.mark.external
async def test_a_session_plays_one_episode_after_the_other_and_options_reach_the_server(shared_url: str) -> None:
    task = Task(id="one", data={"options": {"limit": 1}})
    async with make_pool(shared_url) as pool:
        for _ in range(3):
            steps, end = await play(pool, [guess(1)], task)
            assert ([step.reward for step in steps], end) == ([1.0], EpisodeEnd.TERMINATED)
        assert (pool.num_started, pool.num_faults) == (1, 0)


@pytest.mark.external
async def test_an_action_that_the_server_does_not_take_is_a_message_and_no_fault(shared_url: str) -> None:
    bad = ["I give up.", "<action>{</action>", "<action>[1]</action>", guess("one")]
    pool = EnvironmentPool(lambda: OpenEnvEnvironment(shared_url, invalid_reward=-0.5, max_invalid=9), name="openenv")
    steps, end = await play(pool, [*bad, '<action>{"number": 1, "size": 2}</action>'])
    texts = [str(step.messages[0]["content"]) for step in steps]
    assert all(step.reward == -0.5 for step in steps)
    assert end is None
    for text, problem in zip(
        texts, ("it has no <action>", "not JSON", "must be a JSON object", "number:", "size:"), strict=True
    ):
        assert text.startswith("That is no valid action: ")
        assert problem in text
    _, end = await play(make_pool(shared_url), bad[:3])
    assert end is EpisodeEnd.TRUNCATED


@pytest.mark.external
async def test_the_whole_answer_can_be_one_field_of_the_action(shared_url: str) -> None:
    pool = EnvironmentPool(lambda: OpenEnvEnvironment(shared_url, field="number"), name="openenv")
    steps, _ = await play(pool, ["many", str(NUMBER)])
    assert [step.reward for step in steps] == [None, 1.0]


@pytest.mark.external
async def test_an_environment_that_raises_is_a_fault_and_its_session_is_replaced(shared_url: str) -> None:
    async with make_pool(shared_url) as pool:
        with pytest.raises(EnvironmentFault, match="step: EXECUTION_ERROR: the disk is full"):
            await play(pool, [guess(13)])
        assert (await play(pool, [guess(NUMBER)]))[1] is EpisodeEnd.TERMINATED
        assert (pool.num_started, pool.num_faults) == (2, 1)


@pytest.mark.external
async def test_an_episode_that_ends_with_nan_alone_is_a_fault(shared_url: str) -> None:
    with pytest.raises(EnvironmentFault, match="ended without a reward in any step; a reward of NaN arrives so"):
        await play(make_pool(shared_url), [guess(-1)])


@pytest.mark.parametrize(
    ("rewards", "paid", "is_fault"), [(True, None, True), (True, 0.0, False), (False, None, False)], ids=str
)
async def test_an_episode_without_any_reward_is_a_fault_unless_rewards_are_made_elsewhere(
    rewards: bool, paid: float | None, is_fault: bool
) -> None:
    async def serve(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            is_step = json.loads(message.data)["type"] == "step"
            data = {"observation": {"text": "."}, "reward": paid if is_step else None, "done": is_step}
            await socket.send_str(json.dumps({"type": "observation", "data": data}))
        return socket

    application = web.Application()
    application.router.add_get("/ws", serve)
    async with TestServer(application) as server:
        environment = OpenEnvEnvironment(f"http://127.0.0.1:{server.port}", rewards=rewards)
        async with EnvironmentPool(lambda: environment, name="openenv") as pool:
            if is_fault:
                with pytest.raises(EnvironmentFault, match="without a reward in any step"):
                    await play(pool, [guess(1)])
            else:
                assert [step.reward for step in (await play(pool, [guess(1)]))[0]] == [paid]


@pytest.mark.external
async def test_a_server_that_has_no_free_session_is_a_fault(own_url: str) -> None:
    async with make_pool(own_url).episode(TASK, seed=SEED):
        with pytest.raises(EnvironmentFault, match="CAPACITY_REACHED"):
            await play(make_pool(own_url), [])


@pytest.mark.external
async def test_a_server_that_dies_in_a_step_is_a_fault(own_url: str) -> None:
    with pytest.raises(EnvironmentFault, match="step: the connection ended"):
        await play(make_pool(own_url), [guess(666)])
    with pytest.raises(EnvironmentFault, match="ClientConnectorError"):
        await play(make_pool(own_url), [])


@pytest.mark.external
async def test_a_workflow_plays_it(shared_url: str, tmp_path: Path) -> None:
    workflow = PlayEnvironment("agentrl_envs.openenv:OpenEnvEnvironment", {"url": shared_url})
    trajectory = await episode(workflow, make_renderer(tmp_path), script=says("Hm."))
    assert trajectory.failure is None
    assert (len(trajectory.turns), trajectory.metrics["environment.terminated"]) == (3, 0)


@pytest.mark.parametrize("make", [lambda: OpenEnvEnvironment("ws://127.0.0.1:80"), lambda: OpenEnvEnvironment("")])
def test_an_address_that_is_no_http_address_is_refused(make: Callable[[], OpenEnvEnvironment]) -> None:
    with pytest.raises(ConfigError, match="must start with http"):
        make()
