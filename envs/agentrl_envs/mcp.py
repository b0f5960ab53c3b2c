"""Tools of Model Context Protocol servers: in a workflow that opens one (`McpServer`), or as a `McpEnvironment`.

Invariant: whatever a model writes becomes a call that fits the tool's listed arguments or an error text that the model can
read. A server that dies, is late or breaks the protocol is an `EnvironmentFault`. A server is opened and closed by one task.
"""

from __future__ import annotations

import importlib
import inspect
import json
import math
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Generator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias, cast

import anyio
from pydantic import BaseModel

from agentrl.env import ChatStart, ChatStep, EpisodeEnd, environment_boundary
from agentrl.episode.tape import ask
from agentrl.errors import ConfigError, EnvironmentFault
from agentrl.support.concurrency import flatten
from agentrl.types import JsonValue, Message, Task
from agentrl_envs.mcp_arguments import read_call_arguments
from agentrl_envs.mcp_connection import mcp_connection
from agentrl_rewards.extract import boxed, last_number
from agentrl_rewards.match import exact_match

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import Tool as ListedTool
    from openai.types.chat import ChatCompletionToolMessageParam

Grade: TypeAlias = Callable[[str, Task], float | Awaitable[float]]
"""Gets the policy's last message and the task; returns the reward."""
_MAX_PAGES: Final = 1_000
_MAX_NAME_CHARS: Final = 120
_MAX_ERROR_CHARS: Final = 800
_READABLE_CODES: Final = frozenset({-32601, -32602})
"""Of JSON-RPC: no such method, and wrong parameters, which is what a server says of an unknown tool as well."""


class McpServer:
    """A connection to one server, open for the length of an `async with` block.

    Args:
        server: the command of a server that speaks on its standard input and output, or the URL of one that speaks HTTP.
        env: variables for the command beside `PATH`, `HOME` and a few others.
        cwd: where the command runs.
        headers: of every HTTP request, such as a key.
        only: names of the tools to offer; None: all.
        connect_s: seconds to start or reach the server and to list its tools.
        call_s: seconds of one call or one read.
        max_tools: more than so many offered tools are a fault.
        max_result_chars: a longer result is cut, and its end tells the model so.
        max_argument_chars: longer arguments are an error for the model.
        protocol: `auto` speaks that of 2026-07-28, without sessions, to servers that know it, and that of 2025-11-25 to
            others; `legacy` or `2026-07-28` speaks this one alone.

    Raises:
        ConfigError: the SDK is not installed or does not speak `protocol`, or there is no such command.

    Example:
        async with McpServer(["python", "shop_server.py"]) as shop:
            completion = await client.chat.completions.create(messages=messages, tools=shop.schemas)
            for call in completion.choices[0].message.tool_calls or []:
                messages.append(await shop.reply(call))
    """

    def __init__(
        self,
        server: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        headers: Mapping[str, str] | None = None,
        only: Collection[str] | None = None,
        connect_s: float = 60.0,
        call_s: float = 30.0,
        max_tools: int = 128,
        max_result_chars: int = 20_000,
        max_argument_chars: int = 100_000,
        protocol: str = "auto",
    ) -> None:
        self.tools: Mapping[str, McpTool] = {}
        """The tools on offer, by name: those that the server had when it was opened or `refresh` was called."""
        self.max_result_chars = max_result_chars
        self.max_argument_chars = max_argument_chars
        self._connect = mcp_connection(server, env, cwd, headers, protocol)
        self.name = f"mcp {server if isinstance(server, str) else ' '.join(server)}"[:_MAX_NAME_CHARS]
        self._only = None if only is None else frozenset(only)
        self._connect_s, self._call_s, self._max_tools = connect_s, call_s, max_tools
        self._block: AbstractAsyncContextManager[None] = nullcontext()
        self._client: Client | None = None
        self._is_broken = False

    @property
    def schemas(self) -> list[dict[str, JsonValue]]:
        """The tools as the OpenAI wire declares them, for the `tools` argument of a model call."""
        return [tool.schema for tool in self.tools.values()]

    @property
    def protocol_version(self) -> str:
        """The version of the protocol that is spoken, such as `2026-07-28`; EnvironmentFault: the server is not open."""
        return self._opened().protocol_version

    async def __aenter__(self) -> Self:
        self._block = self._connected()
        with environment_boundary(f"{self.name}: start"):
            await self._block.__aenter__()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._client = None
        try:
            with environment_boundary(f"{self.name}: close"):
                # Without the block's error, which the SDK's task groups would wrap.
                await self._block.__aexit__(None, None, None)
        except EnvironmentFault as fault:
            if isinstance(error, Exception):
                error.add_note(str(fault))  # the error that ended the block is the one to raise
            elif not self._is_broken:
                raise

    @asynccontextmanager
    async def _connected(self) -> AsyncGenerator[None]:
        with anyio.CancelScope(deadline=anyio.current_time() + self._connect_s) as scope:
            try:
                async with self._connect() as client:
                    await self._list_tools(client)
                    self._client = client
                    scope.deadline = math.inf
                    yield
            except ExceptionGroup as group:
                raise next(flatten(group)) from group
        if scope.cancelled_caught:
            raise EnvironmentFault(f"{self.name}: no answer within {self._connect_s:g} s")

    async def refresh(self) -> None:
        """List the server's tools again, as it may have changed them.

        Raises:
            EnvironmentFault: the server did not answer as it must, or has too many tools.
        """
        with self._asking("tools/list"):
            await self._list_tools(self._opened())

    async def reply(
        self, call: Mapping[str, object] | BaseModel, fixed: Mapping[str, JsonValue] | None = None
    ) -> ChatCompletionToolMessageParam:
        """Run a tool call of a completion and return the message that answers it.

        Args:
            call: an entry of `message.tool_calls`, as the openai object or as a mapping.
            fixed: arguments of every tool that has them, such as the handle of the episode; the model cannot give them.

        Raises:
            EnvironmentFault: the server died, was late, or broke the protocol.

        Cancellation: the server learns of it, and may have done the call.
        """
        name, _, identity = _read_call_fields(call)
        tool = self.tools.get(name)
        if tool is None:
            names = ", ".join(self.tools) or "none"
            return _tool_message(identity, f"Error: there is no tool {name[:80]!r}; there is {names}"[:_MAX_ERROR_CHARS])
        return await tool.reply(call, fixed)

    async def read_resource(self, uri: str) -> str:
        """Return the text of a resource, cut at `max_result_chars`.

        Raises:
            EnvironmentFault: there is no such resource, it is not text, or the server did not answer as it must.
        """
        with self._asking(uri):
            result = await self._opened().read_resource(uri)
        texts = [text for part in result.contents if (text := getattr(part, "text", None)) is not None]
        if not texts:
            raise EnvironmentFault(
                f"{self.name}: {uri}: expected text, got {[type(part).__name__ for part in result.contents]}"
            )
        return shorten_result("\n".join(texts), self.max_result_chars)

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool, whether it is on offer or not, and return its text; `Error: ...` where it failed.

        Raises:
            EnvironmentFault: as `reply`.
        """
        from mcp import MCPError

        with self._asking(f"tool {name}"):
            try:
                result = await self._opened().call_tool(name, arguments)
            except MCPError as error:
                if error.code not in _READABLE_CODES:
                    raise
                return f"Error: {error.message}"[:_MAX_ERROR_CHARS]
        text = _result_text(result.content, result.structured_content)
        return shorten_result(f"Error: {text}" if result.is_error else text, self.max_result_chars)

    @contextmanager
    def _asking(self, what: str) -> Generator[None]:
        where = f"{self.name}: {what}"
        try:
            with environment_boundary(where):
                with anyio.move_on_after(self._call_s) as scope:
                    yield
                if scope.cancelled_caught:
                    raise EnvironmentFault(f"{where}: no answer within {self._call_s:g} s")
        except EnvironmentFault:
            self._is_broken = True
            raise

    def _opened(self) -> Client:
        if self._client is None:
            raise EnvironmentFault(f"{self.name}: the server is not open; use it in its `async with` block")
        return self._client

    async def _list_tools(self, client: Client) -> None:
        found: dict[str, McpTool] = {}
        cursor: str | None = None
        for _ in range(_MAX_PAGES):
            page = await client.list_tools(cursor=cursor, cache_mode="bypass")
            for listed in page.tools:
                if self._only is None or listed.name in self._only:
                    if listed.name in found:
                        raise EnvironmentFault(f"{self.name}: the server lists two tools called {listed.name}")
                    found[listed.name] = McpTool(self, listed)
            if len(found) > self._max_tools:
                break
            cursor = page.next_cursor
            if cursor is None:
                break
        if len(found) > self._max_tools or cursor is not None:
            raise EnvironmentFault(
                f"{self.name}: the server lists at least {len(found)} tools, more than max_tools={self._max_tools}; name "
                "those to offer in `only`"
            )
        if missing := (self._only or frozenset()) - found.keys():
            raise EnvironmentFault(f"{self.name}: the server has no tool {', '.join(sorted(missing))}, which `only` names")
        self.tools = found


class McpTool:
    """One tool of a server.

    Attributes:
        name: of the tool.
        schema: the entry for the `tools` argument of a model call.
    """

    def __init__(self, server: McpServer, listed: ListedTool) -> None:
        self.name = listed.name
        function = {"name": listed.name, "description": listed.description or "", "parameters": listed.input_schema}
        self.schema: dict[str, JsonValue] = {"type": "function", "function": function}
        self._server = server
        properties = listed.input_schema.get("properties")
        required = listed.input_schema.get("required")
        others = listed.input_schema.get("additionalProperties") or listed.input_schema.get("patternProperties")
        self._listed = frozenset(cast("dict[str, object]", properties) if isinstance(properties, dict) else ())
        self._takes_any = bool(others) or not isinstance(properties, dict)
        self._required = cast("list[str]", required) if isinstance(required, list) else []

    def takes(self, argument: str) -> bool:
        """Return whether the tool lists an argument of this name, or takes any."""
        return self._takes_any or argument in self._listed

    def schema_without(self, names: Collection[str]) -> dict[str, JsonValue]:
        """Return the schema without some of its arguments, which the model then neither sees nor gives."""
        function = cast("Mapping[str, JsonValue]", self.schema["function"])
        parameters = cast("Mapping[str, JsonValue]", function["parameters"])
        kept: dict[str, JsonValue] = dict(parameters)
        if isinstance(listed := parameters.get("properties"), Mapping):
            kept["properties"] = {name: value for name, value in listed.items() if name not in names}
        if "required" in kept:
            kept["required"] = [name for name in self._required if name not in names]
        return {**self.schema, "function": {**function, "parameters": kept}}

    async def reply(
        self, call: Mapping[str, object] | BaseModel, fixed: Mapping[str, JsonValue] | None = None
    ) -> ChatCompletionToolMessageParam:
        """Run a call of this tool, as `McpServer.reply` does."""
        _, arguments, identity = _read_call_fields(call)
        added = {name: value for name, value in (fixed or {}).items() if name in self._listed}
        read = read_call_arguments(
            arguments,
            required=[name for name in self._required if name not in added],
            known=None if self._takes_any else self._listed.difference(added),
            limit=self._server.max_argument_chars,
        )
        if isinstance(read, str):
            return _tool_message(identity, f"Error: wrong arguments for {self.name}: {read}"[:_MAX_ERROR_CHARS])
        sent: dict[str, Any] = {**read, **added}
        return _tool_message(identity, str(await ask("tool", self.name, read, lambda: self._server.call(self.name, sent))))


class McpEnvironment:
    r"""The tools of an MCP server as an environment: a question, calls of tools, and an answer that ends the episode.

    It is a context manager, which starts the server and ends it. A server that remembers calls keeps apart what it remembers
    by a `handle`, as those of 2026-07-28 do; or it has a `reset_tool`, or needs `max_episodes: 1` in the pool.

    Args:
        server: as for `McpServer`.
        grade: gets the last answer and the task and returns the reward; `module:function` in a run file; None: 1.0 if the
            answer's `\boxed{}`, its last number or all of it is the task's `answer`, else 0.0.
        instructions: the system message.
        resources: URIs of the server whose texts precede the question; a task may have others in its field `resources`.
        reset_tool: a tool that is called with `seed` and the task's field `options` before each episode, and is not offered.
        handle: the argument by which the tools know an episode, such as `basket_id`. Every call of a tool that has it gets
            the episode's own: what `reset_tool` answered, as the field of this name or the whole text, else a random one.
            The policy neither sees nor gives it.
        close_tool: a tool that is called with the handle after the episode, and is not offered.
        max_calls: calls in one message that are run; further ones get an error.
        server_options: further arguments of `McpServer`.

    Raises:
        ConfigError: as `McpServer`, or there is no such `grade`.
    """

    extra = "agentrl[mcp]"
    needs_packages = ("mcp",)

    def __init__(
        self,
        server: str | Sequence[str],
        *,
        grade: Grade | str | None = None,
        instructions: str = "",
        resources: Sequence[str] = (),
        reset_tool: str | None = None,
        handle: str | None = None,
        close_tool: str | None = None,
        max_calls: int = 16,
        **server_options: Any,  # noqa: ANN401 - those of McpServer
    ) -> None:
        self.server = McpServer(server, **server_options)
        self._grade = _named_grade(grade) if isinstance(grade, str) else grade or grade_answer
        self._instructions, self._resources = instructions, resources
        if close_tool is not None and handle is None:
            raise ConfigError("McpEnvironment: close_tool needs a handle, which says what the server should close")
        self._reset_tool, self._max_calls = reset_tool, max_calls
        self._handle, self._close_tool = handle, close_tool
        self._fixed: dict[str, JsonValue] = {}
        self._task = Task(id="", data={})

    async def __aenter__(self) -> Self:
        await self.server.__aenter__()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        await self.server.__aexit__(kind, error, trace)

    async def reset(self, task: Task, *, seed: int) -> ChatStart:
        """Ask the task's `question`, with the tools that the server has now.

        Raises:
            EnvironmentFault: the server did not answer as it must, or `reset_tool` failed.
        """
        self._task = task
        await self.server.refresh()
        await self.close()
        done = await self._reset_server({"seed": seed, **task.data.get("options", {})})
        if self._handle is not None:
            self._fixed = {self._handle: uuid.uuid4().hex if done is None else _handle_in(done, self._handle)}
        uris: Sequence[str] = task.data.get("resources", self._resources)
        texts = [await self.server.read_resource(uri) for uri in uris]
        messages: list[Message] = [{"role": "user", "content": "\n\n".join([*texts, str(task["question"])])}]
        if self._instructions:
            messages.insert(0, {"role": "system", "content": self._instructions})
        offered = [tool for tool in self.server.tools.values() if tool.name not in (self._reset_tool, self._close_tool)]
        return ChatStart(messages=messages, tools=[tool.schema_without(self._fixed) for tool in offered])

    async def step(self, message: Message) -> ChatStep:
        """Run the message's tool calls one after the other, or grade it as the answer if it has none.

        Raises:
            EnvironmentFault: as `McpServer.reply`.
        """
        calls: Any = message.get("tool_calls") or ()
        if not calls:
            reward = self._grade(str(message.get("content") or ""), self._task)
            return ChatStep(reward=await reward if inspect.isawaitable(reward) else reward, end=EpisodeEnd.TERMINATED)
        replies: list[Message] = []
        for number, call in enumerate(calls):
            name, _, identity = _read_call_fields(call)
            if number >= self._max_calls:
                replies.append(_tool_message(identity, f"Error: not run; a message may have {self._max_calls} calls"))
            elif name in (self._reset_tool, self._close_tool):
                replies.append(_tool_message(identity, f"Error: there is no tool {name!r}"))
            else:
                replies.append(await self.server.reply(call, self._fixed))
        return ChatStep(messages=replies)

    async def close(self) -> None:
        """Call `close_tool` for the last episode; the block that opened the environment ends the server.

        Raises:
            EnvironmentFault: as `reset`.
        """
        fixed, self._fixed = self._fixed, {}
        if self._close_tool is not None and fixed:
            await self._managed(self._close_tool, fixed)

    async def _reset_server(self, arguments: dict[str, Any]) -> str | None:
        if self._reset_tool is None:
            return None
        tool = self.server.tools.get(self._reset_tool)
        if tool is not None and not tool.takes("seed"):
            del arguments["seed"]
        return await self._managed(self._reset_tool, arguments)

    async def _managed(self, name: str, arguments: dict[str, Any]) -> str:
        done = await self.server.call(name, arguments)
        if done.startswith("Error: "):
            raise EnvironmentFault(f"{self.server.name}: {name}: {done}")
        return done


def grade_answer(answer: str, task: Task) -> float:
    r"""Return 1.0 if an answer's `\boxed{}`, its last number or all of it is the task's `answer`, else 0.0.

    Example:
        >>> grade_answer("They are 5.", Task(id="0", data={"answer": 5}))
        1.0
    """
    return float(any(exact_match(found, str(task["answer"])) for found in (boxed(answer), last_number(answer), answer)))


def shorten_result(text: str, limit: int) -> str:
    """Return `text`, cut to `limit` characters with a note of its length."""
    return text if len(text) <= limit else f"{text[:limit]}\n[cut; the result has {len(text)} characters]"


def _handle_in(text: str, name: str) -> JsonValue:
    """Return the handle in the answer of a tool that opened an episode."""
    try:
        found: object = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return cast("dict[str, JsonValue]", found).get(name, text) if isinstance(found, dict) else text


def _named_grade(spec: str) -> Grade:
    module, _, name = spec.partition(":")
    try:
        found = getattr(importlib.import_module(module), name, None)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"McpEnvironment: importing grade {spec!r} failed: {error}") from error
    if not callable(found):
        raise ConfigError(f"McpEnvironment: grade must be module:function, got {spec!r}")
    return cast("Grade", found)


def _read_call_fields(call: Mapping[str, object] | BaseModel) -> tuple[str, object, str]:
    """Return the name, the arguments and the id of a tool call."""
    fields = call.model_dump() if isinstance(call, BaseModel) else call
    function = fields.get("function")
    if not isinstance(function, Mapping):
        raise TypeError(f"a tool call must have a function with name and arguments, got {call!r:.200}")
    named = cast("Mapping[str, object]", function)
    return str(named.get("name", "")), named.get("arguments"), str(fields.get("id", ""))


def _tool_message(identity: str, content: str) -> ChatCompletionToolMessageParam:
    return {"role": "tool", "tool_call_id": identity, "content": content}


def _result_text(content: Sequence[Any], structured: object) -> str:
    """Return a result as text for a model; parts of other kinds are named."""
    parts: list[str] = []
    for part in content:
        text = getattr(part, "text", None) or getattr(getattr(part, "resource", None), "text", None)
        kind = getattr(part, "mime_type", None) or getattr(getattr(part, "resource", None), "mime_type", None) or part.type
        parts.append(text if isinstance(text, str) else "" if part.type == "text" else f"[{kind}, which cannot be shown]")
    if not parts and structured is not None:
        return json.dumps(structured, ensure_ascii=False)
    return "\n".join(parts)
