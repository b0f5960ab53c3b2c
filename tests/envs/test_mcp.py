"""Tools of an MCP server in a real process are called; whatever the model writes gets an answer that it can read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mcp.types import Tool as ListedTool

from agentrl.client.tools import reply_to, tool
from agentrl.errors import ConfigError, EnvironmentFault
from agentrl.types import Task
from agentrl_envs.mcp import McpEnvironment, McpServer, McpTool, grade_answer
from agentrl_envs.mcp_arguments import MAX_DEPTH
from tests.support.mcp_calls import COMMAND, call, content

TASK = Task(id="t0", data={"question": "What does a pear cost?", "answer": "3"})
PRICE: dict[str, Any] = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}


def closed_tool() -> McpTool:
    """Return a tool whose server is never opened, so only calls that do not reach it are answered."""
    return McpTool(McpServer(COMMAND), ListedTool(name="price", input_schema=PRICE))


@tool
def add(a: int, b: int) -> int:
    return a + b


@pytest.mark.starts
async def test_the_tools_of_a_server_are_called_and_its_errors_are_for_the_model() -> None:
    async with McpServer(COMMAND, only=["price", "buy", "picture", "shout"], max_result_chars=1_000) as server:
        assert list(server.tools) == ["price", "buy", "picture", "shout"]
        assert server.schemas[0] == {
            "type": "function",
            "function": {
                "name": "price",
                "description": server.tools["price"].schema["function"]["description"],  # type: ignore[index,call-overload]
                "parameters": {
                    **PRICE,
                    "properties": {"item": {"type": "string", "title": "Item"}},
                    "title": "priceArguments",
                },
            },
        }
        answered = await server.reply(call("price", item="pear"))
        assert answered == {"role": "tool", "tool_call_id": "c1", "content": "3"}
        assert (await content(server, "price", item=1)).startswith("Error: Error executing tool price: 1 validation error")
        assert (await content(server, "price", item="pear", size=2)) == (
            "Error: wrong arguments for price: unknown size; there is item"
        )
        assert (await content(server, "buy", item="apple")).startswith("Error: ")
        assert (await content(server, "die")) == "Error: there is no tool 'die'; there is price, buy, picture, shout"
        assert (await content(server, "picture")) == "[image/gif, which cannot be shown]"
        long = await content(server, "shout", size=200_000)
        assert long.endswith("[cut; the result has 200000 characters]")
        assert len(long) < 1_100
        assert await server.read_resource("shop://rules") == "One pear each."
        tools = [add, *server.tools.values()]
        assert [
            (await reply_to(each, tools))["content"] for each in (call("add", a=1, b=2), call("price", item="pear"))
        ] == [
            "3",
            "3",
        ]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("{", "they are not JSON"),
        ("[1]", "must be a JSON object"),
        ("[" * 100_000, "they are not JSON"),
        ("", "missing item"),
        (None, "missing item"),
        ('{"item": NaN}', "NaN is no JSON"),
        ('{"item": "\\ud800"}', "they are not JSON"),
        ('{"item": "' + "a" * 10_000_000 + '"}', "they have 10000012 characters, the limit is 100000"),
        ('{"item": "pear", "size": 1}', "unknown size; there is item"),
        ({"item": {1, 2}}, "they are not JSON"),
        ('{"item": ' + "[" * 65 + "]" * 65 + "}", f"nested more than {MAX_DEPTH} levels"),
    ],
)
async def test_bad_arguments_never_reach_the_server(arguments: object, says: str) -> None:
    bad = {"id": "c1", "type": "function", "function": {"name": "price", "arguments": arguments}}
    answer = str((await closed_tool().reply(bad))["content"])
    assert answer.startswith("Error: wrong arguments for price: ")
    assert says in answer
    assert len(answer) <= 800


@settings(max_examples=40)
@given(st.text(max_size=60) | st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5), max_size=4))
def test_no_arguments_that_a_model_can_write_raise_before_the_call(arguments: object) -> None:
    bad = {"id": "c1", "type": "function", "function": {"name": "price", "arguments": arguments}}
    try:
        assert str(anyio.run(closed_tool().reply, bad)["content"]).startswith("Error: ")
    except EnvironmentFault as fault:
        assert "the server is not open" in str(fault)  # noqa: PT017 - arguments that fit get as far as this


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: McpServer("shop.example/mcp"), "a URL that starts with http"),
        (lambda: McpServer([]), "there is no command ''"),
        (lambda: McpServer(["no-such-command"]), "there is no command 'no-such-command'"),
        (lambda: McpServer(COMMAND, protocol="2024"), "protocol must be one of auto, legacy, 2026-07-28, got '2024'"),
        (lambda: McpEnvironment(COMMAND, close_tool="leave"), "close_tool needs a handle"),
        (lambda: McpEnvironment(COMMAND, grade="no_such_module:grade"), "importing grade"),
        (lambda: McpEnvironment(COMMAND, grade="json:nothing"), "must be module:function"),
    ],
)
def test_a_server_or_grade_that_is_none_is_refused(make: Callable[[], object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()


def test_an_answer_is_compared_with_the_reference() -> None:
    answers = ["It costs 3.", r"So \boxed{3}, not 4.", "3", "4", ""]
    assert [grade_answer(answer, TASK) for answer in answers] == [1.0, 1.0, 1.0, 0.0, 0.0]
