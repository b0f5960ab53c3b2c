"""`agentrl chat`: a conversation with a checkpoint, or with a model at an endpoint, in the terminal.

Invariant: what a model or a tool writes is shown as `visible` returns it. A question without an answer leaves the
conversation as it was. Tools run with the rights of the user who started the command.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast
from uuid import uuid4

import anyio.to_thread
from openai import AsyncOpenAI, OpenAIError
from openai.lib.streaming.chat import ChatCompletionStreamState
from rich.console import Console

from agentrl.client import Client, EndpointBackend, EpisodeSettings, SamplingConfig
from agentrl.client.tools import Tool, reply_to, tool
from agentrl.commands.python.serving import serve
from agentrl.commands.running import parse_named_values, run_job
from agentrl.errors import AgentRLError, ConfigError
from agentrl.inference.backend import TEMPERATURE_RULE, is_temperature
from agentrl.inference.config import has_credentials
from agentrl.support.files import write_json
from agentrl.support.foreign import one_line, visible
from agentrl.support.user_code import import_user_object
from agentrl.types import ToolFormatName
from agentrl.weights.merging import whole_model

MAX_ROUNDS = 20
"""Answers with tool calls in a row, after which the user is asked again."""
_HELP = "/reset starts again, /save FILE writes the conversation as JSON, Ctrl-D leaves"
_NO_KEY = "none"
"""The key that a client sends where there is none: the openai client demands one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """The partner of a chat: a checkpoint, or else a model at an endpoint."""

    checkpoint: Path | None = None
    endpoint: str | None = None
    model: str | None = None
    api_key_env: str | None = None
    system: str | None = None
    tools: Sequence[str] = ()
    """`module:name` of each tool."""
    temperature: float = 0.7
    max_tokens: int = 1024
    device: str = "auto"
    dtype: Literal["float32", "bfloat16"] = "float32"
    template_options: Mapping[str, bool | int | str] | None = None
    tool_format: ToolFormatName = "auto"


def chat_command(
    checkpoint: Path | None = None,
    /,
    *,
    endpoint: str | None = None,
    model: str | None = None,
    api_key_env: str | None = None,
    tools: tuple[str, ...] = (),
    system: str | None = None,
    temperature: float = 0.7,
    max_tokens: int = 1024,
    device: str = "auto",
    dtype: Literal["float32", "bfloat16"] = "float32",
    template_option: tuple[str, ...] = (),
    tool_format: ToolFormatName = "auto",
) -> None:
    """Talk with a checkpoint in the terminal; /reset starts again, /save FILE writes the conversation, Ctrl-D leaves.

    Args:
        checkpoint: Local HF checkpoint; or else --endpoint with --model.
        endpoint: Base URL of an OpenAI-compatible endpoint, such as http://127.0.0.1:30000/v1.
        model: Name of the model at the endpoint.
        api_key_env: Environment variable with the endpoint's key; the default is OPENAI_API_KEY, if that is set.
        tools: A function that the model may call, as module:name; may be repeated. It runs here when it is called.
        system: System message.
        temperature: Sampling temperature; 0 is greedy.
        max_tokens: Longest answer, tokens.
        device: auto, cpu, cuda or cuda:N.
        dtype: Type of a checkpoint's weights, and in which it is computed; bfloat16 takes half the memory.
        template_option: Variable of the chat template as name=value, such as enable_thinking=false; may be repeated.
        tool_format: Form of tool calls; auto, or hermes for a chat template without tools.
    """
    options = ChatOptions(
        checkpoint=checkpoint,
        endpoint=endpoint,
        model=model,
        api_key_env=api_key_env,
        tools=tools,
        system=system,
        temperature=temperature,
        max_tokens=max_tokens,
        device=device,
        dtype=dtype,
        template_options=parse_named_values(template_option),
        tool_format=tool_format,
    )
    run_job(partial(chat, options), lambda: "A chat leaves nothing behind but what /save wrote.")


async def chat(options: ChatOptions, *, read: Callable[[], str] | None = None, console: Console | None = None) -> None:
    """Talk until the input ends.

    Raises:
        ConfigError: the checkpoint, the endpoint or a tool cannot be used.
        ServerError: no server could be started.

    Cancellation: ends the answer and the server.
    """
    if not is_temperature(options.temperature):
        raise ConfigError(f"--temperature: expected {TEMPERATURE_RULE}, got {options.temperature:g}")
    if options.max_tokens < 1:
        raise ConfigError(f"--max-tokens: expected at least 1, got {options.max_tokens}")
    tools = [_load_tool(spec) for spec in options.tools]
    shown = console or Console(soft_wrap=True, markup=False, highlight=False, emoji=False)
    async with _clients(options) as new_client:
        conversation = Conversation(new_client, tools, system=options.system, temperature=options.temperature, console=shown)
        shown.print(_HELP, style="dim")
        while line := await anyio.to_thread.run_sync(read or _read_line, abandon_on_cancel=True):
            if text := line.strip():
                await conversation.take(text)


class Conversation:
    """A conversation in a terminal."""

    def __init__(
        self,
        new_client: Callable[[], Client],
        tools: Sequence[Tool[..., object]],
        *,
        system: str | None,
        temperature: float,
        console: Console,
    ) -> None:
        self._new_client = new_client
        self._tools = tools
        self._temperature = temperature
        self._first: list[Any] = [] if system is None else [{"role": "system", "content": system}]
        self._console = console
        self._client = new_client()
        self.messages: list[Any] = [*self._first]

    async def take(self, line: str) -> None:
        """Do what a line says: a command, or else a question."""
        command, _, argument = line.partition(" ")
        if command == "/reset":
            self._client, self.messages = self._new_client(), [*self._first]
            self._note("a new conversation")
        elif command == "/save":
            self._save(argument.strip())
        elif command.startswith("/"):
            self._note(_HELP if command == "/help" else f"there is no {one_line(command)}; {_HELP}")
        else:
            await self._ask(line)

    async def _ask(self, text: str) -> None:
        """Show the answer to a question, with the tool calls on the way."""
        before = len(self.messages)
        self.messages.append({"role": "user", "content": text})
        try:
            for _ in range(MAX_ROUNDS):
                calls = await self._answer()
                if not calls:
                    return
                for call in calls:
                    reply = await reply_to(call, self._tools)
                    self._note(f"-> {visible(str(reply['content']))}")
                    self.messages.append(reply)
            self._note(f"{MAX_ROUNDS} answers in a row called tools; ask again to continue")
        except (AgentRLError, OpenAIError) as error:
            del self.messages[before:]
            self._note(f"no answer: {visible(str(error))}\nThe question is forgotten; {_HELP}", style="red")

    async def _answer(self) -> list[dict[str, Any]]:
        """Show one answer while it comes, keep it, and return its tool calls."""
        state, place = ChatCompletionStreamState(), ""
        given: dict[str, Any] = {"tools": [each.schema for each in self._tools]} if self._tools else {}
        given["temperature"] = self._temperature
        stream = await self._client.chat.completions.create(messages=self.messages, stream=True, **given)
        async with stream:
            async for chunk in stream:
                state.handle_chunk(chunk)
                for choice in chunk.choices:
                    reasoning = getattr(choice.delta, "reasoning_content", None)
                    for style, text in (("dim", reasoning), ("default", choice.delta.content)):
                        if text:
                            self._console.print("\n" if place not in ("", style) else "", end="")
                            self._console.print(visible(text), style=style, end="", emoji=False)
                            place = style
        self._console.print()
        message = state.current_completion_snapshot.choices[0].message
        calls: list[dict[str, Any]] = []
        for call in message.tool_calls or ():
            name, arguments = call.function.name, call.function.arguments
            calls.append({"id": call.id, "type": "function", "function": {"name": name, "arguments": arguments}})
            self._note(f"{one_line(name)}({one_line(arguments)})")
        answer: dict[str, Any] = {"role": "assistant", "content": message.content or ""}
        self.messages.append({**answer, "tool_calls": calls} if calls else answer)
        return calls

    def _save(self, name: str) -> None:
        if not name:
            self._note("/save needs the name of a file")
            return
        values = {"messages": self.messages, "tools": [each.schema for each in self._tools]}
        try:
            write_json(Path(name), values)
        except (OSError, ValueError) as error:  # `.` has no name to write to
            reason = getattr(error, "strerror", None) or error
            self._note(f"cannot write {one_line(name)}: {one_line(str(reason))}; name another file", style="red")
        else:
            self._note(f"{len(self.messages)} messages are in {one_line(name)}")

    def _note(self, text: str, style: str = "dim") -> None:
        self._console.print(text, style=style, emoji=False)


@asynccontextmanager
async def _clients(options: ChatOptions) -> AsyncGenerator[Callable[[], Client]]:
    """Yield what makes a client of a new conversation, while the server runs or the connection is open."""
    if options.endpoint is None:
        if options.checkpoint is None:
            raise ConfigError("chat: expected a checkpoint, or --endpoint with --model")
        sampling = {
            "max_tokens": options.max_tokens,
            "template_options": dict(options.template_options or {}),
            "tool_format": options.tool_format,
        }
        inference = {"device": options.device, "dtype": options.dtype}
        served = serve(whole_model(options.checkpoint), inference=inference, sampling=sampling)
        async with served as policy:
            yield policy.client
        return
    if options.checkpoint is not None or options.model is None:
        raise ConfigError("--endpoint needs --model, the name of the model there, and excludes a checkpoint")
    if has_credentials(options.endpoint):
        raise ConfigError("--endpoint holds a user or a password, which messages would show; name the key by --api-key-env")
    key = os.environ.get(options.api_key_env or "OPENAI_API_KEY")
    if options.api_key_env is not None and not key:
        raise ConfigError(f"--api-key-env {options.api_key_env}: this environment variable is not set; export it")
    async with AsyncOpenAI(base_url=options.endpoint, api_key=key or _NO_KEY) as connection:
        config = SamplingConfig(max_tokens=options.max_tokens)
        yield partial(_endpoint_client, connection, options.model, config)


def _endpoint_client(connection: AsyncOpenAI, model: str, sampling: SamplingConfig) -> Client:
    settings = EpisodeSettings(episode_id=uuid4().hex, task_id="chat")
    return Client(EndpointBackend(connection, model, settings, sampling=sampling))


def _load_tool(spec: str) -> Tool[..., object]:
    """Return the tool that `module:name` names; a plain function becomes one."""
    tools = import_user_object(spec, "--tools")
    if isinstance(tools, Tool):
        return cast("Tool[..., object]", tools)
    try:
        return tool(cast("Callable[..., object]", tools))
    except (TypeError, AttributeError) as error:
        raise ConfigError(
            f"--tools {spec}: expected a function with typed parameters, got {tools!r:.80}: {error}"
        ) from error


def _read_line() -> str:
    """Return the next line with its end; an empty text at the end of the input."""
    if not sys.stdin.isatty():
        return sys.stdin.readline()
    try:
        return input("> ") + "\n"
    except EOFError:
        return ""
