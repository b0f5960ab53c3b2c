"""Servers of both eras of MCP are used alike: sessions of 2025-11-25, and explicit handles of 2026-07-28."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import anyio
import pytest

from agentrl.env import EnvironmentPool
from agentrl.env.chat import ChatEpisode
from agentrl.errors import EnvironmentFault
from agentrl.types import Task
from agentrl_envs.mcp import McpEnvironment, McpServer
from tests.support.external_servers import ENVS_PYTHON
from tests.support.mcp_calls import COMMAND, call, content, web_server

pytestmark = pytest.mark.external
TASK = Task(id="t0", data={"question": "Fill the basket.", "answer": "3"})
MODERN, SESSIONS = "2026-07-28", "2025-11-25"
OFFICIAL = ["-m", "mcp_server_time", "--local-timezone", "UTC"]
HANDLE: dict[str, Any] = {"handle": "basket_id", "only": ["open_basket", "put", "close_basket"]}


@pytest.fixture
def anyio_backend() -> str:
    """The servers over HTTP need asyncio."""
    return "asyncio"


@pytest.fixture(scope="module")
def web_url() -> Iterator[str]:
    with web_server() as url:
        yield url


@pytest.mark.parametrize(
    ("python", "protocol", "spoken"),
    [
        (sys.executable, "auto", MODERN),
        (sys.executable, MODERN, MODERN),
        (sys.executable, "legacy", SESSIONS),
        (str(ENVS_PYTHON), "auto", SESSIONS),
    ],
)
async def test_the_official_time_server_answers_in_the_era_that_it_speaks(python: str, protocol: str, spoken: str) -> None:
    async with McpServer([python, *OFFICIAL], protocol=protocol, connect_s=300.0, call_s=120.0) as server:
        assert server.protocol_version == spoken
        assert set(server.tools) >= {"get_current_time", "convert_time"}
        times = {"source_timezone": "UTC", "time": "12:30", "target_timezone": "Asia/Tokyo"}
        assert "21:30" in await content(server, "convert_time", **times)
        assert (await content(server, "convert_time", **{**times, "time": "noon"})).startswith("Error: ")


async def test_a_server_that_does_not_speak_the_era_that_is_asked_for_is_a_fault() -> None:
    with pytest.raises(EnvironmentFault):
        async with McpServer([str(ENVS_PYTHON), *OFFICIAL], protocol=MODERN, connect_s=120.0):
            pass


async def put(episode: ChatEpisode, *items: str) -> list[str]:
    calls = [call("put", item=item) for item in items]
    step = await episode.step({"role": "assistant", "content": "", "tool_calls": calls})
    return [str(message["content"]) for message in step.messages]


def names_and_arguments(tools: Sequence[Any]) -> dict[str, list[str]]:
    return {tool["function"]["name"]: list(tool["function"]["parameters"]["properties"]) for tool in tools}


@pytest.mark.parametrize("opens", ["open_basket", None])
async def test_two_episodes_on_one_server_have_a_handle_each_which_the_policy_neither_sees_nor_gives(
    web_url: str, opens: str | None
) -> None:
    arguments: dict[str, Any] = {**HANDLE, "reset_tool": opens, "close_tool": "close_basket", "call_s": 120.0}
    async with (
        EnvironmentPool(lambda: McpEnvironment(web_url, **arguments), name="mcp") as pool,
        pool.episode(TASK, seed=1) as one,
        pool.episode(TASK, seed=2) as other,
    ):
        assert names_and_arguments(one.start.tools) == ({} if opens else {"open_basket": []}) | {"put": ["item"]}
        assert await put(one, "pear", "apple") == ["pear", "pear, apple"]
        assert await put(other, "plum") == ["plum"]
        stolen = call("put", item="fig", basket_id="basket-0")
        step = await one.step({"role": "assistant", "content": "", "tool_calls": [stolen, call("close_basket")]})
        assert [str(message["content"]).partition(";")[0] for message in step.messages] == [
            "Error: wrong arguments for put: unknown basket_id",
            "Error: there is no tool 'close_basket'",
        ]


async def test_the_handle_of_an_episode_is_closed_when_the_next_one_begins_and_when_the_environment_ends(
    web_url: str,
) -> None:
    async with McpServer(web_url, call_s=120.0) as server:
        before = int(await content(server, "count_baskets"))
        arguments: dict[str, Any] = {**HANDLE, "reset_tool": "open_basket", "close_tool": "close_basket", "call_s": 120.0}
        async with McpEnvironment(web_url, **arguments) as environment:
            for _ in range(2):
                await environment.reset(TASK, seed=1)
                assert int(await content(server, "count_baskets")) == before + 1
            await environment.close()
        assert int(await content(server, "count_baskets")) == before


async def test_a_workflow_gives_a_handle_to_the_tools_of_a_server_itself() -> None:
    async with McpServer(COMMAND, only=["put", "price"], connect_s=300.0, call_s=120.0) as server:
        fixed = {"basket_id": "mine"}
        assert names_and_arguments([tool.schema_without(fixed) for tool in server.tools.values()])["put"] == ["item"]
        answers: list[Any] = [await server.reply(call("put", item="pear"), fixed) for _ in range(2)]
        assert [answer["content"] for answer in answers] == ["pear", "pear, pear"]
        assert (await server.reply(call("price", item="pear"), fixed))["content"] == "3"
        with anyio.fail_after(300):
            assert await server.call("put", {"item": "fig", "basket_id": "other"}) == "fig"
