"""Rows of NeMo Gym are played against a resource server: its tools, its sessions, its grading, and its faults."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest

from agentrl.env import EnvironmentPool, EpisodeEnd
from agentrl.env.chat import ChatEpisode, ChatStep
from agentrl.errors import ConfigError, EnvironmentFault
from agentrl.types import Task
from agentrl_envs.nemo_gym import NemoGymEnvironment, items_of_answer, messages_of_items
from tests.support.external_servers import SCRIPTS
from tests.support.nemo_gym_server import CounterServer, counter_server

PYTHON = os.environ.get("NEMO_GYM_PYTHON", "")
"""A Python 3.12 or newer with nemo-gym, which does not run beside agentrl on 3.11."""
INTEGER = {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]}
TOOLS = [
    {"type": "function", "name": "increment_counter", "parameters": INTEGER, "strict": True, "description": "Add."},
    {"type": "function", "name": "get_counter_value", "parameters": {"type": "object", "properties": {}}},
    {"type": "function", "name": "break", "parameters": {"type": "object", "properties": {}}},
    {"type": "function", "name": "verify", "parameters": {"type": "object", "properties": {}}},
]
ROW: dict[str, Any] = {
    "responses_create_params": {"input": [{"role": "user", "content": "add 1 then add 2"}], "tools": TOOLS},
    "expected_count": 6,
    "initial_count": 3,
}
TASK = Task(id="row-0", data=ROW)


@pytest.fixture
def anyio_backend() -> str:
    """aiohttp needs asyncio."""
    return "asyncio"


def call(name: str, arguments: str = "{}") -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}


async def says(episode: ChatEpisode, *calls: dict[str, Any], text: str = "") -> ChatStep:
    return await episode.step({"role": "assistant", "content": text, "tool_calls": list(calls)})


@asynccontextmanager
async def playing(task: Task = TASK, **arguments: Any) -> AsyncGenerator[tuple[CounterServer, ChatEpisode]]:  # noqa: ANN401
    async with counter_server() as server:
        pool = EnvironmentPool(lambda: NemoGymEnvironment(server.url, **arguments), name="nemo_gym")
        async with pool.episode(task, seed=1) as episode:
            yield server, episode


async def play_counter(episode: ChatEpisode) -> ChatStep:
    """Add 1 and 2 and say so."""
    assert episode.start.messages == [{"role": "user", "content": "add 1 then add 2"}]
    step = await says(episode, call("increment_counter", '{"count": 1}'), call("increment_counter", '{"count": 2}'))
    assert [json.loads(str(message["content"])) for message in step.messages] == [{"success": True}] * 2
    step = await says(episode, call("get_counter_value"))
    assert json.loads(str(step.messages[0]["content"]))["count"] == 6
    return await says(episode, text="It is 6.")


async def test_a_row_is_played_with_the_tools_of_its_server_and_graded_by_it() -> None:
    async with playing() as (server, episode):
        names = [tool["function"]["name"] for tool in episode.start.tools]  # pyright: ignore[reportIndexIssue, reportCallIssue, reportArgumentType, reportOptionalSubscript]
        assert names == ["increment_counter", "get_counter_value", "break"]
        server.verdict = {"reward_components": {"right": 1.0}, "attempts": 2}
        step = await play_counter(episode)
        assert (step.reward, step.end) == (1.0, EpisodeEnd.TERMINATED)
        assert {name: step.metrics[name] for name in ("right", "attempts")} == {"right": 1.0, "attempts": 2.0}
        [body] = server.verified
        kinds = [item["type"] for item in body["response"]["output"]]
        assert kinds == ["function_call"] * 2 + ["function_call_output"] * 2 + [
            "function_call",
            "function_call_output",
            "message",
        ]
        assert {name: body[name] for name in ROW} == ROW


async def test_two_episodes_on_one_server_have_a_session_each() -> None:
    async with (
        playing() as (server, one),
        EnvironmentPool(lambda: NemoGymEnvironment(server.url), name="nemo_gym") as pool,
        pool.episode(TASK, seed=1) as other,
    ):
        await says(one, call("increment_counter", '{"count": 3}'))
        assert (await says(other, text="It is 3.")).reward == 0.0
        assert (await says(one, text="It is 6.")).reward == 1.0


async def test_the_policy_reaches_no_route_but_those_of_its_tools_and_reads_what_is_wrong_with_a_call() -> None:
    async with playing(max_result_chars=100) as (server, episode):
        bad = [
            call("verify"),
            call("seed_session", '{"initial_count": 6}'),
            call("../verify"),
            call("increment_counter", "{"),
            call("increment_counter", "[1]"),
            call("increment_counter", '{"count": "one"}'),
            call("get_counter_value", '{"padding": 1000}'),
        ]
        texts = [str(message["content"]) for message in (await says(episode, *bad)).messages]
        assert all("There is no tool" in text for text in texts[:3])
        assert "Invalid tool call arguments" in texts[3]
        assert "must be a JSON object" in texts[4]
        assert "count must be an integer" in texts[5]
        assert "[cut; the result has" in texts[6]
        assert (server.verified, list(server.counters.values())) == ([], [3])


async def test_an_episode_is_graded_as_it_stands_after_so_many_turns() -> None:
    async with playing(max_turns=1) as (_, episode):
        step = await says(episode, call("increment_counter", '{"count": 3}'))
        assert (step.reward, step.end, len(step.messages)) == (1.0, EpisodeEnd.TRUNCATED, 1)


async def graded(verdict: dict[str, Any]) -> ChatStep:
    async with playing() as (server, episode):
        server.verdict = verdict
        return await says(episode, text="6")


async def broken() -> ChatStep:
    async with playing() as (_, episode):
        return await says(episode, call("break"))


async def begun(task: Task) -> None:
    async with playing(task):
        pass


async def test_what_the_server_gets_wrong_is_a_fault_and_no_reward() -> None:
    with pytest.raises(EnvironmentFault, match=r"break: HTTP 500: .*the disk is full"):
        await broken()
    masked = {"mask_sample": True, "failure_reason": "the judge is gone"}
    for verdict, problem in [(masked, "is no measurement: the judge is gone"), ({"reward": None}, "expected a `reward`")]:
        with pytest.raises(EnvironmentFault, match=problem):
            await graded(verdict)
    partial = {name: value for name, value in ROW.items() if name != "initial_count"}
    with pytest.raises(EnvironmentFault, match=r"seed_session: expected a JSON object, got HTTP 422: .*initial_count"):
        await begun(Task(id="t", data=partial))


async def test_a_task_that_is_no_row_is_refused() -> None:
    with pytest.raises(ConfigError, match="must start with http"):
        NemoGymEnvironment("127.0.0.1:8000")
    with pytest.raises(ConfigError, match="has no responses_create_params with an `input`"):
        await NemoGymEnvironment("http://127.0.0.1:1").reset(Task(id="t", data={"question": "?"}), seed=1)


def test_the_items_of_a_prompt_are_chat_messages() -> None:
    items: list[dict[str, Any]] = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Add."}]},
        {"type": "reasoning", "id": "r", "summary": []},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "1"},
        {"type": "message", "role": "user", "content": "And now?"},
    ]
    assert [message["role"] for message in messages_of_items(items)] == ["developer", "assistant", "tool", "user"]
    assert messages_of_items("Hi.") == [{"role": "user", "content": "Hi."}]
    with pytest.raises(ConfigError, match="'web_search_call' cannot be a chat message"):
        messages_of_items([{"type": "web_search_call"}])
    with pytest.raises(ConfigError, match="plays text alone"):
        messages_of_items([{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}])
    answer = {"role": "assistant", "content": "4", "reasoning_content": "2 + 2", "tool_calls": [call("add")]}
    assert [item["type"] for item in items_of_answer(answer)] == ["reasoning", "message", "function_call"]


@contextmanager
def real_server(name: str) -> Generator[str]:
    script = SCRIPTS / "nemo_gym_server.py"
    with subprocess.Popen([PYTHON, script, name], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield f"http://127.0.0.1:{server.stdout.readline().strip()}"
        finally:
            server.kill()


@pytest.mark.external
@pytest.mark.skipif(not PYTHON, reason="set NEMO_GYM_PYTHON to a Python with nemo-gym")
async def test_the_counter_of_the_real_package_is_played() -> None:
    with real_server("example_session_state_mgmt") as url:
        async with EnvironmentPool(lambda: NemoGymEnvironment(url), name="nemo_gym") as pool:
            for _ in range(2):
                async with pool.episode(TASK, seed=1) as episode:
                    step = await play_counter(episode)
                    assert (step.reward, step.end) == (1.0, EpisodeEnd.TERMINATED)
