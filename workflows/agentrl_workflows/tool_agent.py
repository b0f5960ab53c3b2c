"""A tool agent made of a run file: your functions are its tools, and your function grades its last message.

    workflow: agentrl_workflows.tool_agent:ToolAgent
    workflow_args: {tools: ["my_tools:look_up", "my_tools:convert"], grader: "my_tools:grade"}

    agentrl train examples/bundled/tool_agent.yaml --dry-run

Tools with a state of their own for each episode belong into an environment; `agentrl_workflows.environment` plays those.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, Protocol, TypeAlias, cast

from openai import omit

from agentrl.client import Client, MessageLike
from agentrl.client.tools import RepliesToCalls, reply_to, tool
from agentrl.env import environment_boundary
from agentrl.episode.checks import check_reward
from agentrl.errors import ConfigError, WorkflowError
from agentrl.support.user_code import import_user_object
from agentrl.types import Task
from agentrl.workflow import RolloutWorkflow

AnswerGrader: TypeAlias = Callable[[str, Task], float | Awaitable[float]]
"""Gets the last message of the model and the task, and returns the reward."""
Toolbox: TypeAlias = Callable[[], AbstractAsyncContextManager[object]]
"""Opens tools that need it, such as those of an MCP server: yields a list of them, or an object whose `tools` they are."""


class OfferedTool(RepliesToCalls, Protocol):
    """A tool and the entry of the `tools` argument that offers it."""

    @property
    def schema(self) -> Mapping[str, object]:
        """The entry."""
        ...


class ToolAgent(RolloutWorkflow):
    """Asks `task["question"]`, answers tool calls until the model makes none, and pays what the grader says.

    Records `tool_calls`, `tool_errors` (replies that begin with `Error:`) and `answered` (0: still calling at `max_turns`,
    and the grader gets an empty text). What a tool or the grader raises is an `environment_fault`, but for `ToolError`.

    Args:
        grader: `module:name` of an `AnswerGrader`.
        tools: `module:name` of functions, of tools (`agentrl.tool`) or of lists of them.
        toolboxes: `module:name` of functions without arguments, each a `Toolbox`; opened once for all episodes.
        max_turns: model calls of one episode.
        system: the system message; empty: none.
    """

    def __init__(
        self,
        *,
        grader: str,
        tools: Sequence[str] = (),
        toolboxes: Sequence[str] = (),
        max_turns: int = 8,
        system: str = "",
    ) -> None:
        if max_turns < 1:
            raise ConfigError(f"max_turns must be at least 1, got {max_turns}")
        self._grade = cast("AnswerGrader", _find_callable(grader, "grader"))
        self._own = [each for spec in tools for each in _tools_of(import_user_object(spec, "tools"), f"tools: {spec}")]
        self._toolboxes = [(spec, cast("Toolbox", _find_callable(spec, "toolboxes"))) for spec in toolboxes]
        _check_names(self._own)
        self._max_turns, self._system = max_turns, system
        self._tools: list[OfferedTool] | None = None if toolboxes else self._own

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[None]:
        """Open the toolboxes.

        Raises:
            ConfigError: a toolbox yields no tools, or two tools have the same name.

        Cancellation: they are closed.
        """
        async with AsyncExitStack() as stack:
            tools = [*self._own]
            for spec, toolbox in self._toolboxes:
                tools += _tools_of(await stack.enter_async_context(toolbox()), f"toolboxes: {spec}")
            _check_names(tools)
            self._tools = tools
            try:
                yield
            finally:
                self._tools = None if self._toolboxes else self._own

    async def run(self, task: Task, client: Client) -> float:
        """Return what the grader says of the last message.

        Cancellation: the running tool or grader is cancelled.
        """
        if self._tools is None:
            raise WorkflowError("the toolboxes are closed; run episodes inside `async with workflow.opened():`")
        tools: Any = [each.schema for each in self._tools] or omit
        messages: list[MessageLike] = [{"role": "system", "content": self._system}] if self._system else []
        messages.append({"role": "user", "content": task["question"]})
        calls, errors, answer = 0, 0, None
        for _ in range(self._max_turns):
            completion = await client.chat.completions.create(messages=messages, tools=tools)
            message = completion.choices[0].message
            if not message.tool_calls:
                answer = message.content or ""
                break
            replies = [await reply_to(call, self._tools) for call in message.tool_calls]
            calls, errors = calls + len(replies), errors + sum(str(each["content"]).startswith("Error:") for each in replies)
            messages += [message, *replies]
        client.record(tool_calls=calls, tool_errors=errors, answered=answer is not None)
        with environment_boundary("grader"):
            graded = self._grade(answer or "", task)
            return check_reward(await graded if inspect.isawaitable(graded) else graded, "the grader")


def _find_callable(spec: str, field: str) -> Callable[..., object]:
    factory = import_user_object(spec, field)
    if not callable(factory):
        raise ConfigError(f"{field}: {spec} is not callable")
    return factory


def _tools_of(found: object, where: str) -> list[OfferedTool]:
    """Return a tool, each tool of a list or mapping, or the `tools` of an open toolbox."""
    if hasattr(found, "schema") and hasattr(found, "reply") and hasattr(found, "name"):
        return [cast("OfferedTool", found)]
    if inspect.isfunction(found):
        try:
            return [tool(found)]
        except TypeError as error:
            raise ConfigError(f"{where}: {error}") from None
    inside: object = getattr(found, "tools", found)
    each = list(cast("Mapping[str, object]", inside).values()) if isinstance(inside, Mapping) else inside
    if isinstance(each, (list, tuple)) and each:
        return [one for item in cast("Sequence[object]", each) for one in _tools_of(item, where)]
    raise ConfigError(f"{where}: expected a function, a tool or a list of them, got {found!r:.80}")


def _check_names(tools: Sequence[OfferedTool]) -> None:
    names = [each.name for each in tools]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"tools: two tools have the name {twice[0]!r}; names must be unique")
