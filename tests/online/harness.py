"""An online run without a model: scripted server, scripted trainer, the real everything else, and its clients."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import anyio

from agentrl.config.run import parse_config
from agentrl.engine.engine import Engine
from agentrl.engine.parts import RunState
from agentrl.engine.report import RunReport
from agentrl.servers.scripted.script import Script
from agentrl.tokens.renderer import Renderer
from agentrl.trainer.scripted import ScriptedTrainer
from agentrl_doors.online.client_keys import KeyRing, hash_key
from agentrl_doors.online.placeholders import ONLINE_DEFAULTS
from agentrl_doors.online.server import serve_clients
from agentrl_doors.online.traffic import Traffic, TrafficSettings
from tests.engine.harness import make_parts
from tests.rollout.harness import PATIENCE_S, make_server, says

KEYS = {name: f"key-of-{name}" for name in ("web", "app", "agent/calls", "agent/feedback")}


@dataclass(slots=True, kw_only=True)
class OnlineRun:
    """A run that serves."""

    url: str
    traffic: Traffic
    trainer: ScriptedTrainer
    session: aiohttp.ClientSession
    ended: anyio.Event
    """Set when the run has done its steps."""
    report: RunReport | None = None

    async def post(
        self, path: str, body: Mapping[str, object], *, key: str = "web", headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any, Mapping[str, str]]:
        """Return status, body and headers of an answer."""
        sent = {"Authorization": f"Bearer {KEYS.get(key, key)}", **(headers or {})}
        async with self.session.post(self.url + path, json=body, headers=sent) as response:
            return response.status, await response.json(), response.headers

    async def chat(self, *texts: str, key: str = "web", **more: Any) -> tuple[Any, str]:  # noqa: ANN401
        """Return the answer to a conversation whose texts are the user's and the model's in turn, and its id."""
        roles = ["user", "assistant"] * len(texts)
        messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
        headers = more.pop("headers", None)
        status, answer, sent = await self.post(
            "/v1/chat/completions", {"model": "policy", "messages": messages, **more}, key=key, headers=headers
        )
        assert status == 200, answer
        return answer, sent["x-agentrl-conversation"]

    async def feedback(self, reward: object, *, key: str = "web", **ids: object) -> tuple[int, Any]:
        """Return status and body of the answer to a feedback."""
        status, answer, _ = await self.post("/feedback", {"reward": reward, **ids}, key=key)
        return status, answer


def online_traffic(
    run_dir: Path,
    renderer: Renderer,
    served: Any = None,  # noqa: ANN401 - what `Traffic` takes
    *,
    idle_s: float = PATIENCE_S,
    max_conversations: int = 64,
    rollout: Mapping[str, Any] | None = None,
) -> Traffic:
    """Return the traffic of a run; nobody serves it unless `served` does."""
    values = {**ONLINE_DEFAULTS, "model": {"path": "m"}, "runs_dir": str(run_dir.parent), "name": run_dir.name}
    run = parse_config({**values, "rollout": {"max_turns": 8, **(rollout or {})}, "sampling": {"max_tokens": 8}})
    settings = TrafficSettings(idle_s=idle_s, max_conversations=max_conversations)
    return Traffic(renderer, run, settings, served or unserved)


@asynccontextmanager
async def unserved(traffic: Traffic) -> AsyncGenerator[None]:
    """Serve nobody."""
    yield


@asynccontextmanager
async def online_run(
    run_dir: Path,
    renderer: Renderer,
    *,
    script: Script = says("good"),  # noqa: B008 - a pure function
    trainer: ScriptedTrainer | None = None,
    requests_per_minute: int = 10_000,
    max_calls: int = 64,
    idle_s: float = PATIENCE_S,
    max_conversations: int = 64,
    resume: RunState | None = None,
    steps: int = 1,
    **options: Any,  # noqa: ANN401 - options of `make_parts`
) -> AsyncGenerator[OnlineRun]:
    """Serve a run inside the block; when the block ends, so does the run, unless it has done its steps before."""
    hashes = [(name, hash_key(key)) for name, key in KEYS.items()]
    keys = KeyRing(hashes, requests_per_minute=requests_per_minute, max_calls=max_calls)
    trainer = trainer or ScriptedTrainer()
    found: list[str] = []
    ready = anyio.Event()

    def on_ready(url: str) -> None:
        found.append(url)
        ready.set()

    def served(traffic: Traffic) -> AbstractAsyncContextManager[object]:
        return serve_clients(traffic, keys=keys, host="127.0.0.1", port=0, on_ready=on_ready)

    traffic = online_traffic(run_dir, renderer, served, idle_s=idle_s, max_conversations=max_conversations)
    algorithm = {"group_size": 2, "groups_per_step": 1, "staleness_policy": "drop", **options.pop("algorithm", {})}
    parts = make_parts(
        run_dir,
        renderer,
        inference=make_server(renderer, script),
        trainer=trainer,
        algorithm=algorithm,
        source=traffic,
        resume=resume,
        steps=steps,
        **options,
    )
    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as tasks, aiohttp.ClientSession() as session:
            engine = Engine(parts)
            ended = anyio.Event()
            tasks.start_soon(partial(_run, engine, ended))
            await ready.wait()
            run = OnlineRun(url=found[0], traffic=traffic, trainer=trainer, session=session, ended=ended)
            yield run
            if parts.engine.steps == parts.resume.step + len(trainer.batches):
                await ended.wait()
            run.report = engine.report()
            tasks.cancel_scope.cancel()


async def _run(engine: Engine, ended: anyio.Event) -> None:
    await engine.run()
    ended.set()
