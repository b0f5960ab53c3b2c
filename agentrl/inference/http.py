"""The HTTP server: SGLang's native protocol over an `Engine`, as an aiohttp application.

Invariant: each accepted call is answered once, an engine request never outlives the call that made it (a client that
disconnects aborts it), and no route answers without the key when there is one. Who waits for whom: a `/generate` call waits,
without limit, for its engine request; the client's deadline is the limit, and its disconnect the release.
"""

from __future__ import annotations

import asyncio
import hmac
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import anyio
import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from agentrl.errors import RequestRejected
from agentrl.inference.engine import Engine, EngineRequest, EngineSampling, PauseMode, Progress
from agentrl.inference.http_wire import GenerateCall, decode_body, dumps, parse_generate, reply, trimmed

SGLANG_VERSION: Final = "0.5.23"
"""The version whose protocol is spoken."""
_MAX_BODY_BYTES: Final = 32 * 2**20
_HEALTH_TIMEOUT_S: Final = 20.0


class _Abort(msgspec.Struct):
    rid: str | list[str] = ""
    abort_all: bool = False


class _Pause(msgspec.Struct):
    mode: PauseMode = "abort"


class _Update(msgspec.Struct):
    model_path: str
    load_format: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None


class _Version(msgspec.Struct):
    new_version: str
    abort_all_requests: bool = True


class _Check(msgspec.Struct):
    action: str


class _Waiter:
    """The sink of one call."""

    def __init__(self) -> None:
        self.event = anyio.Event()
        self.latest: Progress | None = None
        self.done = False

    def progress(self, progress: Progress) -> None:
        self.latest = progress
        self.event.set()

    def finish(self, progress: Progress) -> None:
        self.latest = progress
        self.done = True
        self.event.set()

    async def wait(self) -> Progress:
        """Return the state after the next news."""
        await self.event.wait()
        assert self.latest is not None
        if not self.done:
            self.event = anyio.Event()
        return self.latest


def create_app(engine: Engine, *, api_key: str | None = None) -> web.Application:
    """Return the application; it runs the engine from start-up to clean-up.

    Serve it with `handler_cancellation=True`, or requests of disconnected clients are never aborted
    (`agentrl.inference.serve.serve` does).

    Args:
        engine: samples the tokens.
        api_key: demanded of every call as `Authorization: Bearer <key>`.
    """
    app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[_guard(api_key)])
    _Routes(engine).add_to(app)

    async def run_engine(_: web.Application) -> AsyncIterator[None]:
        # aiohttp may enter and leave this in different cancel scopes, which an anyio task group cannot. Should the engine
        # fail, the group cancels the task that started the server, and clean-up raises what happened.
        async with asyncio.TaskGroup() as group:
            task = group.create_task(engine.run())
            yield
            task.cancel()

    app.cleanup_ctx.append(run_engine)
    return app


def _guard(api_key: str | None) -> Middleware:
    """Return the middleware that checks the key and turns errors into JSON."""
    expected = None if api_key is None else b"Bearer " + api_key.encode()

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if expected is not None:
            given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
            if not hmac.compare_digest(given, expected):
                return _error(401, "this server wants a key: send Authorization: Bearer <key>")
        try:
            return await handler(request)
        except RequestRejected as error:
            return _error(error.status or 400, str(error))
        except web.HTTPException as error:
            return _error(error.status, error.reason)

    return guard


class _Routes:
    """One method per endpoint."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._started = time.time()

    def add_to(self, app: web.Application) -> None:
        post, get = app.router.add_post, app.router.add_get
        post("/generate", self.generate)
        post("/abort_request", self.abort_request)
        post("/flush_cache", self.flush_cache)
        post("/pause_generation", self.pause_generation)
        post("/continue_generation", self.continue_generation)
        post("/update_weights_from_disk", self.update_weights_from_disk)
        post("/update_weight_version", self.update_weight_version)
        post("/weights_checker", self.weights_checker)
        for path in ("/model_info", "/get_model_info"):
            get(path, self.model_info)
        for path in ("/server_info", "/get_server_info"):
            get(path, self.server_info)
        get("/v1/loads", self.loads)
        get("/health", self.health)
        get("/health_generate", self.health_generate)
        get("/ready", self.ready)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        started = time.perf_counter()
        engine = self._engine
        call = parse_generate(await request.read(), engine.info, engine.encode)
        waiters: list[tuple[EngineRequest, _Waiter]] = []
        try:
            for one in call.requests:
                waiter = _Waiter()
                engine.submit(one, waiter)
                waiters.append((one, waiter))
            if call.stream:
                return await self._stream(request, call, waiters[0][1], started)
            replies = [self._reply(await waiter.wait(), call, started) for _, waiter in waiters]
        finally:
            for one, waiter in waiters:
                if not waiter.done:
                    engine.abort(one.rid, exact=True)
        return _json(replies if call.batched else replies[0])

    async def _stream(self, request: web.Request, call: GenerateCall, waiter: _Waiter, started: float) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        while True:
            progress = await waiter.wait()
            done = waiter.done
            end = b"\n\ndata: [DONE]\n\n" if done else b"\n\n"
            await response.write(b"data: " + dumps(self._reply(progress, call, started)) + end)
            if done:
                await response.write_eof()
                return response

    def _reply(self, progress: Progress, call: GenerateCall, started: float) -> dict[str, Any]:
        ids, cut_at = trimmed(progress)
        text = self._decode(ids, progress.request.sampling)
        if cut_at is not None:
            text = text.partition(cut_at)[0]
        seconds = time.perf_counter() - started
        return reply(progress, text, call=call, weight_version=self._engine.info.weight_version, seconds=seconds)

    def _decode(self, ids: Sequence[int], sampling: EngineSampling) -> str:
        return self._engine.decode(ids, skip_special_tokens=sampling.skip_special_tokens)

    async def abort_request(self, request: web.Request) -> web.Response:
        sent = decode_body(await request.read(), _Abort)
        for rid in [sent.rid] if isinstance(sent.rid, str) else sent.rid:
            self._engine.abort(rid, abort_all=sent.abort_all)
        return web.Response()

    async def flush_cache(self, request: web.Request) -> web.Response:
        try:
            timeout_s = float(request.query.get("timeout", "0"))
        except ValueError:
            raise RequestRejected(f"timeout must be seconds, got {request.query['timeout']!r}", status=400) from None
        if await self._engine.flush_cache(timeout_s):
            return web.Response(text="Cache flushed.\n")
        return web.Response(status=400, text="Cache not flushed: requests are running or queued.\n")

    async def pause_generation(self, request: web.Request) -> web.Response:
        mode = decode_body(await request.read(), _Pause).mode
        await self._engine.pause(mode)
        return _json({"message": f"Generation paused: {mode}.", "status": "ok"})

    async def continue_generation(self, request: web.Request) -> web.Response:
        await request.read()
        await self._engine.resume()
        return _json({"message": "Generation continued.", "status": "ok"})

    async def update_weights_from_disk(self, request: web.Request) -> web.Response:
        sent = decode_body(await request.read(), _Update)
        if sent.load_format not in (None, "auto", "safetensors"):
            raise RequestRejected(f"load_format must be auto or safetensors, got {sent.load_format!r}", status=400)
        done = await self._engine.update_weights(
            sent.model_path,
            weight_version=sent.weight_version,
            flush_cache=sent.flush_cache,
            abort_all_requests=sent.abort_all_requests,
        )
        body = {"success": done.success, "message": done.message, "num_paused_requests": done.num_paused_requests}
        return _json(body, status=200 if done.success else 400)

    async def update_weight_version(self, request: web.Request) -> web.Response:
        sent = decode_body(await request.read(), _Version)
        await self._engine.set_weight_version(sent.new_version, abort_all_requests=sent.abort_all_requests)
        return _json({"success": True, "message": "Weight version updated.", "new_version": sent.new_version})

    async def weights_checker(self, request: web.Request) -> web.Response:
        sent = decode_body(await request.read(), _Check)
        if sent.action != "checksum":
            raise RequestRejected(f"action must be 'checksum', got {sent.action!r}", status=400)
        return _json({"success": True, "message": "", "ranks": [{"checksums": dict(self._engine.checksums())}]})

    async def model_info(self, request: web.Request) -> web.Response:
        info = self._engine.info
        return _json(
            {
                "model_path": info.model_path,
                "served_model_name": info.model_path,
                "tokenizer_path": info.model_path,
                "is_generation": True,
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
        info = self._engine.info
        return _json(
            {
                "version": SGLANG_VERSION,
                "engine": info.engine,
                "model_path": info.model_path,
                "served_model_name": info.model_path,
                "weight_version": info.weight_version,
                "dtype": info.dtype,
                "device": info.device,
                "vocab_size": info.vocab_size,
                "context_length": info.max_context_tokens,
                "max_running_requests": info.max_running_requests,
                "max_total_num_tokens": info.max_total_tokens,
                "uptime_s": time.time() - self._started,
                "internal_states": [self._load()],
            }
        )

    async def loads(self, request: web.Request) -> web.Response:
        return _json({"loads": [self._load()]})

    def _load(self) -> dict[str, Any]:
        load, capacity = self._engine.load, self._engine.info.max_total_tokens
        held = load.num_waiting if load.paused is not None else 0
        return {
            "dp_rank": 0,
            "num_running_reqs": load.num_running,
            "num_waiting_reqs": load.num_waiting,
            "num_used_tokens": load.num_used_tokens,
            "max_total_num_tokens": capacity,
            "token_usage": load.num_used_tokens / max(capacity, 1),
            "gen_throughput": load.gen_throughput,
            "cache_hit_rate": load.cache_hit_rate,
            "queues": {"waiting": load.num_waiting - held, "paused": held, "retracted": load.num_retracted},
        }

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def health_generate(self, request: web.Request) -> web.Response:
        """Answer 200 once one token has been sampled, 503 when that takes too long, as under a pause."""
        waiter, rid = _Waiter(), f"HEALTH_CHECK_{uuid.uuid4().hex}"
        sampling = EngineSampling(max_new_tokens=1, temperature=0.0)
        self._engine.submit(EngineRequest(rid=rid, input_ids=[0], sampling=sampling), waiter)
        try:
            with anyio.move_on_after(_HEALTH_TIMEOUT_S):
                await waiter.wait()
        finally:
            if not waiter.done:
                self._engine.abort(rid, exact=True)
        return web.Response(status=200 if waiter.done else 503)

    async def ready(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self._engine.load.paused is None else 503)


def _json(value: object, *, status: int = 200) -> web.Response:
    return web.Response(body=dumps(value), status=status, content_type="application/json")


def _error(status: int, message: str) -> web.Response:
    return _json({"error": {"message": message}}, status=status)
