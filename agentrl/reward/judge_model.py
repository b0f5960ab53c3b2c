"""A model behind any OpenAI-compatible endpoint that judges: asked with retries, limits and a cache.

Invariant: `ask` returns a reply that its reader understood, or raises `EnvironmentFault`, never a low score.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar, cast
from uuid import uuid4

import anyio
import openai
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam
from pydantic import Field

from agentrl.config.base import Config
from agentrl.env import environment_boundary
from agentrl.episode.tape import ask
from agentrl.errors import EnvironmentFault
from agentrl.types import JsonValue

Judged = TypeVar("Judged")

_MAX_REMEMBERED = 100_000
_AGAIN = "That reply cannot be read. Reply again, and end with a line that is only the JSON object asked for."
_MAX_QUOTED_CHARS = 300


class JudgeSettings(Config):
    """Sampling, limits and retries of a judge."""

    temperature: float | None = Field(default=0.0, ge=0)
    """Sampling temperature; None leaves it to the endpoint."""
    max_tokens: int = Field(default=1024, ge=1)
    """Tokens of a reply, reasoning included."""
    timeout_s: float = Field(default=120.0, gt=0)
    """Seconds of one request; waiting for one of `max_concurrency` places does not count."""
    retries: int = Field(default=4, ge=0)
    """Repetitions of a request after no connection, a timeout, or HTTP 408, 409, 429 and 5xx, with growing pauses."""
    rereads: int = Field(default=1, ge=0)
    """How often the judge is asked again after a reply that cannot be read."""
    max_concurrency: int = Field(default=16, ge=1)
    """Requests at once."""
    cache_dir: Path | None = None
    """Directory of replies that outlives the run; None keeps them in memory only."""


@dataclass(frozen=True, slots=True)
class JudgeReply(Generic[Judged]):
    """A reply of the judge."""

    value: Judged
    text: str
    cached: bool
    """Whether the judge was not asked, because the same question was answered before."""


class JudgeModel:
    """A judge model at an endpoint, whose connection the caller closes; one instance serves a whole run."""

    def __init__(self, endpoint: AsyncOpenAI, model: str, settings: JudgeSettings | None = None) -> None:
        self.settings = settings or JudgeSettings()
        self.num_requests = 0
        self.num_cached = 0
        self._endpoint = endpoint.with_options(max_retries=self.settings.retries, timeout=self.settings.timeout_s)
        self._model = model
        self._places = anyio.Semaphore(self.settings.max_concurrency)
        self._replies: OrderedDict[str, str] = OrderedDict()
        self._asking: dict[str, anyio.Event] = {}

    async def ask(self, instructions: str, question: str, read: Callable[[str], Judged | None]) -> JudgeReply[Judged]:
        """Return the judge's reply to a system message and a question; `read` returns its meaning, or None.

        Cancellation: another task that waits for the same answer asks itself.
        """
        with environment_boundary(f"judge {self._model}"):
            key = self._key(instructions, question)
            while (running := self._asking.get(key)) is not None:
                await running.wait()
            self._asking[key] = anyio.Event()
            try:
                return await self._ask_once(key, instructions, question, read)
            finally:
                self._asking.pop(key).set()

    async def _ask_once(
        self, key: str, instructions: str, question: str, read: Callable[[str], Judged | None]
    ) -> JudgeReply[Judged]:
        known = await self._recall(key)
        if known is not None and (value := read(known)) is not None:
            self.num_cached += 1
            return JudgeReply(value=value, text=known, cached=True)
        messages: list[ChatCompletionMessageParam] = [
            {"role": "system", "content": instructions},
            {"role": "user", "content": question},
        ]
        text = ""
        for _ in range(self.settings.rereads + 1):
            text = str(await ask("judge", self._model, messages, partial(self._complete, messages)))
            if (value := read(text)) is not None:
                await self._remember(key, text)
                return JudgeReply(value=value, text=text, cached=False)
            messages.append({"role": "assistant", "content": text})
            messages.append({"role": "user", "content": _AGAIN})
        raise EnvironmentFault(
            f"judge {self._model}: expected a reply that ends with the JSON object asked for, got "
            f"{text[-_MAX_QUOTED_CHARS:]!r}, after {self.settings.rereads + 1} attempts; raise judge max_tokens or rereads, "
            "or use a model that follows the format"
        )

    async def _complete(self, messages: list[ChatCompletionMessageParam]) -> str:
        settings = self.settings
        try:
            async with self._places:
                completion = await self._endpoint.chat.completions.create(
                    model=self._model,
                    messages=messages,
                    max_tokens=settings.max_tokens,
                    temperature=openai.omit if settings.temperature is None else settings.temperature,
                )
            self.num_requests += 1
            return completion.choices[0].message.content or ""
        except openai.APIError as error:
            raise EnvironmentFault(
                f"judge {self._model} at {self._endpoint.base_url}: {type(error).__name__}: {error}, after "
                f"{settings.retries} retries"
            ) from error

    def _key(self, instructions: str, question: str) -> str:
        settings: JsonValue = [self._model, self.settings.temperature, self.settings.max_tokens, instructions, question]
        return hashlib.sha256(json.dumps(settings).encode()).hexdigest()

    async def _recall(self, key: str) -> str | None:
        if key not in self._replies and self.settings.cache_dir is not None:
            try:
                stored: object = json.loads(await anyio.Path(self._file(key)).read_text())
            except (FileNotFoundError, ValueError):  # never written, or cut by a full disk
                return None
            text = cast("dict[str, object]", stored).get("text") if isinstance(stored, dict) else None
            return text if isinstance(text, str) else None
        return self._replies.get(key)

    async def _remember(self, key: str, text: str) -> None:
        self._replies[key] = text
        if len(self._replies) > _MAX_REMEMBERED:
            self._replies.popitem(last=False)
        if self.settings.cache_dir is None:
            return
        file = anyio.Path(self._file(key))
        await file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_name(f"{key}.{uuid4().hex}.draft")
        await draft.write_text(json.dumps({"model": self._model, "text": text}))
        await draft.replace(file)

    def _file(self, key: str) -> Path:
        assert self.settings.cache_dir is not None
        return self.settings.cache_dir / key[:2] / f"{key}.json"
