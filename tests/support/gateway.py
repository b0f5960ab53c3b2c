"""The OpenAI API in front of a tiny model or of a script, on a free port, with clients connected to it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from openai import AsyncOpenAI
from tokenizers import Tokenizer

from agentrl.client import SamplingConfig
from agentrl.servers.embedded.engine import EmbeddedEngine, EngineOptions
from agentrl.servers.engine import InferenceEngine
from agentrl.servers.scripted.engine import ScriptedEngine
from agentrl.servers.scripted.script import Script
from agentrl.servers.serve import serving
from agentrl.tokens.renderer import Renderer
from agentrl_doors.gateway import Gateway
from agentrl_doors.gateway.event_stream import KEEP_ALIVE_S
from tests.support.servers import decoded

MODEL = "tiny"


@dataclass
class Served:
    """A server with the OpenAI API, an openai client on it, and a plain session for what that client cannot send."""

    url: str
    openai: AsyncOpenAI
    session: aiohttp.ClientSession

    async def post(self, path: str, body: object, **options: Any) -> tuple[int, Any]:  # noqa: ANN401
        async with self.session.post(self.url + path, json=body, **options) as response:
            return response.status, decoded(await response.read())

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path) as response:
            return response.status, decoded(await response.read())

    async def error(self, path: str, body: object) -> tuple[int, str | None, str]:
        """Return status, code and message of a call that is refused."""
        status, reply = await self.post(path, body)
        return status, reply["error"]["code"], reply["error"]["message"]


@asynccontextmanager
async def served(
    engine: InferenceEngine,
    checkpoint: Path,
    *,
    api_key: str | None = None,
    max_calls: int = 1024,
    sampling: SamplingConfig | None = None,
    keep_alive_s: float = KEEP_ALIVE_S,
) -> AsyncGenerator[Served]:
    """Serve `engine` with the OpenAI API for the model in `checkpoint`; needs the asyncio event loop."""
    gateway = Gateway(
        Renderer.load(checkpoint),
        model=MODEL,
        sampling=sampling or SamplingConfig(),
        max_calls=max_calls,
        keep_alive_s=keep_alive_s,
    )
    async with (
        serving(engine, api_key=api_key, add_routes=gateway.add_to) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key=api_key or "none", max_retries=0) as client,
        aiohttp.ClientSession() as session,
    ):
        yield Served(url, client, session)


def model_engine(checkpoint: Path, **options: Any) -> EmbeddedEngine:  # noqa: ANN401
    return EmbeddedEngine(EngineOptions(model_path=str(checkpoint), device="cpu", **options))


def script_engine(checkpoint: Path, script: Script) -> ScriptedEngine:
    """Return an engine that answers with a script's texts, in which markup counts as control tokens."""
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    def decode(ids: Any) -> str:  # noqa: ANN401
        return tokenizer.decode(list(ids), skip_special_tokens=False)

    end = tokenizer.token_to_id("<|im_end|>")
    size = tokenizer.get_vocab_size()
    return ScriptedEngine(script, vocab_size=size, encode=encode, decode=decode, eos_id=end)
