"""The embedded engine: SGLang's control calls around the synchronous core, on one event loop; a thread computes.

Invariant: calls are answered while a step is computed, however long that takes. Weights, pause state and version label
change only between two steps: a pause or a swap during a step discards the step, which then never happened, and no method
awaits in the middle of a change. One step is computed at a time.

Who waits for whom: `run` waits for a request, a resume or an update; an update without a pause waits until the running
sequences finish or a pause begins; `flush_cache` waits until nothing runs.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import anyio
import anyio.from_thread
import anyio.lowlevel
import torch

from agentrl.errors import ConfigError, InvariantError
from agentrl.inference.backend import CONTEXT_HEADROOM
from agentrl.servers.embedded.adapting import MAX_ADAPTERS, LoadedAdapters
from agentrl.servers.embedded.cache import plan_rows
from agentrl.servers.embedded.core import Computed, Core, ModelStep
from agentrl.servers.embedded.faults import SGLangFault
from agentrl.servers.embedded.low_rank import ServedAdapter
from agentrl.servers.embedded.opening import open_model
from agentrl.servers.embedded.sequences import TextCodec
from agentrl.servers.embedded.served_model import VersionWeights
from agentrl.servers.embedded.updating import Aborts, Gate, GroupUpdates, WeightUpdates
from agentrl.servers.engine import ControlReply, EngineInfo, EngineLoad, EnginePauseMode, EngineRequest, Sink


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The model and the limits of an embedded engine."""

    model_path: str
    """Local HF directory with config.json and safetensors, and tokenizer.json if requests use text or stop strings."""
    weight_version: str = "0"
    max_running_requests: int = 64
    max_context_tokens: int = 4096
    """SGLang's --context-length, limited by the model's; prompts stay `CONTEXT_RESERVE` + 1 tokens below it, outputs 2."""
    device: str = "cpu"
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    memory_fraction: float = 0.25
    """Share of the device's memory that the KV cache may grow to."""
    random_seed: int = 0
    """Seed for requests that carry none."""
    faults: frozenset[SGLangFault] = frozenset()
    """Faults of SGLang to reproduce, for tests of clients."""
    turn_s: float = 0.001
    """Steps shorter than this, seconds, share a turn of the event loop; with 0 each step has its own on any machine."""


_PATIENCE_S: Final = 0.02
"""Seconds that the event loop waits for a step, so that short ones cost no turn of it; a longer one ends in its own time."""
_WHOLE_TURN_S: Final = 0.05
"""The same where each step has a turn of its own, as in tests."""
STUCK_S: Final = 300.0
"""Seconds after which a step counts as one that never ends; the server ends then, as SGLang's watchdog ends SGLang."""


@dataclass(slots=True, eq=False)
class _Computation:
    step: ModelStep
    done: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Guards the end of the step against the event loop's decision to wait no longer."""
    wake: Callable[[], None] | None = None
    """Wakes the event loop; None: it still waits for `done`."""
    result: Computed | None = None
    failure: Exception | None = None

    def end(self) -> None:
        """Say that the step is computed. From the computing thread."""
        with self.lock:
            self.done.set()
        if self.wake is not None:
            with suppress(anyio.RunFinishedError):
                self.wake()


class _Computing:
    """The thread that computes; it ends when `close` is called."""

    def __init__(self, compute: Callable[[ModelStep], Computed]) -> None:
        self._compute, self._jobs = compute, queue.SimpleQueue[_Computation | None]()
        self._threads = torch.get_num_threads()
        threading.Thread(target=self._serve, name="computing", daemon=True).start()

    async def run(self, step: ModelStep, patience_s: float) -> Computed:
        """Return the results of a step; the event loop waits for `patience_s`, and runs on from then.

        Cancellation: the step ends first, because nobody can stop its thread.

        Raises:
            InvariantError: the step does not end.
        """
        job = _Computation(step)
        self._jobs.put(job)
        if not job.done.wait(patience_s):
            token, ended = anyio.lowlevel.current_token(), anyio.Event()
            with job.lock:
                waiting = not job.done.is_set()
                if waiting:
                    job.wake = lambda: anyio.from_thread.run_sync(ended.set, token=token)
            if waiting:
                with anyio.CancelScope(shield=True), anyio.move_on_after(STUCK_S):
                    await ended.wait()
        if job.failure is not None:
            raise job.failure
        if job.result is None:
            raise InvariantError(f"a step has taken {STUCK_S:g} s: it hangs, or this model is too large for this machine")
        return job.result

    def close(self) -> None:
        """Let the thread end."""
        self._jobs.put(None)

    def _serve(self) -> None:
        torch.set_num_threads(self._threads)  # OpenMP's number is one of each thread
        while (job := self._jobs.get()) is not None:
            try:
                job.result = self._compute(job.step)
            except Exception as error:  # noqa: BLE001 - the event loop raises it
                job.failure = error
            job.end()
            del job


def device_of(name: str) -> torch.device:
    """Return a torch device that can hold tensors; `auto` is CUDA if there is one, else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {name!r} cannot be used: {error}") from error
    return device


__all__ = ["EmbeddedEngine", "EngineOptions"]


class EmbeddedEngine:
    """An `agentrl.servers.engine.InferenceEngine` that computes with torch.

    Raises:
        ConfigError: if the model cannot be read or computed, or does not fit into memory.

    Example:
        >>> engine = EmbeddedEngine(EngineOptions(model_path="model"))  # doctest: +SKIP
        >>> async with anyio.create_task_group() as tg:  # doctest: +SKIP
        ...     tg.start_soon(engine.run)
        ...     engine.submit(request, sink)
    """

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._device, self._dtype = device_of(options.device), getattr(torch, options.dtype)
        source = self._source = open_model(options.model_path, self._device, self._dtype)
        spec = self._spec = source.spec
        codec = self._codec = TextCodec(options.model_path)
        max_context = min(options.max_context_tokens, spec.max_positions + CONTEXT_HEADROOM)
        weights = source.read(options.model_path)
        rows = plan_rows(
            spec,
            max_running=options.max_running_requests,
            max_context=max_context,
            device=self._device,
            dtype=self._dtype,
            memory_fraction=options.memory_fraction,
        )
        core = self._core = Core(
            source.model(weights, max_context),
            source.cache(rows, max_context),
            codec,
            eos_ids=spec.eos_ids | codec.eos_ids,
            max_running=options.max_running_requests,
            label=options.weight_version,
            random_seed=options.random_seed,
        )
        faults = options.faults
        self._gate = Gate()
        self._aborts = Aborts(core, self._gate, faults)
        self._updates = WeightUpdates(
            core, self._gate, self._aborts, self._read, model_path=options.model_path, faults=faults
        )
        self.groups = GroupUpdates(self._updates, lambda: core.model.weights, source.build)
        """Receives weights from the trainer's memory."""
        self.adapters = LoadedAdapters(core, self._gate, self._read_adapter)
        """Holds LoRA adapters."""
        self._rate_mark = (time.monotonic(), 0)

    @property
    def info(self) -> EngineInfo:
        """Return the model, its limits, and the version of the served weights."""
        spec, cache = self._spec, self._core.cache
        return EngineInfo(
            model_path=self._updates.model_path,
            weight_version=self._updates.version,
            vocab_size=spec.vocab_size,
            max_context_tokens=cache.max_context,
            max_running_requests=min(self._options.max_running_requests, cache.num_rows),
            max_total_tokens=cache.num_rows * cache.max_context,
            architectures=(spec.architecture,),
            model_type=spec.model_type,
            adapters=self.adapters.names,
            max_adapters=MAX_ADAPTERS if self._source.takes_adapters else 0,
            dtype=self._options.dtype,
            device=str(self._device),
            has_sessions=True,
        )

    @property
    def load(self) -> EngineLoad:
        """Return the current load; throughput counts from the previous call."""
        core, now = self._core, time.monotonic()
        since, tokens = self._rate_mark
        self._rate_mark = (now, core.output_tokens)
        return EngineLoad(
            num_running=core.num_running,
            num_waiting=len(core.waiting),
            num_retracted=sum(sequence.admitted for sequence in core.waiting),
            num_used_tokens=int(core.cache.lengths[core.cache.owned].sum()),
            paused=self._gate.paused,
            gen_throughput=(core.output_tokens - tokens) / max(now - since, 1e-6),
            cache_hit_rate=core.cached_tokens / max(core.prompt_tokens, 1),
            num_sessions=core.cache.num_sessions,
            num_dropped_sessions=core.cache.dropped,
        )

    async def run(self) -> None:
        """Step while there is work, and yield to the event loop about every `turn_s`; wait for work without limit.

        Cancellation: a step that is being computed ends first.
        """
        core, gate, turn_s, turned = self._core, self._gate, self._options.turn_s, time.perf_counter()
        patience_s = _PATIENCE_S if turn_s else _WHOLE_TURN_S
        computing = _Computing(core.compute)
        try:
            while True:
                step = None if gate.paused is not None else core.begin(admit=not gate.draining)
                if step is None:
                    await gate.wait()
                else:
                    core.end(step, await computing.run(step, patience_s))
                    if core.num_running == 0 or gate.watched:
                        gate.notify()
                    elif time.perf_counter() - turned < turn_s:
                        continue
                await anyio.lowlevel.checkpoint()
                turned = time.perf_counter()
        finally:
            computing.close()
            for sequence in tuple(core.live.values()):
                core.abort(sequence)

    def submit(self, request: EngineRequest, sink: Sink) -> None:
        """Queue a request."""
        adapter = None if request.adapter is None else self.adapters.find(request.adapter)
        sequence = self._core.submit(request, sink, adapter)
        sequence.parked = self._gate.paused is not None
        self._gate.notify()

    def abort(self, rid: str = "", *, abort_all: bool = False, exact: bool = False) -> int:
        """End requests now, waiting and retracted ones too, with their partial output; return their number."""
        count = self._aborts.abort(rid, abort_all=abort_all, exact=exact)
        if count:
            self._gate.notify()
        return count

    async def pause(self, mode: EnginePauseMode) -> None:
        """Stop before the next step.

        `retract` after `in_place` retracts the running requests. `abort` ends all requests, also during a pause; unlike
        in SGLang it cannot deadlock, except with `SGLangFault.ABORT_DEADLOCK`.
        """
        await self._checkpoint()
        if mode == "abort":
            if (
                SGLangFault.ABORT_DEADLOCK in self._options.faults
                and self._gate.paused == "in_place"
                and self._core.num_running
            ):
                self._gate.stuck = True
                await self._checkpoint()
            self.abort(abort_all=True)
        elif mode == "retract":
            self._core.retract()
        self._core.discard()
        self._gate.paused = mode
        self._gate.notify()

    async def resume(self) -> None:
        """Continue stepping."""
        await self._checkpoint()
        self._gate.paused = None
        self._aborts.resumed()
        self._gate.notify()

    async def update_weights(
        self, model_path: str, *, weight_version: str | None, flush_cache: bool, abort_all_requests: bool
    ) -> ControlReply:
        """Read new weights in a thread, wait until a swap is allowed, and swap them in.

        KV of the former weights is never matched again, even without a flush. During an `in_place` pause with running
        sequences, whose KV cannot be flushed, an update with `flush_cache` is refused before anything changes.

        Cancellation: the weights are the former ones; the thread finishes reading and its result is dropped.
        """
        return await self._updates.from_disk(
            model_path, weight_version=weight_version, flush_cache=flush_cache, abort_all_requests=abort_all_requests
        )

    async def settled(self) -> None:
        """Return at once, except with `SGLangFault.UPDATE_COLLISION`: then wait for the update in progress."""
        await anyio.lowlevel.checkpoint()
        await self._updates.settled()

    async def set_weight_version(self, weight_version: str, *, abort_all_requests: bool) -> None:
        """Change the version of the weights."""
        await anyio.lowlevel.checkpoint()
        if abort_all_requests:
            self.abort(abort_all=True)
        self._updates.rename(weight_version)

    async def flush_cache(self, timeout_s: float) -> bool:
        """Drop the prefix cache once nothing runs and, unless paused, nothing is queued."""
        with anyio.move_on_after(timeout_s):
            while self._busy():
                await self._gate.wait()
        if self._busy():
            return False
        self._core.cache.flush()
        return True

    def close_session(self, session: str) -> None:
        """Let the cached prefixes of a session be evicted as those of no session."""
        self._core.cache.close_session(session)

    def checksums(self) -> Mapping[str, str]:
        """Return the digest of each served tensor, by HF name."""
        return self._core.model.weights.checksums()

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`; RequestRejected without a tokenizer."""
        return self._codec.encode(text)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of `ids`; "" without a tokenizer."""
        return self._codec.decode(ids, skip_special_tokens=skip_special_tokens)

    def _read(self, model_path: str) -> VersionWeights:
        if not Path(model_path).is_dir():
            raise ConfigError(f"no directory {model_path}: expected a local HF model directory")
        return self._source.read(model_path)

    def _read_adapter(self, name: str, path: str) -> ServedAdapter:
        return self._source.adapter(name, Path(path), Path(self._updates.model_path))

    def _busy(self) -> bool:
        return self._core.num_running > 0 or (self._gate.paused is None and len(self._core.waiting) > 0)

    async def _checkpoint(self) -> None:
        """Yield once, or never return if a fault has left the engine stuck."""
        await anyio.lowlevel.checkpoint()
        if self._gate.stuck:
            await anyio.sleep_forever()
