"""The seam between the HTTP server and the engine that samples its tokens: embedded or scripted.

Invariant: an engine finishes every accepted request exactly once (`Sink.finish`) and reports nothing about it afterwards.
All methods run, and all sinks are notified, on the event-loop thread. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

from agentrl.errors import RequestRejected
from agentrl.inference.backend import SamplingParams
from agentrl.weights.types import Bucket, GroupAddress

EnginePauseMode: TypeAlias = Literal["abort", "retract", "in_place"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSampling(SamplingParams):
    """Sampling parameters of SGLang that the servers support and agentrl's own client does not send."""

    min_new_tokens: int = 0
    """No stop token is sampled before this many output tokens."""
    repetition_penalty: float = 1.0
    """Divides the positive and multiplies the negative logits of tokens in the output so far; 1 means off."""
    no_stop_trim: bool = False
    """Keep the matched stop string or token in `text`; the ids always keep it."""
    skip_special_tokens: bool = True
    """Leave special tokens out of `text`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """A sequence to continue or to score."""

    rid: str
    """Unique among unfinished requests."""
    input_ids: Sequence[int]
    """[N] ids, N >= 1."""
    sampling: EngineSampling
    logprob_start_len: int = -1
    """Report the log-probs of `input_ids[logprob_start_len:]`, the first of which is null; -1 or N: of no input token."""
    stream: bool = False
    """Call `Sink.progress` after each step."""
    adapter: str | None = None
    """Name of the LoRA adapter that computes it, from its first token to its last; None: the weights alone."""
    cache_key: tuple[str, str] = ("", "")
    """SGLang's `extra_key` and `cache_salt`; only requests with equal keys share cached prefixes."""
    session: str = ""
    """SGLang's `session_id`: its prefix is evicted after those of no session, until `close_session`; empty: of none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The end of a request, and its reason."""

    kind: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    """The stop token or stop string, for `stop`."""
    message: str = ""
    """For `abort`: the cause."""
    reduced: bool = False
    """For `abort`: report only id, output and finish reason, as SGLang does for a request aborted in its queue."""


@dataclass(slots=True, kw_only=True)
class RequestProgress:
    """The output of a request so far. The engine owns it and appends to it; sinks read it when they are notified."""

    request: EngineRequest
    output_ids: list[int] = field(default_factory=list[int])
    output_logprobs: list[float] = field(default_factory=list[float])
    """Log-prob of each output id, nats, of the temperature-scaled distribution before truncation."""
    versions: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    """(weight version, index of the first output token it sampled), in order; the first index is 0."""
    input_logprobs: list[float | None] | None = None
    """Log-probs of `input_ids[logprob_start_len:]`, the first one None; None unless the request asks for them."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache when the request first ran."""
    num_retractions: int = 0
    finish: Finish | None = None


class Sink(Protocol):
    """Receives the output of one request. Its methods must return at once and must not raise."""

    def progress(self, progress: RequestProgress) -> None:
        """Take new output tokens; called only for requests with `stream`."""
        ...

    def finish(self, progress: RequestProgress) -> None:
        """Take the end of the request: `progress.finish` is set, and `progress` no longer changes."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """The model and the limits of a server; `model_path` and `weight_version` follow weight updates."""

    model_path: str
    weight_version: str
    vocab_size: int
    max_context_tokens: int
    """SGLang's context length; `servers.http.requests` checks how much of it a prompt and its output may fill."""
    max_running_requests: int
    max_total_tokens: int
    """Capacity of the KV cache."""
    architectures: tuple[str, ...] = ()
    model_type: str = ""
    dtype: str = "float32"
    device: str = "cpu"
    adapters: tuple[str, ...] = ()
    """Names of the loaded LoRA adapters."""
    max_adapters: int = 0
    """Adapters that can be loaded at once; 0: none."""
    engine: str = "embedded"
    """`embedded` or `scripted`; SGLang's `/server_info` has no such field."""
    has_sessions: bool = False
    """It keeps the cached prefixes of open sessions longer than others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """The load of a server."""

    num_running: int = 0
    num_waiting: int = 0
    """Requests that wait for the end of a pause or for a free row."""
    num_retracted: int = 0
    """Waiting requests that have run before."""
    num_used_tokens: int = 0
    """Tokens in the KV cache that belong to running requests."""
    paused: EnginePauseMode | None = None
    gen_throughput: float = 0.0
    """Output tokens per second since the last call."""
    cache_hit_rate: float = 0.0
    """Share of all prompt tokens since the start that were found in the prefix cache."""
    num_sessions: int = 0
    """Open sessions."""
    num_dropped_sessions: int = 0
    """Times since the start that an open session lost a cached prefix to another request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlReply:
    """The answer to a control call: HTTP 200 on `success`, else HTTP 400, and nothing has changed."""

    success: bool
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketUpdate:
    """A bucket that rank 0 of a group sends, and what to do once it is there."""

    bucket: Bucket
    """The tensors to receive."""
    group: str
    """Name of the group that rank 0 sends them through."""
    flat: bool
    """Rank 0 sends the bucket as one tensor, not each tensor by itself."""
    weight_version: str | None
    """Serve everything received in this session under this version; None: keep it for later."""
    flush_cache: bool
    """Drop the prefix cache with the swap."""
    abort_all_requests: bool
    """End all requests first."""


class WeightGroups(Protocol):
    """The part of an `InferenceEngine` that receives weights from process groups."""

    async def join(self, address: GroupAddress, rank: int) -> ControlReply:
        """Join a group as `rank`; return when the group is complete. Cancellation: the group may be joined."""
        ...

    async def leave(self, name: str) -> ControlReply:
        """Leave a group. Cancellation: the group is left or not."""
        ...

    async def begin(self) -> ControlReply:
        """Open an update session; refuse if one is open. Cancellation: the session is open or not."""
        ...

    async def receive(self, update: BucketUpdate) -> ControlReply:
        """Receive a bucket; refuse outside a session. Cancellation: the bucket is lost, and the session stays open."""
        ...

    async def end(self) -> ControlReply:
        """Close the session and serve what it received. Cancellation: the session is open as before, or closed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterReply:
    """The answer to a call about a LoRA adapter: HTTP 200 on `success`, else HTTP 400, and nothing has changed."""

    success: bool
    error: str
    loaded: Mapping[str, str]
    """Path of each loaded adapter, by name."""


class EngineAdapters(Protocol):
    """The part of an `InferenceEngine` that holds LoRA adapters."""

    async def load(self, name: str, path: str) -> AdapterReply:
        """Read the adapter in the directory `path`, and serve it as `name`. Cancellation: it is not loaded."""
        ...

    async def unload(self, name: str) -> AdapterReply:
        """Forget an adapter, after its requests have ended. Cancellation: it is forgotten; its requests run on."""
        ...

    def checksums(self, name: str) -> Mapping[str, str]:
        """Return the digest of each matrix of an adapter, by PEFT's name; RequestRejected where it is not loaded."""
        ...


class NoAdapters:
    """The part of an engine that holds none; it answers as SGLang without `--enable-lora`."""

    async def load(self, name: str, path: str) -> AdapterReply:
        """Refuse."""
        return self._refusal()

    async def unload(self, name: str) -> AdapterReply:
        """Refuse."""
        return self._refusal()

    def checksums(self, name: str) -> Mapping[str, str]:
        """Refuse."""
        raise RequestRejected(self._refusal().error, status=400)

    def _refusal(self) -> AdapterReply:
        return AdapterReply(success=False, error="LoRA is not enabled on this server", loaded={})


class InferenceEngine(Protocol):
    """Samples tokens for the HTTP server (`agentrl.servers.http.app.create_app`)."""

    @property
    def info(self) -> EngineInfo:
        """Return the values that `/model_info` and `/server_info` report and that requests are checked against."""
        ...

    @property
    def load(self) -> EngineLoad:
        """Return the load that `/v1/loads` reports; `/ready` fails while `load.paused` is set."""
        ...

    @property
    def groups(self) -> WeightGroups:
        """Return the part that receives weights from process groups."""
        ...

    @property
    def adapters(self) -> EngineAdapters:
        """Return the part that holds LoRA adapters."""
        ...

    async def run(self) -> None:
        """Serve submitted requests until cancelled. The HTTP server runs this exactly once, in its task group.

        Cancellation: requests in flight are finished as aborted.
        """
        ...

    def submit(self, request: EngineRequest, sink: Sink) -> None:
        """Queue a request whose ids, lengths and parameters the caller has checked against `info`.

        Raises:
            RequestRejected: for an id in use, or a request that this engine cannot serve; the server answers 400.
        """
        ...

    def abort(self, rid: str = "", *, abort_all: bool = False, exact: bool = False) -> int:
        """End requests with their partial output.

        Args:
            rid: prefix of the ids of the requests to end, as in SGLang; "" matches none.
            abort_all: end every request.
            exact: end only the request whose id equals `rid`; the server uses this when a client disconnects.

        Returns:
            The number of requests ended; 0 is not an error.
        """
        ...

    async def pause(self, mode: EnginePauseMode) -> None:
        """Stop sampling between two steps and return; requests that arrive later wait.

        `abort` ends all requests with their partial output. `retract` puts running requests back into the queue and
        recomputes their KV later. `in_place` keeps their KV.

        Cancellation: the engine is paused or not, never in between.
        """
        ...

    async def resume(self) -> None:
        """Continue after `pause`; do nothing if the engine is not paused.

        Cancellation: the engine is paused or not, never in between.
        """
        ...

    async def update_weights(
        self, model_path: str, *, weight_version: str | None, flush_cache: bool, abort_all_requests: bool
    ) -> ControlReply:
        """Load safetensors from `model_path` and swap them in between two steps, all of them or none.

        Without a pause, the update waits until the running requests finish or a pause begins; later requests queue
        behind it. `weight_version` None keeps the version.

        Cancellation: all weights are the former ones, or all are the new ones.
        """
        ...

    async def settled(self) -> None:
        """Return once the served version is known; `/server_info` waits for this."""
        ...

    async def set_weight_version(self, weight_version: str, *, abort_all_requests: bool) -> None:
        """Change the version of the weights without changing the weights; tokens sampled from now on carry it.

        Cancellation: the version is changed or not.
        """
        ...

    async def flush_cache(self, timeout_s: float) -> bool:
        """Drop the prefix cache and return True, or return False if requests still run or wait after `timeout_s`.

        Requests that a pause retracted or holds back do not prevent the flush.

        Cancellation: the cache is dropped entirely or not at all.
        """
        ...

    def close_session(self, session: str) -> None:
        """Let the cached prefixes of a session be evicted as those of no session; do nothing for an unknown one."""
        ...

    def checksums(self) -> Mapping[str, str]:
        """Return the `agentrl.weights.tensors.tensor_checksum` of every served tensor, by HF name."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without adding special tokens.

        Raises:
            RequestRejected: if the engine has no tokenizer.
        """
        ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of `ids`, or "" if the engine has no tokenizer."""
        ...
