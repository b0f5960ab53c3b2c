"""The engine that answers from a script: one control surface, served by `agentrl.servers.http.app` or in process.

Invariant: the script, the version, the faults and the records of a scripted server are here and nowhere else;
`ScriptedServer` is a client of this engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Unpack

import anyio
import anyio.lowlevel
import msgspec
import numpy as np
from anyio.abc import TaskGroup

from agentrl.errors import RequestRejected
from agentrl.servers.engine import (
    BucketUpdate,
    ControlReply,
    EngineInfo,
    EngineLoad,
    EnginePauseMode,
    EngineRequest,
    Finish,
    NoAdapters,
    RequestProgress,
    Sink,
)
from agentrl.servers.scripted.playback import Playback, ScriptPlayer
from agentrl.servers.scripted.script import Fault, Script, ScriptSettings
from agentrl.types import Float32Array, Int32Array
from agentrl.weights.tensors import tensor_checksum
from agentrl.weights.types import Bucket, GroupAddress, scripted_checksums, scripted_logprobs

ControlCall = Literal[
    "connect", "check", "pause", "load_weights", "checksums", "score", "resume", "join_group", "receive_weights"
]


class ScriptedEngine:
    """Implements `InferenceEngine` over a script; the arguments are those of `ScriptedServer`."""

    def __init__(
        self,
        script: Script,
        *,
        vocab_size: int,
        max_context_tokens: int = 1 << 20,
        **settings: Unpack[ScriptSettings],
    ) -> None:
        self.player = ScriptPlayer(script, vocab_size=vocab_size, **settings)
        self.groups = ScriptedGroups(self)
        """Records weight updates from process groups; no tensors are sent."""
        self.adapters = NoAdapters()
        """Refuses LoRA adapters."""
        self.aborted: list[str] = []
        """Ids of the requests that were aborted."""
        self.control_faults: dict[ControlCall, Fault] = {}
        """Faults of control calls; may be changed at any time."""
        self._model_path, self._max_context_tokens = "scripted", max_context_tokens
        self._mode: EnginePauseMode | None = None
        self._tasks: TaskGroup | None = None
        self._is_updated = False
        self._checksums: Mapping[str, str] = {}
        self._waiting: dict[str, Playback] = {}

    @property
    def version(self) -> int:
        return self.player.version

    @property
    def info(self) -> EngineInfo:
        """The settings; the initial version 0 is named "default", as in SGLang."""
        return EngineInfo(
            model_path=self._model_path,
            weight_version=str(self.version) if self.version or self._is_updated else "default",
            vocab_size=self.player.vocab_size,
            max_context_tokens=self._max_context_tokens,
            max_running_requests=1024,
            max_total_tokens=1 << 24,
            engine="scripted",
        )

    @property
    def load(self) -> EngineLoad:
        """The number of replies in progress; during a pause they all count as waiting."""
        count = len(self.player.playing)
        return EngineLoad(num_running=0 if self._mode else count, num_waiting=count if self._mode else 0, paused=self._mode)

    async def run(self) -> None:
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            await anyio.sleep_forever()

    def prepare(self, request: EngineRequest) -> Playback:
        """Ask the script for the reply to a request; the caller then submits the request, or calls `withdraw`."""
        playback = self._waiting[request.rid] = self.player.begin(request)
        return playback

    def withdraw(self, rid: str) -> None:
        """Record the end of a prepared request that was never submitted."""
        del self._waiting[rid]
        self.player.finish(rid)

    def submit(self, request: EngineRequest, sink: Sink) -> None:
        """Play the reply to a request."""
        if self._tasks is None:
            raise RequestRejected("the scripted engine is not running yet", status=503)
        if not request.sampling.max_new_tokens:
            self._tasks.start_soon(self._score, request, sink)
            return
        playback = self._waiting.pop(request.rid, None) or self.player.begin(request)
        self._tasks.start_soon(self._play, playback, sink)

    def abort(self, rid: str = "", *, abort_all: bool = False, exact: bool = False) -> int:
        """End replies with their tokens so far; return their number."""
        ended = 0
        for playing, playback in self.player.playing.items():
            if abort_all or (rid == playing if exact else rid and playing.startswith(rid)):
                self.aborted.append(playing)
                playback.abort("Aborted")
                ended += 1
        return ended

    async def pause(self, mode: EnginePauseMode) -> None:
        """Hold all replies; mode `abort` ends them."""
        if mode == "abort":
            self.abort(abort_all=True)
        self._mode = mode
        self.player.pause(retract=mode == "retract")

    async def resume(self) -> None:
        self.unpause()

    def unpause(self) -> None:
        """Continue all replies, at once."""
        self._mode = None
        self.player.resume()

    async def update_weights(
        self, model_path: str, *, weight_version: str | None, flush_cache: bool, abort_all_requests: bool
    ) -> ControlReply:
        """Take over the version and the digests of the safetensors files; the weights themselves are not used."""
        if abort_all_requests:
            self.abort(abort_all=True)
        if flush_cache and self._mode == "in_place" and self.player.playing:
            return ControlReply(success=False, message="the cache cannot be flushed while requests keep their KV")
        try:
            checksums = dict(digests(model_path))
        except (OSError, ValueError, msgspec.DecodeError) as error:
            return ControlReply(success=False, message=f"{model_path}: {error}")
        self._model_path = model_path
        self.serve(checksums, self.version if weight_version is None else _policy_version(weight_version))
        return ControlReply(success=True, message="scripted")

    async def settled(self) -> None:
        await anyio.lowlevel.checkpoint()

    async def set_weight_version(self, weight_version: str, *, abort_all_requests: bool) -> None:
        if abort_all_requests:
            self.abort(abort_all=True)
        self.serve(self._checksums, _policy_version(weight_version))

    async def flush_cache(self, timeout_s: float) -> bool:
        """Return at once whether a server with a cache could flush it; a script has none."""
        return self._mode == "retract" or not self.player.playing

    def serve(self, checksums: Mapping[str, str], version: int) -> None:
        """Take over the version and the digests of an update."""
        self._checksums, self.player.version, self._is_updated = checksums, version, True

    def close_session(self, session: str) -> None:
        """Do nothing: it caches nothing."""

    def checksums(self) -> Mapping[str, str]:
        """Return the digests of the last update, reversed with `Fault.WRONG_WEIGHTS`."""
        wrong = self.control_faults.get("checksums") is Fault.WRONG_WEIGHTS
        return {name: digest[::-1] if wrong else digest for name, digest in self._checksums.items()}

    def scores(self, token_ids: Int32Array) -> Float32Array:
        """Return the `scripted_logprobs` of the current version, [L-1] float32, off by 0.5 with `Fault.WRONG_WEIGHTS`."""
        wrong = self.control_faults.get("score") is Fault.WRONG_WEIGHTS
        return scripted_logprobs(token_ids, self.version) - np.float32(0.5 if wrong else 0.0)

    def encode(self, text: str) -> list[int]:
        """Refuse: there is no tokenizer."""
        raise RequestRejected(f"the scripted engine has no tokenizer to encode {text[:20]!r} with", status=400)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "" if self.player.decode is None else self.player.decode(ids)

    async def _score(self, request: EngineRequest, sink: Sink) -> None:
        progress = RequestProgress(request=request, finish=Finish(kind="length"))
        progress.input_logprobs = self._input_logprobs(request)
        sink.finish(progress)

    async def _play(self, playback: Playback, sink: Sink) -> None:
        request = playback.progress.request
        if request.logprob_start_len >= 0:
            playback.progress.input_logprobs = self._input_logprobs(request)
        try:
            async for progress in playback.tokens():
                if request.stream:
                    sink.progress(progress)
        finally:
            sink.finish(self.player.finish(request.rid))

    def _input_logprobs(self, request: EngineRequest) -> list[float | None]:
        start = max(request.logprob_start_len, 0)
        values: list[float | None] = [None, *self.scores(np.array(request.input_ids, np.int32)).tolist()]
        return [None, *values[start + 1 :]] if start < len(values) else []


class ScriptedGroups:
    """Implements `WeightGroups` with records only; nothing is sent or received."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self._engine = engine
        self._names: set[str] = set()
        self._taken: Bucket | None = None

    async def join(self, address: GroupAddress, rank: int) -> ControlReply:
        self._names.add(address.name)
        return ControlReply(success=True, message="scripted")

    async def leave(self, name: str) -> ControlReply:
        known = name in self._names
        self._names.discard(name)
        return ControlReply(success=known, message="scripted" if known else f"there is no group {name}")

    async def begin(self) -> ControlReply:
        if self._taken is not None:
            return ControlReply(success=False, message="a session is already open")
        self._taken = ()
        return ControlReply(success=True, message="scripted")

    async def receive(self, update: BucketUpdate) -> ControlReply:
        """Record the bucket, and take over the version if there is one."""
        if update.group not in self._names:
            return ControlReply(success=False, message=f"group {update.group} is not there")
        self._taken = (*(self._taken or ()), *update.bucket)
        if update.weight_version is not None:
            version = _policy_version(update.weight_version)
            self._engine.serve(scripted_checksums(version, [self._taken]), version)
            self._taken = ()
        return ControlReply(success=True, message="scripted")

    async def end(self) -> ControlReply:
        known, self._taken = self._taken is not None, None
        return ControlReply(success=known, message="scripted" if known else "no session is open")


def _policy_version(name: str) -> int:
    if not name.isdecimal():
        raise RequestRejected(f"the scripted engine takes versions that are whole numbers, got {name!r}", status=400)
    return int(name)


def digests(folder: str) -> list[tuple[str, str]]:
    """Return the name and `tensor_checksum` of each tensor in the safetensors files of a folder."""
    found: list[tuple[str, str]] = []
    for file in sorted(Path(folder).glob("*.safetensors")):
        data = memoryview(file.read_bytes())
        start = 8 + int.from_bytes(data[:8], "little")
        header = msgspec.json.decode(bytes(data[8:start]), type=dict[str, dict[str, object]])
        header.pop("__metadata__", None)
        for name, tensor in msgspec.convert(header, dict[str, _Tensor]).items():
            low, high = tensor.data_offsets
            found.append((name, tensor_checksum(name, tensor.dtype, tensor.shape, data[start + low : start + high])))
    return found


class _Tensor(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]
