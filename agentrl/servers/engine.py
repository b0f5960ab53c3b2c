"""The seam between the HTTP server and what samples tokens behind it: the embedded engine, or a scripted one.

Invariant: every accepted request is finished exactly once (`Sink.finish`), and never reported to again after that. All
methods are called, and all sinks are notified, on the event-loop thread; nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

from agentrl.inference.backend import SamplingParams
from agentrl.weights.types import Bucket, GroupAddress

EnginePauseMode: TypeAlias = Literal["abort", "retract", "in_place"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSampling(SamplingParams):
    """SGLang's sampling parameters that a server understands beyond those agentrl's own client sends."""

    min_new_tokens: int = 0
    """Stop tokens cannot be sampled before this many output tokens."""
    repetition_penalty: float = 1.0
    """Divides positive, multiplies negative logits of tokens seen in prompt or output; 1 means off."""
    no_stop_trim: bool = False
    """Keep the matched stop string or token in `text` (the ids always keep it)."""
    skip_special_tokens: bool = True
    """Leave special tokens out of `text`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One sequence to continue or to score."""

    rid: str
    """Unique among unfinished requests."""
    input_ids: Sequence[int]
    """[N] ids, N >= 1."""
    sampling: EngineSampling
    logprob_start_len: int = -1
    """Report log-probs of `input_ids[logprob_start_len:]` (the first one is null); -1: of output tokens only; N: of none."""
    stream: bool = False
    """Notify `Sink.progress` after each step."""
    cache_key: tuple[str, str] = ("", "")
    """SGLang's `extra_key` and `cache_salt`: only requests with equal ones share cached prefixes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """Why a request ended."""

    kind: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    """The stop token or stop string, for `stop`."""
    message: str = ""
    """For `abort`: what aborted it."""
    reduced: bool = False
    """For `abort`: report only id, output and finish reason, as SGLang does for requests aborted in its queue."""


@dataclass(slots=True, kw_only=True)
class RequestProgress:
    """What a request has produced so far. The engine owns and grows it; sinks read it when they are notified."""

    request: EngineRequest
    output_ids: list[int] = field(default_factory=list[int])
    output_logprobs: list[float] = field(default_factory=list[float])
    """Nats, of the temperature-scaled, untruncated distribution; one per output id."""
    versions: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    """(weight version, index of the first output token it sampled), in order; the first index is 0."""
    input_logprobs: list[float | None] | None = None
    """Log-probs of `input_ids[logprob_start_len:]`, the first one None; None unless asked for."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache at first admission."""
    num_retractions: int = 0
    finish: Finish | None = None


class Sink(Protocol):
    """Receives what becomes of one request. Its methods must return at once and must not raise."""

    def progress(self, progress: RequestProgress) -> None:
        """New output tokens are there; called only for requests with `stream`."""
        ...

    def finish(self, progress: RequestProgress) -> None:
        """The request ended: `progress.finish` is set, and nothing changes any more."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What a server says about itself; `model_path` and `weight_version` follow weight updates."""

    model_path: str
    weight_version: str
    vocab_size: int
    max_context_tokens: int
    """SGLang's context length; what of it prompts and outputs may fill is checked in `http_wire`."""
    max_running_requests: int
    max_total_tokens: int
    """Capacity of the KV cache."""
    architectures: tuple[str, ...] = ()
    model_type: str = ""
    dtype: str = "float32"
    device: str = "cpu"
    engine: str = "embedded"
    """`embedded` or `scripted`: told apart from a real SGLang server by this field of `/server_info`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """How busy a server is."""

    num_running: int = 0
    num_waiting: int = 0
    """Held by a pause or for want of a slot."""
    num_retracted: int = 0
    """Of those waiting: requests that have run before."""
    num_used_tokens: int = 0
    """Tokens in the KV cache that belong to running requests."""
    paused: EnginePauseMode | None = None
    gen_throughput: float = 0.0
    """Output tokens per second, over the last seconds."""
    cache_hit_rate: float = 0.0
    """Share of prompt tokens found in the prefix cache, since the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlReply:
    """The answer to a control call: HTTP 200 where `success`, else 400 with nothing changed."""

    success: bool
    message: str


class WeightGroups(Protocol):
    """Takes weights from process groups; a part of an `InferenceEngine`."""

    async def join(self, address: GroupAddress, rank: int) -> ControlReply:
        """Join a group as `rank`; returns when it is complete. Cancellation: it may be joined."""
        ...

    async def leave(self, name: str) -> ControlReply:
        """Forget a group. Cancellation: it is forgotten or not."""
        ...

    async def begin(self) -> ControlReply:
        """Open a session; one that is open already is a refusal. Cancellation: it is open or not."""
        ...

    async def receive(
        self,
        bucket: Bucket,
        group: str,
        *,
        flat: bool,
        weight_version: str | None,
        flush_cache: bool,
        abort_all_requests: bool,
    ) -> ControlReply:
        """Take a bucket from a group; with `weight_version`, serve everything taken in this session under that name.

        `flat`: the bucket is one broadcast; otherwise each of its tensors is. Outside of a session it is a refusal.

        Cancellation: the bucket is lost, and the session stays open.
        """
        ...

    async def end(self) -> ControlReply:
        """Close the session and serve what was taken in it. Cancellation: as before, or done."""
        ...


class InferenceEngine(Protocol):
    """Samples tokens for the HTTP server (`agentrl.servers.http.app.create_app`)."""

    @property
    def info(self) -> EngineInfo:
        """Return what `/model_info` and `/server_info` report and what requests are validated against."""
        ...

    @property
    def load(self) -> EngineLoad:
        """Return what `/v1/loads` reports; `load.paused` decides `/ready`."""
        ...

    @property
    def groups(self) -> WeightGroups:
        """Return what takes weights from process groups."""
        ...

    async def run(self) -> None:
        """Serve submitted requests until cancelled. The HTTP server runs it in its task group, exactly once.

        Cancellation: requests in flight are finished as aborted.
        """
        ...

    def submit(self, request: EngineRequest, sink: Sink) -> None:
        """Accept a request, validated by the caller against `info`; while paused it is held.

        Raises:
            RequestRejected: for a duplicate rid, or what this engine cannot serve; the server answers 400.
        """
        ...

    def abort(self, rid: str = "", *, abort_all: bool = False, exact: bool = False) -> int:
        """End the requests whose id starts with `rid` (all, with `abort_all`) with their partial output.

        Args:
            rid: prefix of request ids, as at SGLang.
            abort_all: end every request.
            exact: only the request whose id is `rid`; what the server calls when a client disconnects.

        Returns:
            How many were ended; none is not an error. `rid` "" without `abort_all` ends none.
        """
        ...

    async def pause(self, mode: EnginePauseMode) -> None:
        """Stop sampling between two steps; requests that arrive are held.

        `abort` ends all requests with partial output; `retract` puts running ones back into the queue, to be prefilled
        anew; `in_place` keeps their KV. Returns once the engine stands still.

        Cancellation: the engine is paused or not, as before or after the call; never in between.
        """
        ...

    async def resume(self) -> None:
        """Continue after `pause`; without one, nothing happens.

        Cancellation: as for `pause`.
        """
        ...

    async def update_weights(
        self, model_path: str, *, weight_version: str | None, flush_cache: bool, abort_all_requests: bool
    ) -> ControlReply:
        """Load safetensors from `model_path`; the swap happens between two steps, entirely or not at all.

        Without a pause it waits until running requests have finished, or until a pause; new ones queue behind it.
        `weight_version` None keeps the version string.

        Cancellation: the weights are the former ones or all the new ones.
        """
        ...

    async def settled(self) -> None:
        """Return once the engine can say what it serves; what `/server_info` waits for.

        Cancellation: nothing is left behind.
        """
        ...

    async def set_weight_version(self, weight_version: str, *, abort_all_requests: bool) -> None:
        """Name the weights anew, without changing them; tokens sampled from now on carry the new name.

        Cancellation: as for `pause`.
        """
        ...

    async def flush_cache(self, timeout_s: float) -> bool:
        """Drop the prefix cache and return True; False when anything runs or is queued still after `timeout_s`.

        Requests retracted or held by a pause do not prevent it.

        Cancellation: the cache is dropped entirely or not at all.
        """
        ...

    def checksums(self) -> Mapping[str, str]:
        """Return `agentrl.weights.tensors.tensor_checksum` of every tensor now being served, by HF name."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without special tokens added.

        Raises:
            RequestRejected: when the engine has no tokenizer.
        """
        ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of `ids`; "" when the engine has no tokenizer."""
        ...
