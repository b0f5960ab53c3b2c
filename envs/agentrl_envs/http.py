"""An environment in any language behind three HTTP routes, each a POST of a JSON object.

- `/reset` gets `task` (its fields), `task_id` and `seed`; it returns `episode` (a name), `messages` and, if there are any,
  `tools`;
- `/step` gets `episode`, `turn` (from 0) and the assistant's `message`; it returns `messages`, `reward` (a number or null),
  `terminated` and `truncated` (true or false) and, if there are any, `metrics`;
- `/close` gets `episode`; what it returns is not read.

Instead of `messages` a reply may have `observation`, a text that becomes a user message. Anything but HTTP 200 with such an
object is a fault of the environment. Only `/reset` is repeated: a step may have happened although its reply was lost.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

import aiohttp

from agentrl.env import ChatStart, ChatStep, EpisodeEnd
from agentrl.errors import ConfigError, EnvironmentFault
from agentrl.types import Message, Task

MAX_STEP_BYTES = 8 * 2**20
"""A longer reply is a fault."""
_MAX_QUOTED_CHARS = 200
_RESET_ATTEMPTS = 3


class HttpEnvironment:
    """A client of such an environment; needs the asyncio event loop.

    Args:
        url: what the routes are appended to, such as `http://127.0.0.1:8100`.
        timeout_s: seconds of one request.
        headers: sent with every request, such as a key.

    Raises:
        ConfigError: `url` is no HTTP address.
    """

    def __init__(self, url: str, *, timeout_s: float = 60.0, headers: Mapping[str, str] | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"HttpEnvironment: url must start with http:// or https://, got {url!r}")
        self._url = url.rstrip("/")
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._headers = dict(headers or {})
        self._session: aiohttp.ClientSession | None = None
        self._episode: object = None
        self._turn = 0

    async def reset(self, task: Task, *, seed: int) -> ChatStart:
        """Begin an episode at the server, and end the one before.

        Raises:
            EnvironmentFault: the server is gone, refused, or did not answer as it must.

        Cancellation: the server may keep the episode.
        """
        await self._end_episode()
        body = {"task": dict(task.data), "task_id": task.id, "seed": seed}
        for attempt in range(1, _RESET_ATTEMPTS + 1):
            try:
                reply = await self._post("reset", body)
                break
            except EnvironmentFault:
                if attempt == _RESET_ATTEMPTS:
                    raise
        else:
            raise AssertionError("unreachable")
        self._episode, self._turn = reply.get("episode"), 0
        if self._episode is None:
            raise EnvironmentFault(f"{self._url}/reset: expected an `episode` in the reply, got {sorted(reply)}")
        tools: object = reply.get("tools") or ()
        if not isinstance(tools, Sequence):
            raise EnvironmentFault(f"{self._url}/reset: `tools` must be a list, got {tools!r:.{_MAX_QUOTED_CHARS}}")
        return ChatStart(messages=self._messages(reply, "reset"), tools=cast("Sequence[Mapping[str, Any]]", tools))

    async def step(self, message: Message) -> ChatStep:
        """Send the assistant's message.

        Raises:
            EnvironmentFault: as `reset`.

        Cancellation: the server may have taken the step.
        """
        body = {"episode": self._episode, "turn": self._turn, "message": dict(message)}
        self._turn += 1
        reply = await self._post("step", body)
        terminated, truncated = reply.get("terminated", False), reply.get("truncated", False)
        metrics: object = reply.get("metrics") or {}
        if not isinstance(terminated, bool) or not isinstance(truncated, bool) or not isinstance(metrics, Mapping):
            raise EnvironmentFault(
                f"{self._url}/step: `terminated` and `truncated` must be true or false and `metrics` an object, got "
                f"{json.dumps(reply)[:_MAX_QUOTED_CHARS]}"
            )
        end = EpisodeEnd.TERMINATED if terminated else EpisodeEnd.TRUNCATED if truncated else None
        return ChatStep(
            messages=self._messages(reply, "step"),
            reward=cast("float | None", reply.get("reward")),
            end=end,
            metrics=cast("Mapping[str, float]", metrics),
        )

    async def close(self) -> None:
        """End the episode at the server, and the connection.

        Raises:
            EnvironmentFault: the server did not take it; the connection is closed all the same.
        """
        try:
            await self._end_episode()
        finally:
            session, self._session = self._session, None
            if session is not None:
                await session.close()

    async def _end_episode(self) -> None:
        episode, self._episode = self._episode, None
        if episode is not None:
            await self._post("close", {"episode": episode})

    def _messages(self, reply: Mapping[str, object], route: str) -> Sequence[Message]:
        observation, messages = reply.get("observation"), reply.get("messages")
        if messages is None and isinstance(observation, str):
            return [{"role": "user", "content": observation}]
        if not isinstance(messages or [], list):
            raise EnvironmentFault(f"{self._url}/{route}: `messages` must be a list, got {messages!r:.{_MAX_QUOTED_CHARS}}")
        return cast("list[Message]", messages or [])

    async def _post(self, route: str, body: Mapping[str, object]) -> dict[str, object]:
        where = f"{self._url}/{route}"
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=self._timeout, headers=self._headers)
        status, content = await post_json(self._session, where, body)
        if status != 200:
            raise EnvironmentFault(f"{where}: HTTP {status}: {content[:_MAX_QUOTED_CHARS].decode(errors='replace')}")
        try:
            found: object = json.loads(content)
        except (ValueError, RecursionError):
            found = None
        if route != "close" and not isinstance(found, dict):
            raise EnvironmentFault(f"{where}: expected a JSON object, got {content[:_MAX_QUOTED_CHARS]!r}")
        return cast("dict[str, object]", found) if isinstance(found, dict) else {}


async def post_json(session: aiohttp.ClientSession, where: str, body: Mapping[str, object]) -> tuple[int, bytes]:
    """Return the status and the content of the reply to a POST; EnvironmentFault: there is none, or it is too long."""
    try:
        async with session.post(where, json=body, allow_redirects=False) as response:
            content = bytearray()
            async for chunk in response.content.iter_any():
                content += chunk
                if len(content) > MAX_STEP_BYTES:
                    raise EnvironmentFault(f"{where}: the reply is longer than {MAX_STEP_BYTES} bytes; shorten observations")
            return response.status, bytes(content)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise EnvironmentFault(f"{where}: {type(error).__name__}: {error}") from error
