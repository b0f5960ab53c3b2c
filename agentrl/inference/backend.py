"""The interface between the client and a sampler of tokens: ids in; ids, log-probs and version spans out.

Invariant: a `Generation` has as many log-probs as ids, ids within the vocabulary, and contiguous version spans that cover
every id; an implementation that gets anything else raises `ReplyError`.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Protocol, TypeAlias, runtime_checkable

import msgspec
import numpy as np
import orjson

from agentrl.errors import TokenError
from agentrl.types import Float32Array, Int32Array, StopReason, VersionSpan
from agentrl.weights.types import Publication, WeightFeed

CONTEXT_RESERVE = 6
"""Tokens that a prompt must leave free at the end of the context, plus one: SGLang answers 400 to a longer prompt."""
CONTEXT_HEADROOM = CONTEXT_RESERVE + 2
"""Tokens by which a server's context exceeds the promised one; a server ends outputs 2 tokens before its own limit."""
SPARE_ROWS = 8
"""Most cache rows that an embedded server keeps for prefixes; running sequences have rows of their own."""

MIN_TEMPERATURE = 1e-6
MAX_TEMPERATURE = 100.0
"""Bounds of a sampling temperature beside 0: logits that are divided by another one are not finite, or all alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling of one completion; the names are SGLang's."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 means no limit."""
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    """Stop strings. The returned ids include the tokens that completed the string."""
    stop_token_ids: tuple[int, ...] = ()
    """Extra stop tokens, beside the model's own end-of-sequence tokens."""
    ignore_eos: bool = False
    seed: int | None = None
    """Per-request seed; None draws from the server's generator."""

    def truncation(self) -> dict[str, float] | None:
        """Return the settings that keep tokens from being sampled; None if there are none, or the call is greedy.

        Example:
            >>> SamplingParams(max_new_tokens=8, top_p=0.9, top_k=-1).truncation()
            {'top_p': 0.9}
        """
        found: dict[str, float] = {}
        if self.top_p < 1:
            found["top_p"] = self.top_p
        if self.top_k > 0:
            found["top_k"] = self.top_k
        if self.min_p > 0:
            found["min_p"] = self.min_p
        return found if found and self.temperature > 0 else None


def is_temperature(value: float) -> bool:
    """Return whether a model can sample at this temperature.

    Example:
        >>> [is_temperature(value) for value in (0, 0.7, 1e308, 1e-300, float("nan"))]
        [True, True, False, False, False]
    """
    return value == 0 or MIN_TEMPERATURE <= value <= MAX_TEMPERATURE


TEMPERATURE_RULE = f"0 (greedy) or {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}"
"""The rule of `is_temperature`, in words."""

INT32 = np.dtype(np.int32)


class Context(msgspec.Struct, frozen=True):
    """The token ids of a conversation, up to the place where the model writes.

    Example:
        >>> context = Context.of([5, 6, 7])
        >>> context.size, context.ids().tolist(), context.json
        (3, [5, 6, 7], (b'5,6,7',))
    """

    packed: tuple[bytes, ...]
    """The ids, int32, in pieces."""
    json: tuple[bytes, ...]
    """The ids as the JSON that is sent, in pieces."""
    size: int
    """Number of ids."""
    bound: int
    """Every id is below it: the size of the vocabulary, or less."""

    @classmethod
    def of(cls, ids: Sequence[int] | Int32Array) -> Context:
        """Return the context of these ids; a `TokenError` if one is no whole number, negative or not an int32."""
        array = np.asarray(ids)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise TokenError(f"a context is a list of token ids, got an array of {array.dtype} with shape {array.shape}")
        low, high = (int(array.min()), int(array.max())) if array.size else (0, -1)
        if low < 0 or high >= 2**31:
            raise TokenError(f"token ids must be in 0..{2**31 - 1}, got {low}..{high}")
        packed = array.astype(INT32).tobytes()
        return cls((packed,), (json_of(packed),), array.size, high + 1)

    def digest(self) -> bytes:
        """Return what tells this context from others."""
        digest = blake2b(digest_size=16)
        for piece in self.packed:
            digest.update(piece)
        return digest.digest()

    def ids(self) -> Int32Array:
        """Return all ids, [N] int32, read-only."""
        return np.frombuffer(b"".join(self.packed), INT32)


def json_of(packed: bytes) -> bytes:
    """Return packed int32 ids as JSON, without brackets."""
    return orjson.dumps(np.frombuffer(packed, INT32), option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A model call."""

    request_id: str
    """32 hex digits (uuid4): servers match aborted ids by prefix, so all ids must have the same length."""
    episode_id: str
    """The pool sends the requests of an episode to one server, whose prefix cache holds their history."""
    context: Context
    """All ids up to the place where the model writes."""
    sampling: SamplingParams

    @property
    def input_ids(self) -> Int32Array:
        """The ids of the context, [N] int32, read-only; each access joins the pieces."""
        return self.context.ids()


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The result of one model call."""

    output_ids: Int32Array
    """[T] int32, including the stop token if one was sampled."""
    output_logprobs: Float32Array
    """[T] float32, nats, of the temperature-scaled, untruncated distribution."""
    spans: tuple[VersionSpan, ...]
    """Policy versions of the output ids."""
    stop_reason: StopReason
    """STOP, LENGTH or ABORT."""
    matched_stop: int | str | None = None
    """The token id or string that stopped it."""
    cached_tokens: int = 0
    """Context tokens that were in the server's prefix cache."""
    num_retractions: int = 0
    """Number of times that a weight update or a lack of memory made the server recompute the request."""
    server: str = ""
    """URL of the server that sampled it; empty if the backend names none."""

    def first(self, count: int) -> Generation:
        """Return the first `count` ids as the result of a call that was given up; all of the result as it is."""
        if count >= len(self.output_ids):
            return self
        return replace(
            self,
            output_ids=self.output_ids[:count],
            output_logprobs=self.output_logprobs[:count],
            spans=tuple(span._replace(end=min(span.end, count)) for span in self.spans if span.start < count),
            stop_reason=StopReason.ABORT,
            matched_stop=None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationChunk:
    """A piece of a streamed call: only the new ids; the last chunk carries the whole `Generation`."""

    output_ids: Int32Array
    generation: Generation | None = None


class Backend(Protocol):
    """Samples tokens: one server, a pool of servers, or a script."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """Return the completion of `request`; a `ServerError` after the backend's own retries.

        Cancellation: the server aborts the request; its tokens are lost.
        """
        ...

    def stream(self, request: GenerateRequest) -> AbstractAsyncContextManager[AsyncIterator[GenerationChunk]]:
        """Yield the completion of `request` as it is sampled; leaving the block early aborts it at the server."""
        ...


@runtime_checkable
class GivesUp(Protocol):
    """A backend whose running calls can be ended early.

    A cancelled `anext` of its streams loses nothing: the next one goes on where that one was.
    """

    async def give_up(self, request_id: str) -> None:
        """Have a running call return the tokens that it has, with `StopReason.ABORT`; an unknown id is ignored.

        During a pause the call ends once the server continues.
        """
        ...


WeightSource: TypeAlias = Publication | WeightFeed
"""The source of the weights of one version: files, or the trainer's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """The measurements of a weight update."""

    version: int
    pause_s: float
    """Wall-clock seconds between the first pause and the last continue."""
    updated: tuple[str, ...]
    """Servers that run the new weights."""
    evicted: tuple[str, ...] = ()
    """Servers left out because they failed; they must catch up before they serve again."""
    pause_after_s: float = 0.0
    """Seconds from the beginning of the update to the first pause."""
    probe_difference: float | None = None
    """Largest absolute difference, nats, between a server's and the trainer's log-probs on the probe prompt."""
    num_bytes: int | None = None
    """Bytes sent to each server; None when servers read files."""
    trainer_digest: str = ""
    """Digest of the weights that the trainer published, after its kind: `agentrl:HEX`."""
    server_digests: Mapping[str, str] = field(default_factory=dict[str, str])
    """The same of the weights in each server that was updated, by its URL; the same where the kind is the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobTolerance:
    """How far log-probs of a server may be from the trainer's, nats; None: anything is allowed.

    Rounding of single tokens averages out: for n tokens `mean` and `tail` allow 1 + 4 / sqrt(n) times as much.
    """

    largest: float | None = None
    """Of each token."""
    mean: float | None = None
    tail: float | None = None
    """Of all tokens but one in a hundred."""

    def excess(self, differences: Float32Array) -> str | None:
        """Return which bound the absolute differences, `[n] float32`, exceed, and by how much; None: they keep all."""
        scale = 1 + 4 / math.sqrt(max(1, len(differences)))
        bounds = (
            ("at most", self.largest, 1.0, float(differences.max(initial=0))),
            ("on average", self.mean, scale, float(differences.mean()) if len(differences) else 0.0),
            ("at the 99th percentile", self.tail, scale, float(np.quantile(differences, 0.99)) if len(differences) else 0.0),
        )
        for where, bound, factor, value in bounds:
            if bound is not None and not value <= bound * factor:  # nan, too
                for_tokens = f" (tolerance {bound:g}, for {len(differences)} tokens)" if factor != 1 else ""
                return f"{value:.3g} nats {where}, over {bound * factor:.3g}{for_tokens}"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A fixed token sequence with the trainer's own log-probs under the weights being published."""

    token_ids: Int32Array
    """[L] int32, L >= 2."""
    logprobs: Float32Array
    """[L-1] float32, nats: entry t is the log-prob of token t+1 given tokens 0..t, temperature 1."""
    tolerance: LogprobTolerance = LogprobTolerance(largest=1e-3)


@runtime_checkable
class ServerSet(Protocol):
    """A backend of several servers, each of which can be asked by name and taken out."""

    @property
    def serving(self) -> Sequence[str]:
        """URLs of the servers that get calls."""
        ...

    async def sample(self, url: str, request: GenerateRequest) -> Generation:
        """Return the completion of `request` from one server."""
        ...

    def take_out(self, url: str, reason: str) -> None:
        """Stop using a server until its process is restarted; its calls in flight go to other servers."""
        ...


class Inference(Backend, Protocol):
    """A backend whose weights the engine can replace."""

    @property
    def policy_version(self) -> int:
        """The policy version of every serving server."""
        ...

    async def update_weights(self, source: WeightSource, probe: Probe | None = None) -> UpdateReport:
        """Pause every server, replace and verify its weights, and continue; running requests continue with the new weights.

        Raises:
            WeightSyncError: when no server, or by policy not every server, holds exactly the published weights.

        Cancellation: paused servers continue with the weights that they have.
        """
        ...
