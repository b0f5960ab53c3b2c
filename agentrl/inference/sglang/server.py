"""One SGLang server, or one of agentrl's own with the same protocol, reached over HTTP.

Invariant: after `load_weights` returns, every token that the server samples carries the new version. The version of a token
is the one that the server reports for it. From the trainer's memory it receives exactly the tensors of the manifest, in
their order, and only the last bucket carries the version.

Guards against known ways to hang or mislead a server: request ids have one length, because aborts match by prefix; nothing
is sent or aborted during a pause, because an abort would be lost or deadlock the server; liveness is asked of `/model_info`,
because `/health` blocks during a pause; weights change only during a pause; the version travels inside the update; only
`retract` flushes the cache; every control call has a deadline.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from typing import Literal, Protocol
from uuid import uuid4

import numpy as np
import orjson

from agentrl.errors import ConfigError, InvariantError, ReplyError, ServerError, WeightSyncError
from agentrl.inference.sglang.calls import ServerCalls
from agentrl.inference.sglang.named_adapters import AdapterCalls, AdapterReceiver
from agentrl.inference.sglang.transport import Control, Transport
from agentrl.inference.sglang.wire import (
    Checksums,
    Load,
    Loads,
    ModelInfo,
    ServerInfo,
    check_sglang_version,
    decode,
    parse_scores,
    parse_version,
    score_body,
)
from agentrl.support.concurrency import Deadline
from agentrl.types import Float32Array, Int32Array
from agentrl.weights.types import Bucket, GroupAddress, GroupRequest, Manifest, Publication

logger = logging.getLogger(__name__)
_NO_SESSIONS = (
    "runs without sessions, so it may evict the caches of running episodes before those of ended ones; start SGLang "
    "0.5.23 or newer with --enable-session-radix-cache"
)


class Receiver(Protocol):
    """The part of a server that takes weights from the trainer's memory, as the pool uses it."""

    def request(self) -> GroupRequest:
        """Return the group that the trainer must open; `ConfigError` when the server cannot take weights this way."""
        ...

    async def join(self, address: GroupAddress) -> None:
        """Join a group."""
        ...

    async def leave(self, name: str) -> None:
        """Forget a group, if the server knows it."""
        ...

    async def receive(self, manifest: Manifest, group: str) -> None:
        """Take weights during a pause, and check the version that the server then reports."""
        ...


class HasWeights(Protocol):
    """Records the weights that a server has."""

    def __call__(self, version: int, unique: str, *, flush: bool) -> Awaitable[None]: ...


class GroupCalls:
    """The calls to one server over HTTP; a `Receiver`."""

    def __init__(
        self, control: Control, info: Callable[[], ServerInfo], *, flush: Callable[[], bool], has: HasWeights
    ) -> None:
        self._control, self._info, self._flush, self._has = control, info, flush, has

    def request(self) -> GroupRequest:
        info, url = self._info(), self._control.url
        if info.dp_size != 1 or info.pp_size != 1:
            raise ConfigError(
                f"sync.method: SGLang joins groups with tensor parallelism only, {url} runs with --dp-size {info.dp_size} "
                f"--pp-size {info.pp_size}; launch more servers instead, or set sync: disk"
            )
        nccl = info.engine == "sglang" and (info.device or "").startswith("cuda")
        return GroupRequest(f"agentrl-{uuid4().hex}", info.tp_size, nccl, flat=True)

    async def join(self, address: GroupAddress) -> None:
        body = {
            "master_address": address.host,
            "master_port": address.port,
            "rank_offset": 1,
            "world_size": address.world_size,
            "group_name": address.name,
            "backend": address.backend,
        }
        await self._control.weights(
            "/init_weights_update_group", body, f"join the trainer's group at {address.host}:{address.port}"
        )

    async def leave(self, name: str) -> None:
        with suppress(WeightSyncError):  # restarted since: the server does not know the group
            await self._control.weights("/destroy_weights_update_group", {"group_name": name}, "leave a group")

    async def receive(self, manifest: Manifest, group: str) -> None:
        """Have the server take every bucket, and name the result by the manifest's version. `pause` comes first.

        One deadline covers all buckets, because the other servers stand still meanwhile.

        Raises:
            WeightSyncError, ServerError: the server refused, was late or reports another version; it may have any part.
        """
        flush, control = self._flush(), self._control
        message = f"{control.url}: agentrl waited for the server to take all weights"
        with Deadline(control.timeout_s, lambda: message, control.url):
            await self._take(manifest, group, flush=flush)
        await self._has(manifest.version, group, flush=flush)

    async def _take(self, manifest: Manifest, group: str, *, flush: bool) -> None:
        await self._begin()
        for number, bucket in enumerate(manifest.buckets, start=1):
            body = _bucket_body(bucket, group)
            if number == len(manifest.buckets):
                body |= {"weight_version": str(manifest.version), "flush_cache": flush}
            what = f"take bucket {number} of {len(manifest.buckets)} of version {manifest.version}"
            await self._control.weights("/update_weights_from_distributed", body, what)
        await self._control.weights("/end_weight_update", {}, "end the update")

    async def _begin(self) -> None:
        try:
            await self._control.weights("/begin_weight_update", {}, "begin an update")
        except WeightSyncError:
            # An interrupted update left its session open. This update overwrites everything that one changed.
            await self._control.weights("/end_weight_update", {}, "end an interrupted update")
            await self._control.weights("/begin_weight_update", {}, "begin an update")


def _bucket_body(bucket: Bucket, group: str) -> dict[str, object]:
    return {
        "names": [spec.name for spec in bucket],
        "dtypes": [spec.dtype for spec in bucket],
        "shapes": [spec.shape for spec in bucket],
        "group_name": group,
        "flush_cache": False,
        "abort_all_requests": False,
        "load_format": "flattened_bucket",
    }


class SGLangServer:
    """A client of one server; implements `Backend` and the pool's `Server`. Needs the asyncio event loop.

    Example:
        async with SGLangServer("http://127.0.0.1:30000", vocab_size=151936) as server:
            generation = await server.generate(request)
    """

    def __init__(
        self,
        url: str,
        *,
        vocab_size: int,
        api_key: str | None = None,
        request_timeout_s: float = 600.0,
        control_timeout_s: float = 60.0,
        max_adapter_lag: int | None = None,
    ) -> None:
        """Remember the server's address; `connect` makes the first request. Each deadline bounds one call.

        `max_adapter_lag`: versions that the LoRA adapter of a running call may be behind the newest; None: any number.
        """
        self._transport = Transport(url, api_key=api_key)
        self._control = Control(self._transport, timeout_s=control_timeout_s)
        self._calls = ServerCalls(self._transport, vocab_size=vocab_size, timeout_s=request_timeout_s)
        self.generate = self._calls.generate
        """Return the completion of a request; raises as `ServerCalls.generate`."""
        self.stream = self._calls.stream
        """Yield the completion of a request as it is sampled; raises as `ServerCalls.stream`."""
        self._info: ServerInfo | None = None
        self.groups: Receiver = GroupCalls(self._control, lambda: self.info, flush=self._flush, has=self._has)
        """Its part in taking weights from the trainer's memory."""
        self._adapters: AdapterCalls | None = None
        self._max_adapter_lag = max_adapter_lag
        self._version = 0
        self._paused = False
        self._mode: Literal["retract", "in_place"] = "retract"

    async def __aenter__(self) -> SGLangServer:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.aclose)
            await self.connect()
            stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @property
    def url(self) -> str:
        return self._transport.url

    @property
    def version(self) -> int:
        return self._version

    @property
    def paused(self) -> bool:
        return self._paused

    @property
    def in_flight(self) -> int:
        return self._calls.in_flight

    @property
    def adapters(self) -> AdapterReceiver:
        """Its part in taking LoRA adapters, made for the first one."""
        if self._adapters is None:
            self._adapters = AdapterCalls(self._control, lambda: self.info, self._calls, max_lag=self._max_adapter_lag)
        return self._adapters

    @property
    def info(self) -> ServerInfo:
        """The server's own description of itself, from `connect`."""
        if self._info is None:
            raise InvariantError(f"{self.url}: connect() comes first; it asks the server for its version")
        return self._info

    @property
    def checksum_kind(self) -> str:
        return self.info.checksum_kind

    @property
    def dtype(self) -> str:
        return self.info.dtype

    @property
    def max_context_tokens(self) -> int | None:
        return None if self._info is None else self._info.max_context_tokens

    async def connect(self) -> None:
        """Ask the server for its description and the version of its weights; ask again after a restart."""
        body = await self._control.call("GET", "/server_info", None, "the server's version")
        info = decode(body, ServerInfo, "/server_info", self.url)
        if info.incremental_streaming_output:
            raise ReplyError(
                f"{self.url}: expected streams that repeat all ids so far, got --incremental-streaming-output; "
                "start the server without it",
                url=self.url,
            )
        if info.engine == "sglang":
            check_sglang_version(info.version, self.url)
        version = await self.check()
        self._info, self._version = info, version
        if not info.enable_session_radix_cache and info.engine == "sglang" and self._calls.sessions.supported is None:
            logger.warning("%s %s", self.url, _NO_SESSIONS)
        self._calls.sessions.supported = info.enable_session_radix_cache

    async def aclose(self) -> None:
        """Close all connections, also when cancelled; calls in flight end with `ServerUnavailable`."""
        await self._transport.aclose()

    async def abort(self, request_id: str) -> None:
        what = f"{self.url}: agentrl waited for /abort_request of {request_id}"
        with Deadline(self._control.timeout_s, lambda: what, self.url):
            await self._calls.abort(request_id)

    async def give_up(self, request_id: str) -> None:
        """Have a call return the tokens it has, with `StopReason.ABORT`; during a pause, once the server continues."""
        with suppress(ServerError):  # its call fails by itself
            await self._calls.give_up(request_id)

    async def end_session(self, episode_id: str) -> None:
        """Tell the server that an episode has ended; the server may then evict the episode's cache."""
        session = self._calls.sessions.of(episode_id)
        if session:
            body = orjson.dumps({"session_id": session})
            await self._control.call("POST", "/close_session", body, f"the end of the session of episode {episode_id}")

    async def check(self) -> int:
        """Return the policy version that calls are computed with, from `/model_info`, which answers during a pause too."""
        body = await self._control.call("GET", "/model_info", None, "a sign of life")
        reported = parse_version(decode(body, ModelInfo, "/model_info", self.url).weight_version, self.url)
        return reported if self._adapters is None else await self._adapters.current_version(reported)

    async def loads(self) -> tuple[Load, ...]:
        """Return how busy the server is, one entry for each of its ranks."""
        body = await self._control.call("GET", "/v1/loads", None, "the server's load")
        return tuple(decode(body, Loads, "/v1/loads", self.url).loads)

    async def pause(self, mode: Literal["retract", "in_place"]) -> None:
        """Stop sampling; calls in flight stay open, and new ones are held back here until `resume`.

        After a `ServerError` the server may be paused or not; `resume` it.
        """
        self._calls.close_gate()
        self._paused, self._mode = True, mode
        await self._control.call("POST", "/pause_generation", orjson.dumps({"mode": mode}), f"the pause ({mode})")

    async def resume(self) -> None:
        """Continue sampling and let held calls go; the server need not be paused.

        After a `ServerError` the server may still be paused; calls are sent to it all the same.
        """
        try:
            await self._control.call("POST", "/continue_generation", b"{}", "the end of the pause")
            self._paused = False
        finally:
            self._calls.open_gate()
        await self._calls.abort_held()

    async def load_weights(self, publication: Publication) -> None:
        """Load published weights from disk and check that the server reports their version. `pause` comes first.

        After a `WeightSyncError` or a `ServerError` the server may have the old or the new weights.
        """
        flush = self._flush()
        update = {
            "model_path": publication.path,
            "weight_version": str(publication.version),
            "flush_cache": flush,
            "abort_all_requests": False,
        }
        what = f"load weights of version {publication.version} from {publication.path}"
        await self._control.weights("/update_weights_from_disk", update, what)
        await self._has(publication.version, publication.checksum, flush=flush)

    def _flush(self) -> bool:
        """Return whether new weights come with a flush of the cache; the server must be paused."""
        if not self._paused:
            raise InvariantError(f"{self.url}: weights may change only during a pause; call pause() before they do")
        return self._mode == "retract"

    async def _has(self, version: int, unique: str, *, flush: bool) -> None:
        """Record new weights and check the reported version; `unique` tells them from others of the same version."""
        self._version = version
        # In place, cached prefixes of earlier versions stay; the salt keeps new requests from using them.
        self._calls.cache_salt = "" if flush else f"v{version}-{unique}"
        reported = await self.check()
        if reported != version:
            raise WeightSyncError(f"{self.url}: the server took weights of version {version} but reports version {reported}")

    async def checksums(self) -> Mapping[str, str]:
        """Return the digest, of `checksum_kind`, of each tensor; with several ranks, names carry the rank."""
        body = await self._control.call("POST", "/weights_checker", b'{"action":"checksum"}', "checksums of its weights")
        ranks = decode(body, Checksums, "/weights_checker", self.url).ranks
        if len(ranks) == 1:
            return ranks[0].checksums
        return {f"{rank}:{name}": digest for rank, entry in enumerate(ranks) for name, digest in entry.checksums.items()}

    async def score(self, token_ids: Int32Array) -> Float32Array:
        """Return the log-probs of `token_ids[1:]`, each given the ids before it, `[L-1] float32`, nats, temperature 1."""
        adapters = self._calls.adapters
        name = "" if adapters is None or adapters.served is None else adapters.served.name
        body = score_body(np.asarray(token_ids, np.int32), name)
        reply = await self._control.call("POST", "/generate", body, f"log-probs of a probe of {len(token_ids)} tokens")
        return parse_scores(reply, token_ids, self.url)
