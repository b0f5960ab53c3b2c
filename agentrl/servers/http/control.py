"""The calls that control a server (abort, flush, pause, continue, weight updates, checksums), and those that describe it.

Invariant: a call answers once the engine has carried it out (HTTP 200) or refused it (400), and other calls are answered
meanwhile; a body that does not fit the endpoint changes nothing. Who waits for whom: a call waits only inside the engine,
whose methods document their waits. Joining a group waits for the other ranks and a bucket waits for rank 0, up to the
engine's limit; both fail when rank 0 is gone.

The calls that describe a server answer at once, paused or not, with two exceptions. `/health_generate` waits for a token,
and so does `/health` with `SGLangFault.BLOCKING_HEALTH`. `/server_info` waits for `InferenceEngine.settled`.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Mapping
from typing import Any, Final, Literal

import anyio
import anyio.to_thread
import msgspec
from aiohttp import web

from agentrl.errors import RequestRejected
from agentrl.inference.backend import CONTEXT_RESERVE
from agentrl.servers.engine import (
    BucketUpdate,
    ControlReply,
    EnginePauseMode,
    EngineRequest,
    EngineSampling,
    InferenceEngine,
    WeightGroups,
)
from agentrl.servers.http.errors import BadBody, decode_body, json_reply
from agentrl.servers.http.generate import RequestSink, Wakeup
from agentrl.weights.types import WIRE_DTYPES, Bucket, GroupAddress, TensorSpec

_DEFAULT_GROUP = "weight_update_group"
_FLATTENED_BUCKET = "flattened_bucket"
SGLANG_VERSION: Final = "0.5.23"
"""The version of SGLang whose protocol the server follows."""
_HEALTH_TIMEOUT_S: Final = 20.0


class _JoinBody(msgspec.Struct):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = _DEFAULT_GROUP
    backend: str = "nccl"


class _LeaveBody(msgspec.Struct):
    group_name: str = _DEFAULT_GROUP


class _SessionBody(msgspec.Struct):
    selector: Literal["target", "draft", "all"] = "all"


class _ReceiveBody(msgspec.Struct):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = _DEFAULT_GROUP
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None
    load_format: str | None = None


class GroupRoutes:
    """Weight updates from process groups; one method per endpoint."""

    def __init__(self, groups: WeightGroups) -> None:
        self._groups = groups

    def add_to(self, app: web.Application) -> None:
        """Add the routes to `app`."""
        post = app.router.add_post
        post("/init_weights_update_group", self.join)
        post("/destroy_weights_update_group", self.leave)
        post("/begin_weight_update", self.begin)
        post("/update_weights_from_distributed", self.receive)
        post("/end_weight_update", self.end)

    async def join(self, request: web.Request) -> web.Response:
        """Join a group; answer when it is complete."""
        sent = decode_body(await request.read(), _JoinBody)
        if sent.backend != "gloo":
            message = f"backend must be gloo for this server, got {sent.backend}"
            return _control_response(ControlReply(success=False, message=message))
        if not 0 < sent.rank_offset < sent.world_size or not sent.group_name:
            got = f"rank {sent.rank_offset} of {sent.world_size} in {sent.group_name!r}"
            message = f"expected a group name and a rank above 0 and below the world size, got {got}"
            return _control_response(ControlReply(success=False, message=message))
        address = GroupAddress(sent.group_name, sent.master_address, sent.master_port, sent.world_size, "gloo")
        return _control_response(await self._groups.join(address, sent.rank_offset))

    async def leave(self, request: web.Request) -> web.Response:
        """Leave a group."""
        return _control_response(await self._groups.leave(decode_body(await request.read(), _LeaveBody).group_name))

    async def begin(self, request: web.Request) -> web.Response:
        """Open an update session."""
        decode_body(await request.read(), _SessionBody)
        return _control_response(await self._groups.begin())

    async def receive(self, request: web.Request) -> web.Response:
        """Receive a bucket; answer when it has arrived and, if the call names a version, is being served."""
        sent = decode_body(await request.read(), _ReceiveBody)
        update = BucketUpdate(
            bucket=_bucket(sent),
            group=sent.group_name,
            flat=sent.load_format == _FLATTENED_BUCKET,
            weight_version=sent.weight_version,
            flush_cache=sent.flush_cache,
            abort_all_requests=sent.abort_all_requests,
        )
        done = await self._groups.receive(update)
        if done.success and sent.weight_version is not None:
            message = f"{done.message} Weight version updated to {sent.weight_version}."
            done = ControlReply(success=True, message=message)
        return _control_response(done)

    async def end(self, request: web.Request) -> web.Response:
        """Close the update session."""
        decode_body(await request.read(), _SessionBody)
        return _control_response(await self._groups.end())


def _bucket(sent: _ReceiveBody) -> Bucket:
    if not len(sent.names) == len(sent.dtypes) == len(sent.shapes) or not sent.names:
        counts = f"{len(sent.names)} names, {len(sent.dtypes)} dtypes, {len(sent.shapes)} shapes"
        raise RequestRejected(f"expected as many names as dtypes and shapes, at least one; got {counts}", status=400)
    if sent.load_format not in (None, _FLATTENED_BUCKET):
        raise RequestRejected(f"load_format must be {_FLATTENED_BUCKET} or left out, got {sent.load_format!r}", status=400)
    specs = tuple(TensorSpec(*spec) for spec in zip(sent.names, sent.dtypes, map(tuple, sent.shapes), strict=True))
    for spec in specs:
        if spec.dtype not in WIRE_DTYPES or min(spec.shape, default=0) < 0:
            raise RequestRejected(f"{spec.name}: cannot take {spec.dtype} {list(spec.shape)}", status=400)
    return specs


def _control_response(done: ControlReply) -> web.Response:
    return json_reply({"success": done.success, "message": done.message}, status=200 if done.success else 400)


_LOAD_FORMATS = (None, "auto", "safetensors")


class _AbortBody(msgspec.Struct):
    rid: str = ""
    abort_all: bool = False


class _PauseBody(msgspec.Struct):
    mode: EnginePauseMode = "abort"


class _ContinueBody(msgspec.Struct):
    torch_empty_cache: bool = True


class _UpdateBody(msgspec.Struct):
    model_path: str
    load_format: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None


class _VersionBody(msgspec.Struct):
    new_version: str
    abort_all_requests: bool = True


class _CloseBody(msgspec.Struct):
    session_id: str


class _CheckBody(msgspec.Struct):
    action: str = "checksum"


class ControlRoutes:
    """All other control calls; one method per endpoint."""

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine

    def add_to(self, app: web.Application) -> None:
        """Add the routes to `app`."""
        post = app.router.add_post
        post("/abort_request", self.abort_request)
        post("/pause_generation", self.pause_generation)
        post("/continue_generation", self.continue_generation)
        post("/update_weights_from_disk", self.update_weights_from_disk)
        post("/update_weight_version", self.update_weight_version)
        for add in (post, app.router.add_get):
            add("/flush_cache", self.flush_cache)
            add("/close_session", self.close_session)
            add("/weights_checker", self.weights_checker)

    async def abort_request(self, request: web.Request) -> web.Response:
        """End the requests whose id starts with `rid`, or all; answer 200 even if there are none."""
        sent = decode_body(await request.read(), _AbortBody)
        self._engine.abort(sent.rid, abort_all=sent.abort_all)
        return web.Response()

    async def flush_cache(self, request: web.Request) -> web.Response:
        """Drop the prefix cache; answer 400 if requests still run after `timeout` seconds."""
        timeout_s = _seconds(request.query.get("timeout", "0"))
        if await self._engine.flush_cache(timeout_s):
            return web.Response(text="Cache flushed.\n")
        text = "Timed out waiting for idle state." if timeout_s else "Flush cache failed.\n"
        return web.Response(status=400, text=text)

    async def close_session(self, request: web.Request) -> web.Response:
        """Let the cached prefixes of a session go; answer 200 for an unknown one, too."""
        self._engine.close_session(decode_body(await request.read(), _CloseBody).session_id)
        return web.Response()

    async def pause_generation(self, request: web.Request) -> web.Response:
        """Stop sampling; answer once the engine has stopped."""
        await self._engine.pause(decode_body(await request.read(), _PauseBody).mode)
        return json_reply({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, request: web.Request) -> web.Response:
        """Continue after a pause; without one, do nothing."""
        decode_body(await request.read(), _ContinueBody)
        await self._engine.resume()
        return json_reply({"message": "Generation continued successfully.", "status": "ok"})

    async def update_weights_from_disk(self, request: web.Request) -> web.Response:
        """Load a checkpoint; answer 400 with `success: false` if the engine refuses it."""
        sent = decode_body(await request.read(), _UpdateBody)
        if sent.load_format not in _LOAD_FORMATS:
            raise RequestRejected(f"load_format must be auto or safetensors, got {sent.load_format!r}", status=400)
        done = await self._engine.update_weights(
            sent.model_path,
            weight_version=sent.weight_version,
            flush_cache=sent.flush_cache,
            abort_all_requests=sent.abort_all_requests,
        )
        message = done.message
        if done.success and sent.weight_version is not None:
            message = f"{message} Weight version updated to {sent.weight_version}."
        body = {"success": done.success, "message": message, "num_paused_requests": 0}  # always 0, as in SGLang
        return json_reply(body, status=200 if done.success else 400)

    async def update_weight_version(self, request: web.Request) -> web.Response:
        """Change the version of the weights; abort all requests unless the call says otherwise, as SGLang does."""
        sent = decode_body(await request.read(), _VersionBody)
        await self._engine.set_weight_version(sent.new_version, abort_all_requests=sent.abort_all_requests)
        message = f"Weight version updated to {sent.new_version}"
        return json_reply({"success": True, "message": message, "new_version": sent.new_version})

    async def weights_checker(self, request: web.Request) -> web.Response:
        """Report the digest of each served tensor.

        SGLang reports xxhash digests under its own fused names (`qkv_proj`, `gate_up_proj`). This server reports
        `tensor_checksum` digests under HF names, which a client can compare with those of a publication. The
        field `engine` of `/server_info` says which kind a server reports.
        """
        body = await request.read()
        action = decode_body(body, _CheckBody).action if body else "checksum"
        if action != "checksum":
            return json_reply({"success": False, "message": f"Unsupported action={action!r}"}, status=400)
        checksums = dict(await anyio.to_thread.run_sync(self._engine.checksums))  # it reads all weights
        combined = hashlib.sha256(repr(sorted(checksums.items())).encode()).hexdigest()
        rank: dict[str, Any] = {"checksums": checksums, "per_gpu_checksum": combined, "parallelism_info": [_SINGLE_RANK]}
        return json_reply({"success": True, "message": "Success.", "ranks": [rank], "per_engine_checksum": combined})


_SINGLE_RANK = {
    "role": "target", "tp_rank": 0, "tp_size": 1, "dp_rank": 0, "dp_size": 1, "pp_rank": 0, "pp_size": 1,
    "rank": 0, "size": 1,
}  # fmt: skip


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise BadBody(f"1 validation error:\n  timeout must be a number of seconds of 0 or more, got {text!r}", status=400)
    return seconds


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
                "lora_adapters": list(info.adapters),
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
            "enable_lora": info.max_adapters > 0,
            "max_loaded_loras": info.max_adapters or None,
            "enable_session_radix_cache": info.has_sessions,
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
            "num_sessions": load.num_sessions,
            "num_dropped_sessions": load.num_dropped_sessions,
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
