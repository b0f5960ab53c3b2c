"""A client of environments that OpenEnv serves: a WebSocket `/ws` for each instance, and `/schema` for its actions.

Each message is a JSON object with `type` and `data`: `reset` (seed and options) and `step` (the action) are answered with an
`observation` (`observation`, `reward`, `done`) or an `error` (`message`, `code`). Tried with openenv 0.10.

Invariant: a message is answered on the connection that carried it, and never sent twice. An action that the server finds
malformed costs the policy a turn; every other error is a fault of the environment.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

import aiohttp

from agentrl.env import ChatStart, ChatStep, EpisodeEnd
from agentrl.errors import ConfigError, EnvironmentFault
from agentrl.types import Message, Task

MAX_FRAME_BYTES: Final = 8 * 2**20
"""A longer message of the server is a fault."""
_ACTION = re.compile(r"<action>(.{1,100000}?)</action>", re.DOTALL)
_MAX_QUOTED_CHARS = 400
_OF_EVERY_MESSAGE = ("done", "reward", "metadata")
"""Fields of each action or observation that the policy neither writes nor reads."""


class OpenEnvEnvironment:
    """An OpenEnv environment; each instance is a session of its server. Needs the asyncio event loop.

    Args:
        url: of the server, such as `http://127.0.0.1:8000`.
        field: of the action, to which the whole answer of the policy is assigned; None: the answer ends with the action, as
            JSON in `<action>`.
        instructions: the beginning of the first message to the policy.
        observe: makes text of an observation; None: its text if that is all it has, else its JSON.
        invalid_reward: of a turn without an action; None: it has no reward of its own.
        max_invalid: turns without an action in a row that end the episode.
        rewards: whether the server pays: an episode that it ends without a reward in any step is a fault then, because JSON
            has no NaN, and a reward of NaN arrives as none.
        connect_s: seconds to reach the server.
        headers: sent with every request, such as a key.

    Raises:
        ConfigError: `url` is no HTTP address.
    """

    def __init__(
        self,
        url: str,
        *,
        field: str | None = None,
        instructions: str = "",
        observe: Callable[[Mapping[str, Any]], str] | None = None,
        invalid_reward: float | None = None,
        max_invalid: int = 3,
        rewards: bool = True,
        connect_s: float = 30.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"OpenEnvEnvironment: url must start with http:// or https://, got {url!r}")
        self._url = url.rstrip("/")
        self._field, self._instructions = field, instructions
        self._observe = observe or _plain_observation
        self._invalid_reward, self._max_invalid = invalid_reward, max_invalid
        self._connect_s = connect_s
        self._pays, self._has_paid = rewards, False
        self._headers = dict(headers or {})
        self._num_invalid = 0
        self._http: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._described = ""

    async def reset(self, task: Task, *, seed: int) -> ChatStart:
        """Begin an episode; the task's field `options` has further arguments of the server's reset.

        Raises:
            EnvironmentFault: the server is gone, has no free session, or did not answer as it must.

        Cancellation: the session must not be used again.
        """
        options: object = task.data.get("options") or {}
        if not isinstance(options, Mapping):
            raise ConfigError(f"OpenEnvEnvironment: the task's `options` must be a mapping, got {options!r:.80}")
        if self._socket is None:
            await self._connect()
        self._num_invalid, self._has_paid = 0, False
        reply = await self._ask("reset", {"seed": seed, **cast("Mapping[str, object]", options)})
        observed = self._observe(_observation(reply, self._url))
        text = "\n\n".join(part for part in (self._instructions, self._described, observed) if part)
        return ChatStart(messages=[{"role": "user", "content": text}])

    async def step(self, message: Message) -> ChatStep:
        """Play the action of an answer.

        Raises:
            EnvironmentFault: as `reset`.

        Cancellation: as `reset`.
        """
        try:
            reply = await self._ask("step", self._read_action(str(message.get("content") or "")))
        except _MalformedAction as problem:
            return self._refuse(str(problem))
        self._num_invalid = 0
        done = reply.get("done", False)
        if not isinstance(done, bool):
            raise EnvironmentFault(f"{self._url}: `done` must be true or false, got {done!r:.80}")
        reward = cast("float | None", reply.get("reward"))
        self._has_paid = self._has_paid or reward is not None
        if done and self._pays and not self._has_paid:
            raise EnvironmentFault(
                f"{self._url}: the episode ended without a reward in any step; a reward of NaN arrives so; where rewards "
                "are made elsewhere, set rewards=False"
            )
        return ChatStep(
            messages=[{"role": "user", "content": self._observe(_observation(reply, self._url))}],
            reward=reward,
            end=EpisodeEnd.TERMINATED if done else None,
        )

    async def close(self) -> None:
        """End the session at the server."""
        socket, self._socket = self._socket, None
        http, self._http = self._http, None
        try:
            if socket is not None and not socket.closed:
                await socket.send_str(json.dumps({"type": "close"}))
                await socket.close()
        except (aiohttp.ClientError, ConnectionError):
            pass  # the server is gone, and the session with it
        finally:
            if http is not None:
                await http.close()

    async def check_health(self) -> None:
        """Check that the session is still open.

        Raises:
            EnvironmentFault: it is not.
        """
        if self._socket is not None:
            await self._ask("state", None)

    async def _connect(self) -> None:
        timeout = aiohttp.ClientTimeout(total=self._connect_s)
        self._http = self._http or aiohttp.ClientSession(timeout=timeout, headers=self._headers)
        try:
            async with self._http.get(f"{self._url}/schema", allow_redirects=False) as response:
                self._described = "" if self._field is not None else _describe_action(await _read_schema(response))
            address = f"{self._url}/ws".replace("http", "ws", 1)
            self._socket = await self._http.ws_connect(address, max_msg_size=MAX_FRAME_BYTES, heartbeat=20.0)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EnvironmentFault(f"{self._url}: {type(error).__name__}: {error}") from error

    async def _ask(self, kind: str, data: Mapping[str, object] | None) -> dict[str, object]:
        socket = self._socket
        if socket is None:
            raise EnvironmentFault(f"{self._url}: {kind} without a session; reset the environment first")
        where = f"{self._url}: {kind}"
        try:
            await socket.send_str(json.dumps({"type": kind} if data is None else {"type": kind, "data": dict(data)}))
            message = await socket.receive()
        except (aiohttp.ClientError, ConnectionError) as error:
            raise EnvironmentFault(f"{where}: {type(error).__name__}: {error}") from error
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise EnvironmentFault(f"{where}: the connection ended ({message.type.name}: {message.extra or message.data})")
        try:
            found: object = json.loads(message.data)
        except (ValueError, RecursionError):
            found = None
        reply = cast("dict[str, object]", found) if isinstance(found, dict) else {}
        answered, kind_of_answer = reply.get("data"), reply.get("type")
        if not isinstance(answered, dict) or kind_of_answer not in ("observation", "state", "error"):
            raise EnvironmentFault(
                f"{where}: expected an object with type and data, got {message.data[:_MAX_QUOTED_CHARS]!r}"
            )
        content = cast("dict[str, object]", answered)
        if kind_of_answer != "error":
            return content
        if kind == "step" and content.get("code") == "VALIDATION_ERROR":
            raise _MalformedAction(_problems(content.get("errors")))
        raise EnvironmentFault(f"{where}: {content.get('code')}: {content.get('message')!s:.{_MAX_QUOTED_CHARS}}")

    def _read_action(self, answer: str) -> Mapping[str, object]:
        if self._field is not None:
            return {self._field: answer}
        actions = _ACTION.findall(answer)
        if not actions:
            raise _MalformedAction("it has no <action>")
        try:
            value: object = json.loads(actions[-1])
        except (ValueError, RecursionError) as error:
            raise _MalformedAction(f"it is not JSON: {error}") from None
        if not isinstance(value, dict):
            raise _MalformedAction("it must be a JSON object")
        return cast("dict[str, object]", value)

    def _refuse(self, problem: str) -> ChatStep:
        self._num_invalid += 1
        end = EpisodeEnd.TRUNCATED if self._num_invalid >= self._max_invalid else None
        text = f"That is no valid action: {problem[:_MAX_QUOTED_CHARS]}. {self._described}".strip()
        return ChatStep(messages=[{"role": "user", "content": text}], reward=self._invalid_reward, end=end)


class _MalformedAction(Exception):
    """The policy's answer has no action that the server takes; the text is for the policy."""


async def _read_schema(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > MAX_FRAME_BYTES:
            raise EnvironmentFault(f"{response.url}: the reply is longer than {MAX_FRAME_BYTES} bytes")
    return bytes(body) if response.status == 200 else b""


def _describe_action(body: bytes) -> str:
    """Return how the policy writes an action, from the reply of `/schema`."""
    try:
        schema: Any = json.loads(body)["action"]
        fields = {name: field for name, field in schema["properties"].items() if name not in _OF_EVERY_MESSAGE}
        required = [name for name in schema.get("required", ()) if name in fields]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return "End your answer with <action>{...}</action>, a JSON object."
    parts = {"properties": fields, "required": required, **({"$defs": schema["$defs"]} if "$defs" in schema else {})}
    return f"End your answer with <action>{{...}}</action>, a JSON object of this schema: {json.dumps(parts)}"


def _observation(reply: Mapping[str, object], url: str) -> Mapping[str, Any]:
    observed = reply.get("observation")
    if not isinstance(observed, dict):
        raise EnvironmentFault(f"{url}: `observation` must be an object, got {observed!r:.80}")
    return {name: value for name, value in cast("dict[str, Any]", observed).items() if name not in _OF_EVERY_MESSAGE}


def _plain_observation(observation: Mapping[str, Any]) -> str:
    [*values] = observation.values()
    return values[0] if len(values) == 1 and isinstance(values[0], str) else json.dumps(observation, ensure_ascii=False)


def _problems(errors: object) -> str:
    """Return what pydantic says of an action, as the server reports it."""
    listed: list[Any] = cast("list[Any]", errors) if isinstance(errors, list) else []
    problems = [f"{'.'.join(str(step) for step in each.get('loc', ()))}: {each.get('msg')}" for each in listed]
    return "; ".join(problems) or "the server refused it"
