"""Tools: the schema comes from the signature, and whatever the model writes gets a readable reply."""

from __future__ import annotations

import json
from typing import Any, Literal

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionMessageFunctionToolCall
from pydantic import BaseModel

from agentrl.client.tools import Tool, ToolError, reply_to, tool
from agentrl.errors import EnvironmentFault, EpisodeLimit


@tool
def calc(a: int, op: Literal["+", "-", "*"], b: int = 2) -> str:
    """Do one arithmetic operation.

    Exactly one.

    Args:
        a: left operand,
            an integer
        op: what to do

    Returns:
        The result.
    """
    return str({"+": a + b, "-": a - b, "*": a * b}[op])


@tool(name="lookup", description="Find things.")
async def find(query: str, limit: int | None = None, *, schema: list[str] | None = None) -> dict[str, Any]:
    await anyio.lowlevel.checkpoint()
    return {"query": query, "limit": limit, "schema": schema}


def call(arguments: object, name: str = "calc") -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


def test_the_schema_says_what_the_signature_and_docstring_say():
    assert calc.schema == {
        "type": "function",
        "function": {
            "name": "calc",
            "description": "Do one arithmetic operation.\n\nExactly one.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "left operand, an integer"},
                    "op": {"type": "string", "enum": ["+", "-", "*"], "description": "what to do"},
                    "b": {"type": "integer", "default": 2},
                },
                "required": ["a", "op"],
                "additionalProperties": False,
            },
        },
    }


@pytest.mark.parametrize(
    "text",
    [
        "Move.\n\nArgs:\n    column: where\n        to\n\nReturns:\n    The board.",
        "Move.\n\n:param column: where to\n:returns: The board.",
        "Move.\n\nParameters\n----------\ncolumn : int\n    where to",
    ],
)
def test_the_description_of_a_parameter_is_found_in_every_docstring_style(text: str):
    def move(column: int) -> None: ...

    move.__doc__ = text
    function: Any = tool(move).schema["function"]
    assert function["description"] == "Move."
    assert function["parameters"]["properties"] == {"column": {"type": "integer", "description": "where to"}}


def test_a_docstring_without_a_style_is_the_description():
    def move(column: int) -> None:
        """Move.

        Args:
            one or the other
        """

    assert tool(move).schema["function"].get("description") == "Move.\n\nArgs:\n    one or the other"


def test_a_tool_is_still_the_function():
    assert calc(3, "*", 4) == "12"
    assert calc.__name__ == "calc"
    assert "arithmetic" in (calc.__doc__ or "")


def test_name_and_description_can_be_given():
    function = find.schema["function"]
    assert (find.name, function["name"], function.get("description")) == ("lookup", "lookup", "Find things.")


async def test_a_call_is_run_and_answered():
    assert await calc.reply(call('{"a": 2, "op": "-"}')) == {"role": "tool", "tool_call_id": "c1", "content": "0"}
    wire = ChatCompletionMessageFunctionToolCall.model_validate(call('{"a":2,"op":"+"}'))
    assert (await calc.reply(wire))["content"] == "4"
    assert (await calc.reply(call({"a": 2, "op": "+"})))["content"] == "4"


async def test_async_tools_and_parameters_named_like_model_attributes_work():
    reply = await find.reply(call('{"query": "x", "schema": ["y"]}', "lookup"))
    assert json.loads(str(reply["content"])) == {"query": "x", "limit": None, "schema": ["y"]}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("", "a: Field required"),
        (None, "a: Field required"),
        ("not json", "Invalid JSON"),
        ('{"a": 1, "op": "/"}', "op: Input should be '+', '-' or '*'"),
        ('{"a": 1.5, "op": "+"}', "a: Input should be a valid integer"),
        ('{"a": 1, "op": "+", "c": 3}', "c: Extra inputs"),
        ("[1, 2]", "object"),
        ("[" * 10_000, "Invalid JSON"),
        ('{"a": "\\ud800", "op": "+"}', "JSON"),
    ],
)
async def test_bad_arguments_become_a_text_the_model_can_read(arguments: object, says: str):
    reply = await calc.reply(call(arguments))
    content = str(reply["content"])
    assert content.startswith("Error: wrong arguments for calc")
    assert says in content
    assert len(content) <= 800


async def test_an_unknown_tool_name_is_an_error_the_model_can_read():
    assert "there is no tool 'clac'; there is calc" in str((await calc.reply(call("{}", "clac")))["content"])
    assert "there is calc, lookup" in str((await reply_to(call("{}", "clac"), [calc, find]))["content"])
    assert (await reply_to(call('{"a": 1, "op": "+"}'), [find, calc]))["content"] == "3"


async def test_a_tool_error_is_for_the_model_and_any_other_error_is_the_environments_fault():
    @tool
    def flaky(kind: str) -> str:
        if kind == "busy":
            raise ToolError("busy, try again")
        if kind == "limit":
            raise EpisodeLimit("spent")
        raise OSError("disk")

    assert (await flaky.reply(call('{"kind": "busy"}', "flaky")))["content"] == "Error: busy, try again"
    with pytest.raises(EnvironmentFault, match="tool flaky raised OSError: disk"):
        await flaky.reply(call('{"kind": "x"}', "flaky"))
    with pytest.raises(EpisodeLimit):
        await flaky.reply(call('{"kind": "limit"}', "flaky"))


async def test_results_are_written_as_json_unless_they_are_text():
    class Point(BaseModel):
        x: int

    @tool
    def give(kind: str) -> object:
        return {"text": "plain", "none": None, "model": Point(x=1), "list": [1, 2.5], "other": {1j}}[kind]

    async def content(kind: str) -> str:
        return str((await give.reply(call(json.dumps({"kind": kind}), "give")))["content"])

    assert [await content(kind) for kind in ("text", "none", "model", "list")] == ["plain", "null", '{"x":1}', "[1,2.5]"]
    assert "1j" in await content("other")


async def test_bound_methods_are_tools():
    class Board:
        moves = 0

        def move(self, column: int) -> int:
            self.moves += column
            return self.moves

    board = Board()
    move = tool(board.move)
    assert (await move.reply(call('{"column": 3}', "move")))["content"] == "3"
    assert board.moves == 3
    assert "column" in str(move.schema["function"].get("parameters"))


def test_signatures_that_cannot_be_described_are_refused():
    with pytest.raises(TypeError, match="'b' needs a type"):

        @tool
        def untyped(a: int, b) -> int:  # type: ignore[no-untyped-def]  # pyright: ignore
            return a

    with pytest.raises(TypeError, match="'rest' is variadic"):

        @tool
        def variadic(*rest: int) -> int:
            return sum(rest)


async def test_a_cancelled_tool_call_stops_where_it_awaits():
    entered = anyio.Event()

    @tool
    async def wait() -> str:
        entered.set()
        await anyio.sleep_forever()
        return ""

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait.reply, call("{}", "wait"))
        await entered.wait()
        tasks.cancel_scope.cancel()


def test_a_malformed_tool_call_object_is_the_programmers_error():
    with pytest.raises(TypeError, match="must have a function"):
        anyio.run(calc.reply, {"id": "x"})


@given(st.text(max_size=60) | st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5), max_size=4))
def test_no_arguments_a_model_can_write_raise(arguments: object):
    reply = anyio.run(calc.reply, call(arguments))
    assert isinstance(reply["content"], str)


def test_tool_is_generic_over_its_function():
    typed: Tool[..., str] = calc
    assert typed.name == "calc"


@pytest.mark.parametrize(
    "arguments",
    ['{"a": 1, "op": "' + "+" * 10_000_000 + '"}', '{"a": 1, "op": "+", "' + "c" * 10_000_000 + '": 1}', "{" * 10_000_000],
    ids=["value", "name", "nesting"],
)
async def test_arguments_of_10_mb_become_a_short_text(arguments: str):
    content = str((await calc.reply(call(arguments)))["content"])
    assert content.startswith("Error: wrong arguments for calc")
    assert len(content) <= 800


async def test_a_result_that_is_no_text_and_no_json_is_the_environments_fault():
    @tool
    def picture() -> bytes:
        return b"\xff\xd8\xff"

    with pytest.raises(EnvironmentFault, match="tool picture raised PydanticSerializationError"):
        await picture.reply(call("{}", "picture"))


async def test_a_tool_that_hangs_ends_with_the_deadline_around_it():
    @tool
    async def hang() -> str:
        await anyio.sleep_forever()
        return ""

    with anyio.move_on_after(0) as scope:
        await hang.reply(call("{}", "hang"))
    assert scope.cancelled_caught
