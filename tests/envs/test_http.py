"""An environment behind HTTP is played over a real server; whatever the server does wrong is a fault."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import anyio
import pytest
from aiohttp import web

from agentrl.env import EnvironmentLimits, EnvironmentPool, EpisodeEnd
from agentrl.errors import ConfigError, EnvironmentFault
from agentrl.types import StopReason, Task
from agentrl_envs.http import MAX_STEP_BYTES, HttpEnvironment
from agentrl_workflows.environment import PlayEnvironment
from tests.rollout.harness import episode, make_renderer, says
from tests.support.http_environment import GuessingServer, Override, guessing_server
from tests.support.ports import later_port

TASK = Task(id="t0", data={"question": "Which number?"})


@pytest.fixture
def anyio_backend() -> str:
    """aiohttp needs asyncio."""
    return "asyncio"


def replying(text: str, status: int = 200) -> Override:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(text=text, status=status)

    return answer


async def hang(request: web.Request) -> web.StreamResponse:
    await anyio.sleep_forever()
    raise AssertionError("unreachable")


async def cut(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-length": "10"})
    await response.prepare(request)
    await response.write(b"{")
    assert request.transport is not None
    request.transport.close()
    return response


async def play(
    server: GuessingServer, answers: list[str], *, timeout_s: float = 60.0
) -> tuple[list[float], EpisodeEnd | None]:
    rewards: list[float] = []
    pool = EnvironmentPool(lambda: HttpEnvironment(server.url, timeout_s=timeout_s), name="http")
    async with pool.episode(TASK, seed=0) as running:
        assert running.start.messages == [{"role": "user", "content": "Which number?"}]
        for answer in answers:
            step = await running.step({"role": "assistant", "content": answer})
            rewards.append(step.reward or 0.0)
    return rewards, running.end


async def test_an_episode_is_played_and_ended_at_the_server() -> None:
    async with guessing_server() as server:
        rewards, end = await play(server, ["0", "2"])
        assert (rewards, end) == ([0.0, 1.0], EpisodeEnd.TERMINATED)
        assert [(route, body.get("turn")) for route, body in server.calls] == [
            ("reset", None),
            ("step", 0),
            ("step", 1),
            ("close", None),
        ]
        assert server.calls[0][1] == {"task": {"question": "Which number?"}, "task_id": "t0", "seed": 0}
        assert server.numbers == {}
        assert (await play(server, ["0"] * 5))[1] is EpisodeEnd.TRUNCATED


async def test_instances_of_a_pool_begin_one_episode_after_the_other() -> None:
    async with guessing_server() as server:
        async with EnvironmentPool(lambda: HttpEnvironment(server.url), name="http") as pool:
            for seed in range(3):
                async with pool.episode(TASK, seed=seed):
                    assert len(server.numbers) == 1
        assert server.numbers == {}
        assert pool.num_started == 1


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (replying("upstream is down", 503), "HTTP 503: upstream is down"),
        (replying("no", 404), "HTTP 404: no"),
        (replying("not json"), "expected a JSON object, got b'not json'"),
        (replying("[1]"), "expected a JSON object"),
        (replying("[" * 100_000), "expected a JSON object"),
        (replying('{"messages": 5}'), "`messages` must be a list"),
        (replying('{"terminated": "yes"}'), "must be true or false"),
        (replying('{"observation": "x", "reward": "1"}'), "a reward must be a finite number, got str '1'"),
        (replying('{"observation": "x", "reward": NaN}'), "a reward must be a finite number, got float nan"),
        (replying('{"reward": 1}'), "the episode continues, but there is no message"),
        (replying('{"observation": "' + "x" * 300_000 + '"}'), "over the limit of 200000"),
        (replying('{"observation": "' + "x" * 10_000_000 + '"}'), f"longer than {MAX_STEP_BYTES} bytes"),
        (hang, "TimeoutError"),
        (cut, "ClientPayloadError"),
    ],
)
async def test_a_step_that_goes_wrong_is_a_fault_and_not_repeated(override: Override, message: str) -> None:
    async with guessing_server() as server:
        server.overrides["step"] = [override]
        with pytest.raises(EnvironmentFault, match=message):
            await play(server, ["1"], timeout_s=1.0 if override is hang else 60.0)
        # A reset that a busy machine answers too late is repeated.
        assert [route for route, _ in server.calls if route != "reset"] == ["step", "close"]


async def test_a_server_that_recovers_begins_the_episode() -> None:
    async with guessing_server() as server:
        server.overrides["reset"] = [replying("busy", 503), replying("busy", 503)]
        assert (await play(server, ["2"]))[1] is EpisodeEnd.TERMINATED


async def test_a_server_that_is_gone_is_an_environment_fault_of_the_episode(tmp_path: Path) -> None:
    workflow = PlayEnvironment("agentrl_envs.http:HttpEnvironment", {"url": f"http://127.0.0.1:{later_port()}"})
    trajectory = await episode(workflow, make_renderer(tmp_path), script=says("1"))
    assert (trajectory.stop_reason, trajectory.final_reward) == (StopReason.ENVIRONMENT_FAULT, None)
    assert trajectory.failure is not None
    assert "ClientConnectorError" in trajectory.failure.message


async def test_a_workflow_plays_it_with_a_few_words_in_a_run_file(tmp_path: Path) -> None:
    async with guessing_server() as server:
        workflow = PlayEnvironment("agentrl_envs.http:HttpEnvironment", {"url": server.url})
        trajectory = await episode(workflow, make_renderer(tmp_path), script=says("0"), task=TASK)
        assert trajectory.failure is None
        assert trajectory.metrics["turns"] == len(trajectory.turns) == 5


async def test_a_server_that_does_not_close_an_episode_does_not_spoil_it() -> None:
    async with guessing_server() as server:
        server.overrides["close"] = [hang]
        pool = EnvironmentPool(lambda: HttpEnvironment(server.url), name="http", limits=EnvironmentLimits(close_s=0.05))
        async with pool.episode(TASK, seed=0) as running:
            await running.step({"role": "assistant", "content": "2"})


@pytest.mark.parametrize("make", [lambda: HttpEnvironment("127.0.0.1:80"), lambda: HttpEnvironment("")])
def test_an_address_that_is_none_is_refused(make: Callable[[], HttpEnvironment]) -> None:
    with pytest.raises(ConfigError, match="must start with http"):
        make()
