"""The calls that describe a server: model, settings, load, health.

Invariant: every call answers at once, paused or not, with two exceptions. `/health_generate` waits for a token, and so does
`/health` with `SGLangFault.BLOCKING_HEALTH`. `/server_info` waits for `InferenceEngine.settled`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any, Final

import anyio
from aiohttp import web

from agentrl.inference.backend import CONTEXT_RESERVE
from agentrl.servers.engine import EngineRequest, EngineSampling, InferenceEngine
from agentrl.servers.http.errors import json_reply
from agentrl.servers.http.generate import RequestSink, Wakeup

SGLANG_VERSION: Final = "0.5.23"
"""The version of SGLang whose protocol the server follows."""
_HEALTH_TIMEOUT_S: Final = 20.0


class InfoRoutes:
    """The endpoints that report about the server, a method for each."""

    def __init__(self, engine: InferenceEngine, *, blocking_health: bool = False) -> None:
        self._engine = engine
        self._blocking_health = blocking_health
        self._started = time.time()
        self._first = engine.info

    def add_to(self, app: web.Application) -> None:
        """Add the routes to `app`."""
        get = app.router.add_get
        for path in ("/model_info", "/get_model_info"):
            get(path, self.model_info)
        for path in ("/server_info", "/get_server_info"):
            get(path, self.server_info)
        get("/v1/loads", self.loads)
        get("/health", self.health_generate if self._blocking_health else self.health)
        get("/health_generate", self.health_generate)
        get("/ready", self.ready)

    async def model_info(self, request: web.Request) -> web.Response:
        """Report the model and the version of its weights."""
        info = self._engine.info
        return json_reply(
            {
                "model_path": info.model_path,
                "served_model_name": info.model_path,
                "tokenizer_path": self._first.model_path,
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": info.weight_version,
                "load_format": "auto",
                "tool_call_parser": None,
                "reasoning_parser": None,
                "model_type": info.model_type,
                "architectures": list(info.architectures),
                "vocab_size": info.vocab_size,
                "context_length": info.max_context_tokens,
            }
        )

    async def server_info(self, request: web.Request) -> web.Response:
        """Report the settings; `weight_version` is the initial one, as in SGLang."""
        await self._engine.settled()
        info = self._engine.info
        settings = self._settings()
        states = [{**settings, "weight_version": info.weight_version, "model_path": info.model_path, **self._load()}]
        return json_reply({**settings, "uptime_s": time.time() - self._started, "internal_states": states})

    def _settings(self) -> Mapping[str, Any]:
        info = self._engine.info
        return {
            "version": SGLANG_VERSION,
            "engine": info.engine,
            "status": "ready",
            "model_path": info.model_path,
            "served_model_name": info.model_path,
            "weight_version": self._first.weight_version,
            "dtype": info.dtype,
            "device": info.device,
            "vocab_size": info.vocab_size,
            "context_length": info.max_context_tokens,
            "max_req_input_len": info.max_context_tokens - CONTEXT_RESERVE,
            "max_running_requests": info.max_running_requests,
            "max_total_num_tokens": info.max_total_tokens,
            "tp_size": 1,
            "dp_size": 1,
            "stream_interval": 1,
            "incremental_streaming_output": False,
        }

    async def loads(self, request: web.Request) -> web.Response:
        """Report the current load; SGLang reports its last snapshot, which does not change during a pause."""
        return json_reply({"timestamp": time.time(), "version": SGLANG_VERSION, "loads": [self._load()]})

    def _load(self) -> dict[str, Any]:
        load, info = self._engine.load, self._engine.info
        held = load.num_waiting if load.paused is not None else 0
        return {
            "dp_rank": 0,
            "num_running_reqs": load.num_running,
            "num_waiting_reqs": load.num_waiting,
            "num_used_tokens": load.num_used_tokens,
            "max_total_num_tokens": info.max_total_tokens,
            "max_running_requests": info.max_running_requests,
            "token_usage": load.num_used_tokens / max(info.max_total_tokens, 1),
            "gen_throughput": load.gen_throughput,
            "cache_hit_rate": load.cache_hit_rate,
            "queues": {"waiting": load.num_waiting - held, "paused": held, "retracted": load.num_retracted},
        }

    async def health(self, request: web.Request) -> web.Response:
        """Answer 200, as SGLang does with `SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=0`."""
        return web.Response()

    async def health_generate(self, request: web.Request) -> web.Response:
        """Answer 200 once the engine has sampled a token, or 503 after 20 s, as during a pause."""
        sink, rid = RequestSink(wakeup := Wakeup()), f"HEALTH_CHECK_{uuid.uuid4().hex}"
        sampling = EngineSampling(max_new_tokens=1, temperature=0.0)
        self._engine.submit(EngineRequest(rid=rid, input_ids=[0], sampling=sampling), sink)
        try:
            with anyio.move_on_after(_HEALTH_TIMEOUT_S):
                await wakeup.wait()
        finally:
            if not sink.done:
                self._engine.abort(rid, exact=True)
        return web.Response(status=200 if sink.done else 503)

    async def ready(self, request: web.Request) -> web.Response:
        """Answer 200, or 503 while paused."""
        return web.Response(status=200 if self._engine.load.paused is None else 503)
