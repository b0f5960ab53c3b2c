"""A model call, assembled from the pieces that a server returns when it aborts the call and gets it again.

Invariant: each id keeps the log-prob and the version it was sampled with. The joined pieces have the distribution of one
uninterrupted call.
"""

from __future__ import annotations

from dataclasses import replace
from uuid import uuid4

import numpy as np

from agentrl.errors import ReplyError, RequestRejected, ServerUnavailable
from agentrl.inference.backend import GenerateRequest, Generation
from agentrl.inference.sglang.wire import GenerateReply, generate_body
from agentrl.types import Float32Array, Int32Array, StopReason, VersionSpan

_MAX_SERVER_ABORTS = 8
"""Aborts in one call that agentrl did not ask for, before the call fails."""
_NO_IDS, _NO_LOGPROBS = np.empty(0, np.int32), np.empty(0, np.float32)


class Assembly:
    """A call in progress: the tokens sampled so far, and the body that asks for the rest."""

    def __init__(self, request: GenerateRequest, url: str) -> None:
        self.request = request
        self._url = url
        self.output_ids: Int32Array = _NO_IDS
        """The ids kept so far, `[T] int32`."""
        self._logprobs: Float32Array = _NO_LOGPROBS
        self._spans: list[VersionSpan] = []
        self._cached = 0
        self._retractions = 0
        self._aborts = 0
        self._sent = False
        self._stop_reason: StopReason | None = None
        self._matched: int | str | None = None

    @property
    def done(self) -> bool:
        return self._stop_reason is not None

    def body(self, *, stream: bool = False, cache_salt: str = "") -> tuple[str, bytes]:
        """Return the id and the body of the request for the missing tokens; each piece has a new id."""
        request, sampling = self.request, self.request.sampling
        rid, ids_json = request.request_id, request.context.json
        if self._sent:
            rid = uuid4().hex  # SGLang aborts the id of a streamed reply once more, 2 s after its end
        self._sent = True
        kept = len(self.output_ids)
        if kept:
            sampled = ",".join(map(str, self.output_ids.tolist()))
            ids_json = (*ids_json, b",", sampled.encode())
            # The same seed would draw the noise of the first piece again. Servers take 63 bits and a sign.
            seed = sampling.seed
            sampling = sampling if seed is None else replace(sampling, seed=(seed + kept + 2**63) % 2**64 - 2**63)
        limit = sampling.max_new_tokens - kept
        return rid, generate_body(sampling, rid=rid, ids_json=ids_json, limit=limit, stream=stream, cache_salt=cache_salt)

    def take(self, reply: GenerateReply, *, caller_aborted: bool, streamed: bool = False) -> None:
        """Add a checked reply as a piece; afterwards the call is `done`, or must be sent again.

        `caller_aborted`: the caller gets the tokens there are. `streamed`: it has them, so they cannot be sampled again.

        Raises:
            ReplyError: the piece has more tokens than asked for.
            ServerUnavailable: the piece has a version below that of the piece before, so it is from a restarted server; or
                there were too many aborts.
            RequestRejected, ServerUnavailable: the abort carries that HTTP status.
        """
        limit = self.request.sampling.max_new_tokens
        if len(reply.output_ids) > limit - len(self.output_ids):
            raise self._broken(f"more tokens ({len(reply.output_ids)}) than asked for")
        if reply.finish != "abort":
            self._add(reply)
            self._stop_reason, self._matched = StopReason(reply.finish), reply.matched
            return
        if (status := reply.status_code) is not None:
            kind = RequestRejected if 400 <= status < 500 else ServerUnavailable
            raise kind(f"{self._url}: HTTP {status} in the reply: {reply.message}", status=status, url=self._url)
        self._add(reply)
        if caller_aborted:
            self._stop_reason = StopReason.ABORT
        elif len(self.output_ids) == limit:
            self._stop_reason = StopReason.LENGTH
        elif not streamed and not self._continuable():
            self.output_ids, self._logprobs, self._spans = _NO_IDS, _NO_LOGPROBS, []
        self._aborts += 1
        if not self.done and self._aborts > _MAX_SERVER_ABORTS:
            raise ServerUnavailable(
                f"{self._url}: the server aborted request {self.request.request_id} {self._aborts} times, at last with "
                f"{reply.message!r}; does another program abort or pause this server?",
                url=self._url,
            )

    def abort(self) -> None:
        self._stop_reason = StopReason.ABORT

    def generation(self) -> Generation:
        """Return the whole call; `done` must hold."""
        assert self._stop_reason is not None
        return Generation(
            output_ids=self.output_ids,
            output_logprobs=self._logprobs,
            spans=tuple(self._spans),
            stop_reason=self._stop_reason,
            matched_stop=self._matched,
            cached_tokens=self._cached,
            num_retractions=self._retractions,
            server=self._url,
        )

    def _continuable(self) -> bool:
        # A server finds stop strings, and counts tokens for penalties, in the output of one request only.
        sampling = self.request.sampling
        return not sampling.stop and sampling.frequency_penalty == 0 and sampling.presence_penalty == 0

    def _add(self, reply: GenerateReply) -> None:
        if not reply.spans:
            return
        kept = len(self.output_ids)
        last = self._spans[-1].version if self._spans else -1
        if reply.spans[0].version < last:
            version = reply.spans[0].version
            raise ServerUnavailable(
                f"{self._url}: request {self.request.request_id} got version {version} after version {last} in one call; "
                "was the server restarted?",
                url=self._url,
            )
        for span in reply.spans:
            start, end = span.start + kept, span.end + kept
            if self._spans and self._spans[-1].version == span.version:
                start = self._spans.pop().start
            self._spans.append(VersionSpan(start=start, end=end, version=span.version))
        if kept:
            self.output_ids = np.concatenate([self.output_ids, reply.output_ids])
            self._logprobs = np.concatenate([self._logprobs, reply.output_logprobs])
        else:
            self.output_ids, self._logprobs, self._cached = reply.output_ids, reply.output_logprobs, reply.cached_tokens
        self._retractions += reply.num_retractions

    def _broken(self, got: str) -> ReplyError:
        return ReplyError(f"{self._url}: request {self.request.request_id} got {got}", url=self._url)
