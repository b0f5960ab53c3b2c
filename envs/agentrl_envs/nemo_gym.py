"""A client of NeMo Gym's resource servers: a row of their data sets is a task, the server runs its tools and grades it.

`/seed_session` gets the row and sets the cookie of a session; each tool is a route of its own name; `/verify` gets the row
with the conversation as the body of a Responses API answer, and returns `reward`. Written to nemo-gym 0.4 and 0.5.

Invariant: the policy reaches the routes of the tools that its task lists, and no other. A reward that the server marks as no
measurement (`mask_sample`) is a fault, not a reward.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias, cast

import aiohttp

from agentrl.env import ChatStart, ChatStep, EpisodeEnd
from agentrl.errors import ConfigError, EnvironmentFault
from agentrl.types import Message, Task
from agentrl_envs.http import post_json

Item: TypeAlias = dict[str, Any]
"""An item of the input or the output of the Responses API."""
PARAMS: Final = "responses_create_params"
_RESERVED: Final = frozenset({"verify", "seed_session", "close_session", "sandbox_access", "aggregate_metrics", "mcp"})
_SERVER_ERROR: Final = 500
_MAX_QUOTED_CHARS = 400


class NemoGymEnvironment:
    """A resource server of NeMo Gym; each instance has a session of its own. Needs the asyncio event loop.

    Args:
        url: of the server, such as `http://127.0.0.1:8000`.
        timeout_s: seconds of one request, grading included.
        max_turns: answers of the policy after which the episode is graded as it stands; None: it ends with an answer that
            calls no tool.
        max_result_chars: a longer result of a tool is cut.
        headers: sent with every request, such as a key.

    Raises:
        ConfigError: `url` is no HTTP address.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 300.0,
        max_turns: int | None = None,
        max_result_chars: int = 20_000,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"NemoGymEnvironment: url must start with http:// or https://, got {url!r:.200}")
        self._url = url.rstrip("/")
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._headers = dict(headers or {})
        self._max_turns, self._max_result_chars = max_turns, max_result_chars
        self._session: aiohttp.ClientSession | None = None
        self._row: Mapping[str, Any] = {}
        self._output: list[Item] = []
        self._tools: frozenset[str] = frozenset()
        self._num_turns = 0

    async def reset(self, task: Task, *, seed: int) -> ChatStart:
        """Begin a session for a row; the server's own data fixes what is random in it, so `seed` is not sent.

        Raises:
            ConfigError: the task has no `responses_create_params` with `input`.
            EnvironmentFault: the server is gone, or refused the row.
        """
        del seed
        row = dict(task.data)
        params = row.get(PARAMS)
        if not isinstance(params, Mapping) or not params.get("input"):
            raise ConfigError(
                f"NemoGymEnvironment: task {task.id!r:.80} has no {PARAMS} with an `input`, as rows of NeMo Gym do"
            )
        tools = [tool for tool in params.get("tools") or () if tool.get("type") == "function"]
        self._row, self._output, self._num_turns = row, [], 0
        self._tools = frozenset(str(tool["name"]) for tool in tools) - _RESERVED
        await self.close()  # the cookies of the session before
        self._session = aiohttp.ClientSession(
            timeout=self._timeout, headers=self._headers, cookie_jar=aiohttp.CookieJar(unsafe=True)
        )
        await self._ask("seed_session", row)
        messages = messages_of_items(params["input"])
        if instructions := params.get("instructions"):
            messages.insert(0, {"role": "system", "content": instructions})
        return ChatStart(messages=messages, tools=[_wire_function(tool) for tool in tools if tool["name"] in self._tools])

    async def step(self, message: Message) -> ChatStep:
        """Run the message's tool calls one after the other, or have the episode graded if it has none.

        Raises:
            EnvironmentFault: the server failed, or says that its reward is no measurement.
        """
        self._num_turns += 1
        items = items_of_answer(message)
        self._output += items
        calls = [item for item in items if item["type"] == "function_call"]
        if not calls:
            return await self._verify(EpisodeEnd.TERMINATED)
        replies: list[Message] = []
        for call in calls:
            text = await self._call(call["name"], call["arguments"])
            head = {"type": "function_call_output", "id": f"fco_{uuid.uuid4().hex}", "status": "completed"}
            self._output.append({**head, "call_id": call["call_id"], "output": text})
            replies.append({"role": "tool", "tool_call_id": call["call_id"], "content": text})
        if self._num_turns == self._max_turns:
            return await self._verify(EpisodeEnd.TRUNCATED, replies)
        return ChatStep(messages=replies)

    async def close(self) -> None:
        """End the connection."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _call(self, name: str, arguments: str) -> str:
        """Return the result of a tool: what its route answers, or what is wrong with the call."""
        if name not in self._tools:
            return json.dumps({"error": f"There is no tool {name[:80]!r}; there is {', '.join(sorted(self._tools))}"})
        try:
            given: object = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            return json.dumps({"error": f"Invalid tool call arguments: {error}"})
        if not isinstance(given, dict):
            return json.dumps({"error": "Invalid tool call arguments: they must be a JSON object"})
        status, content = await self._post(name, cast("dict[str, object]", given))
        if status >= _SERVER_ERROR:
            raise EnvironmentFault(f"{self._url}/{name}: HTTP {status}: {_quoted(content)}")
        text = content.decode(errors="replace")
        limit = self._max_result_chars
        return text if len(text) <= limit else f"{text[:limit]}\n[cut; the result has {len(text)} characters]"

    async def _verify(self, end: EpisodeEnd, replies: Sequence[Message] = ()) -> ChatStep:
        reply = await self._ask("verify", {**self._row, "response": self._response()})
        if reply.get("mask_sample"):
            why = reply.get("failure_reason") or reply.get("failure_kind") or "no reason given"
            raise EnvironmentFault(f"{self._url}/verify: the reward is no measurement: {why!s:.{_MAX_QUOTED_CHARS}}")
        parts = reply.get("reward_components")
        numbers = {**reply, **(cast("dict[str, object]", parts) if isinstance(parts, dict) else {})}
        metrics = {
            name: float(value)
            for name, value in numbers.items()
            if isinstance(value, (int, float)) and name not in self._row and name not in ("reward", "mask_sample")
        }
        reward = reply.get("reward")
        if reward is None:
            raise EnvironmentFault(f"{self._url}/verify: expected a `reward` in the reply, got {sorted(reply)}")
        return ChatStep(messages=replies, reward=cast("float", reward), end=end, metrics=metrics)

    def _response(self) -> Item:
        """Return the conversation as the Responses API answers: all outputs of the episode in one."""
        params: Mapping[str, Any] = self._row[PARAMS]
        return {
            "id": f"resp_{uuid.uuid4().hex}",
            "created_at": 0.0,
            "model": "policy",
            "object": "response",
            "output": self._output,
            "parallel_tool_calls": params.get("parallel_tool_calls", True),
            "tool_choice": params.get("tool_choice", "auto"),
            "tools": params.get("tools") or [],
        }

    async def _ask(self, route: str, body: Mapping[str, object]) -> dict[str, object]:
        status, content = await self._post(route, body)
        try:
            found: object = json.loads(content)
        except (ValueError, RecursionError):
            found = None
        if status != 200 or not isinstance(found, dict):
            raise EnvironmentFault(f"{self._url}/{route}: expected a JSON object, got HTTP {status}: {_quoted(content)}")
        return cast("dict[str, object]", found)

    async def _post(self, route: str, body: Mapping[str, object]) -> tuple[int, bytes]:
        if self._session is None:
            raise EnvironmentFault(f"{self._url}: {route} without a session; reset the environment first")
        return await post_json(self._session, f"{self._url}/{route}", body)


def messages_of_items(given: str | Sequence[Item]) -> list[Message]:
    """Return the input of a Responses request as chat messages; ConfigError: an item is of a kind that chat lacks."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    found: list[dict[str, Any]] = []
    for item in given:
        kind = item.get("type", "message")
        if kind == "message":
            found.append({"role": item["role"], "content": _input_text(item["content"])})
        elif kind == "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            if not found or found[-1]["role"] != "assistant":
                found.append({"role": "assistant", "content": None})
            found[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            found.append({"role": "tool", "tool_call_id": item["call_id"], "content": _input_text(item["output"])})
        elif kind != "reasoning":
            raise ConfigError(f"NemoGymEnvironment: an input of type {kind!r:.40} cannot be a chat message")
    return list(found)


def items_of_answer(message: Message) -> list[Item]:
    """Return an assistant message as the output of the Responses API: reasoning, text, calls."""
    items: list[Item] = []
    if reasoning := message.get("reasoning_content"):
        summary = [{"type": "summary_text", "text": reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{uuid.uuid4().hex}", "summary": summary})
    calls = message.get("tool_calls") or ()
    text = message.get("content") or ""
    if text or not calls:
        part = {"type": "output_text", "text": text, "annotations": []}
        head = {"type": "message", "id": f"msg_{uuid.uuid4().hex}", "role": "assistant", "status": "completed"}
        items.append({**head, "content": [part]})
    for call in calls:
        function = call["function"]
        named = {"name": function["name"], "arguments": function["arguments"], "call_id": call["id"]}
        items.append({"type": "function_call", "id": f"fc_{uuid.uuid4().hex}", "status": "completed", **named})
    return items


def _input_text(content: object) -> str:
    if isinstance(content, str):
        return content
    parts = cast("Sequence[Mapping[str, object]]", content)
    if any("text" not in part for part in parts):
        raise ConfigError("NemoGymEnvironment: an input has parts that are no text; agentrl plays text alone")
    return "\n".join(str(part["text"]) for part in parts)


def _wire_function(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {
        "name": tool["name"],
        "description": tool.get("description") or "",
        "parameters": tool.get("parameters") or {},
    }
    return {"type": "function", "function": function}


def _quoted(content: bytes) -> str:
    return content[:_MAX_QUOTED_CHARS].decode(errors="replace")
