"""A judge model that a real HTTP endpoint serves; a test writes what it replies."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
from aiohttp import web

from agentrl_rewards.judge import JudgeModel, JudgeSettings
from tests.support.endpoints import serving

Reply = Callable[[str], str | int]
"""From the judge's user message to its text, or to an HTTP status."""


@dataclass
class JudgeEndpoint:
    """What the endpoint was asked."""

    reply: Reply
    bodies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    together: int = 1
    """Requests that have come before the first is answered."""
    running: int = 0
    most_running: int = 0
    _all_here: anyio.Event = field(default_factory=anyio.Event)

    @property
    def questions(self) -> list[str]:
        return [body["messages"][1]["content"] for body in self.bodies]

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        if self.running >= self.together:
            self._all_here.set()
        await self._all_here.wait()
        for _ in range(20):  # lets more arrive, if they were sent
            await anyio.lowlevel.checkpoint()
        self.running -= 1
        text = self.reply(body["messages"][1]["content"])
        if isinstance(text, int):
            return web.json_response({"error": {"message": "broken"}}, status=text, headers={"retry-after-ms": "1"})
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        return web.json_response(
            {"id": "c", "object": "chat.completion", "created": 0, "model": body["model"], "choices": [choice]}
        )


@asynccontextmanager
async def judging(reply: Reply, **settings: float | Path) -> AsyncGenerator[tuple[JudgeModel, JudgeEndpoint]]:
    """Serve a judge for the length of the block, and yield its model, with these settings, and the endpoint."""
    endpoint = JudgeEndpoint(reply)
    async with serving(endpoint.answer) as connection:
        yield JudgeModel(connection, "judge-7b", JudgeSettings.model_validate(settings)), endpoint


def always(text: str | int) -> Reply:
    """Return a reply that is the same for every question."""

    def reply(question: str) -> str | int:
        return text

    return reply
