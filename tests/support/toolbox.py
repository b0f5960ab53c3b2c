"""Tools, toolboxes and graders that a run file names."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from pydantic import BaseModel

from agentrl.client.tools import ToolError, tool
from agentrl.types import Task

EVENTS: list[str] = []
"""What the toolboxes did."""


def population(country: str) -> int:
    """Return how many people live in a country."""
    if country != "Velmara":
        raise ToolError(f"nothing is known of {country}")
    return 41_000


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def breaks() -> str:
    """Break."""
    raise ConnectionError("HTTP 503")


def variadic(*countries: str) -> str:
    """Take any number of arguments, which no schema can say."""
    return " ".join(countries)


BOTH = [population, add]
NOTHING: list[object] = []


@dataclass
class ForeignTool:
    """A tool that another package offers."""

    name: str

    @property
    def schema(self) -> Mapping[str, object]:
        parameters = {"type": "object", "properties": {}}
        return {"type": "function", "function": {"name": self.name, "description": "Echo.", "parameters": parameters}}

    async def reply(self, call: Mapping[str, object] | BaseModel) -> dict[str, object]:
        identity = call.model_dump()["id"] if isinstance(call, BaseModel) else call["id"]
        return {"role": "tool", "tool_call_id": identity, "content": "from afar"}


class Server:
    """Has its tools in a mapping, as an MCP server has."""

    def __init__(self) -> None:
        self.tools = {"far": ForeignTool("far"), "farther": ForeignTool("farther")}


@asynccontextmanager
async def server() -> AsyncGenerator[Server]:
    EVENTS.append("opened")
    try:
        yield Server()
    finally:
        EVENTS.append("closed")


@asynccontextmanager
async def second_add() -> AsyncGenerator[list[object]]:
    yield [add]


def says_the_answer(answer: str, task: Task) -> float:
    return float(str(task["answer"]) in answer)


async def judge_is_gone(answer: str, task: Task) -> float:
    raise ConnectionError("HTTP 503")


async def grades_with_text(answer: str, task: Task) -> str:
    return "good"
