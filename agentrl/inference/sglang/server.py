"""One SGLang server, or one of agentrl's own that speaks the same protocol, reached over HTTP.

Invariant: after `load_weights` returns, every token the server samples carries the new version; a token's version is the
server's own word, or, for servers before 0.5.20, is pinned when the request is sent and the request is collected before
the weights change.

The guards against known ways to hang or mislead a server: request ids of one length, because aborts match by prefix;
nothing is aborted while paused, because the abort would be lost or dead-lock the server; nothing is sent while paused;
`/model_info` for liveness, because `/health` blocks while paused; weights are changed only while paused; the version
travels inside the update; the cache is flushed with `retract` only; every control call has a deadline.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Literal

import numpy as np
import orjson

from agentrl.concurrency import Deadline
from agentrl.errors import InvariantError, ReplyError, RequestRejected, WeightSyncError
from agentrl.inference.backend import GenerateRequest, Generation, GenerationChunk
from agentrl.inference.sglang.calls import Calls
from agentrl.inference.sglang.control import Control
from agentrl.inference.sglang.dialect import Dialect, dialect_of
from agentrl.inference.sglang.groups import GroupCalls, Receiver
from agentrl.inference.sglang.transport import Transport
from agentrl.inference.sglang.wire import (
    Checksums,
    Load,
    Loads,
    ModelInfo,
    ServerInfo,
    decode,
    parse_scores,
    parse_version,
    score_body,
)
from agentrl.types import Float32Array, Int32Array
from agentrl.weights.types import Publication


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
    ) -> None:
        """Remember where the server is; `connect` talks to it first.

        Ids sent and received are below `vocab_size`; the key is sent as a bearer token; `request_timeout_s` is the deadline
        of one model call, `control_timeout_s` that of one control call.
        """
        self._transport = Transport(url, api_key=api_key)
        self._control = Control(self._transport, timeout_s=control_timeout_s)
        self._calls = Calls(self._transport, vocab_size=vocab_size, timeout_s=request_timeout_s)
        self._dialect: Dialect | None = None
        self._info = ServerInfo(version="")
        self.groups: Receiver = GroupCalls(
            self._control, lambda: (self.dialect, self._info), flush=self._flush, has=self._has
        )
        """Its part in taking weights from the trainer's memory."""
        self._version = 0
        self._paused = False
        self._mode: Literal["retract", "in_place"] = "retract"

    async def __aenter__(self) -> SGLangServer:
        """Connect."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.aclose)
            await self.connect()
            stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close all connections."""
        await self.aclose()

    @property
    def url(self) -> str:
        """The base URL."""
        return self._transport.url

    @property
    def version(self) -> int:
        """The policy version the server last reported or was given."""
        return self._version

    @property
    def paused(self) -> bool:
        """Whether the server was paused from here, or may have been."""
        return self._paused

    @property
    def in_flight(self) -> int:
        """Requests at the server."""
        return self._calls.in_flight

    @property
    def dialect(self) -> Dialect:
        """What the server understands.

        Raises:
            InvariantError: before `connect`.
        """
        if self._dialect is None:
            raise InvariantError(f"{self.url}: connect() comes first; it asks the server for its version")
        return self._dialect

    @property
    def checksum_kind(self) -> str:
        """`agentrl`: `checksums` are those of a `Publication`. Anything else: comparable with the same kind only."""
        return "agentrl" if self.dialect.exact_checksums else f"{self.dialect.engine} {self.dialect.version}"

    @property
    def max_context_tokens(self) -> int | None:
        """Longest context plus output that a call is sure to get; None from servers that do not tell."""
        return self._info.max_context_tokens

    async def connect(self) -> None:
        """Ask the server for its dialect and the version of its weights; again when it was restarted.

        Raises:
            ServerError: refused, no answer within the control deadline, or an answer that is not SGLang's.

        Cancellation: as before the call.
        """
        body = await self._control.get("server_info", "its version")
        info = self._info = decode(body, ServerInfo, "/server_info", self.url)
        if info.incremental_streaming_output:
            raise ReplyError(f"{self.url}: start it without --incremental-streaming-output; streams must be cumulative")
        self._dialect = dialect_of(info.version, info.engine, self.url)
        self._version = await self.check()
        self._calls.pin = None if self._dialect.spans else self._version

    async def aclose(self) -> None:
        """Close all connections; calls in flight end with `ServerUnavailable`. Cancellation: closed all the same."""
        await self._transport.aclose()

    async def generate(self, request: GenerateRequest) -> Generation:
        """Return the completion of `request`.

        A request that the server aborted for reasons of its own is sent again with what it has sampled, within the deadline.

        Raises:
            ServerUnavailable: the server refused, reset or died.
            ServerTimeout: no answer within the deadline, waiting for a pause to end included.
            RequestRejected: an id outside the vocabulary (nothing is sent then), or HTTP 4xx.
            ReplyError: the reply breaks the protocol.

        Cancellation: the request is aborted at the server; while it is paused, once it goes on.
        """
        return await self._calls.generate(request)

    def stream(self, request: GenerateRequest) -> AbstractAsyncContextManager[AsyncIterator[GenerationChunk]]:
        """Yield the completion of `request` as it is sampled; errors as for `generate`.

        Cancellation: as for `generate`, also when the block is left early.
        """
        return self._calls.stream(request)

    async def abort(self, request_id: str) -> None:
        """End a call: its `generate` returns what was sampled, with `StopReason.ABORT`. An unknown id is ignored.

        Raises:
            ServerError: when the server cannot be told.

        Cancellation: the server has been told or not.
        """
        with Deadline(self._control.timeout_s, lambda: f"{self.url}: waited for /abort_request of {request_id}", self.url):
            await self._calls.abort(request_id)

    async def check(self) -> int:
        """Return the policy version of the server's weights, from `/model_info`, which answers while paused too.

        Raises:
            ServerError: refused, no answer within the control deadline, or no policy version.

        Cancellation: nothing is left behind.
        """
        info = decode(await self._control.get("model_info", "a sign of life"), ModelInfo, "/model_info", self.url)
        if info.weight_version is None:  # servers that do not count: the version given last
            return self._version
        return parse_version(info.weight_version, self.url)

    async def loads(self) -> tuple[Load, ...]:
        """Return how busy the server is, one entry for each of its ranks.

        Raises:
            ServerError: as for `check`; HTTP 404 from servers older than 0.5.21.

        Cancellation: nothing is left behind.
        """
        body = await self._control.call("GET", "/v1/loads", None, "its load")
        return tuple(decode(body, Loads, "/v1/loads", self.url).loads)

    async def pause(self, mode: Literal["retract", "in_place"]) -> None:
        """Stop sampling; calls in flight stay open, new ones are held here until `resume`.

        On servers that report no versions the calls in flight are aborted and collected first, to go on after `resume`.

        Raises:
            ServerError: the server may be paused or not; `resume` it.

        Cancellation: as after an error.
        """
        dialect = self.dialect
        self._calls.close_gate()
        self._paused, self._mode = True, mode
        if not dialect.spans:
            await self._calls.interrupt(min(10.0, self._control.timeout_s / 2))
        body = orjson.dumps({"mode": mode} if dialect.pause_modes else {})
        await self._control.call("POST", "/pause_generation", body, f"the pause ({mode})")

    async def resume(self) -> None:
        """Continue sampling and let held calls go. Does nothing to a server that is not paused.

        Raises:
            ServerError: the server may still be paused; calls are sent to it all the same.

        Cancellation: as after an error.
        """
        try:
            await self._control.call("POST", "/continue_generation", b"{}", "the end of the pause")
            self._paused = False
        finally:
            self._calls.open_gate()
        await self._calls.abort_held()

    async def load_weights(self, publication: Publication) -> None:
        """Load published weights from disk and check that the server reports their version. `pause` comes first.

        Raises:
            WeightSyncError: the server refused, or reports another version. It may have either weights.
            ServerError: no answer; it may have either weights.

        Cancellation: it may have either weights.
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
        """Return whether new weights come with a flush of the cache; `pause` must have been called."""
        if not self._paused:
            raise InvariantError(f"{self.url}: weights may only change while paused; call pause() before they do")
        return self._mode == "retract"

    async def _has(self, version: int, unique: str, *, flush: bool) -> None:
        """Take note of new weights; `unique` tells them from others of the same version."""
        self._version = version
        self._calls.pin = None if self.dialect.spans else version
        # In place, cached prefixes of earlier versions stay; the salt keeps new requests from using them.
        self._calls.cache_salt = "" if flush else f"v{version}-{unique}"
        reported = await self.check()
        if reported != version:
            raise WeightSyncError(f"{self.url}: took weights of version {version} but reports version {reported}")

    async def checksums(self) -> Mapping[str, str] | None:
        """Return the digest of each tensor being served; None from servers that cannot tell.

        With several ranks, names carry the rank. See `checksum_kind` for what they can be compared with.

        Raises:
            ServerError: no answer, or one that breaks the protocol.

        Cancellation: nothing is left behind.
        """
        try:
            body = await self._control.call("POST", "/weights_checker", b'{"action":"checksum"}', "checksums of its weights")
        except RequestRejected as error:
            if error.status == 404:
                return None
            raise
        ranks = decode(body, Checksums, "/weights_checker", self.url).ranks
        if len(ranks) == 1:
            return ranks[0].checksums
        return {f"{rank}:{name}": digest for rank, entry in enumerate(ranks) for name, digest in entry.checksums.items()}

    async def score(self, token_ids: Int32Array) -> Float32Array:
        """Return the log-probs of `token_ids[1:]` given what stands before them, [L-1] float32, nats, temperature 1.

        Raises:
            ServerError: no answer within the control deadline, or one that breaks the protocol.

        Cancellation: nothing is left behind.
        """
        body = score_body(np.asarray(token_ids, np.int32))
        reply = await self._control.call("POST", "/generate", body, f"log-probs of a probe of {len(token_ids)} tokens")
        return parse_scores(reply, token_ids, self.url)
