"""One model call put together from the pieces a server returned, where it was interrupted and sent again.

Invariant: each id keeps the log-prob and the version it was sampled with; a token whose version is not known is thrown
away and sampled anew, never guessed. The joined pieces are distributed like one uninterrupted call.
"""

from __future__ import annotations

from dataclasses import replace
from uuid import uuid4

import numpy as np

from agentrl.errors import ReplyError, RequestRejected, ServerUnavailable
from agentrl.inference.backend import GenerateRequest, Generation
from agentrl.inference.sglang.wire import Reply, generate_body
from agentrl.types import Float32Array, Int32Array, StopReason, VersionSpan

_MAX_SERVER_ABORTS = 8
"""Aborts nobody here asked for, in one call, before it counts as failed."""
_NO_IDS, _NO_LOGPROBS = np.empty(0, np.int32), np.empty(0, np.float32)


class Assembly:
    """A call in progress: what has been sampled, and the body that asks for the rest."""

    def __init__(self, request: GenerateRequest, url: str) -> None:
        """Begin with nothing sampled.

        Args:
            request: the call.
            url: the server, for messages.
        """
        self.request = request
        self._url = url
        self.output_ids: Int32Array = _NO_IDS
        """The ids kept so far, [T] int32."""
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
        """Whether `generation` is complete."""
        return self._stop_reason is not None

    def body(self, *, stream: bool = False, cache_salt: str = "") -> tuple[str, bytes]:
        """Return the id and the body of the request for what is missing; the id is new for each piece."""
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

    def take(
        self, reply: Reply, pinned: int | None, *, expected: bool, caller_aborted: bool, streamed: bool = False
    ) -> None:
        """Add a piece; afterwards the call is `done`, or is to be sent again.

        Args:
            reply: the checked reply.
            pinned: version of all its tokens, where the server reports none.
            expected: the piece was aborted here, for a weight update.
            caller_aborted: the piece was aborted by the caller, who gets what there is.
            streamed: its tokens have been handed out and cannot be taken back.

        Raises:
            ReplyError: for an empty completion, more tokens than asked for, or a version that went back.
            RequestRejected, ServerUnavailable: when the abort says so, or after too many aborts.
        """
        count = len(reply.output_ids)
        if count > self.request.sampling.max_new_tokens - len(self.output_ids):
            raise self._broken(f"more tokens ({count}) than asked for")
        if reply.finish != "abort":
            if not count:
                raise self._broken(f"an empty completion (finish reason {reply.finish})")
            self._add(reply, pinned)
            self._stop_reason, self._matched = StopReason(reply.finish), reply.matched
            return
        self._check_abort(reply)
        labelled = reply.spans is not None or pinned is not None
        if streamed and count and not labelled:
            raise ServerUnavailable(f"{self._url}: aborted a stream without saying which weights sampled it", url=self._url)
        if labelled:
            self._add(reply, pinned)
        if caller_aborted:
            self._stop_reason = StopReason.ABORT
        elif len(self.output_ids) == self.request.sampling.max_new_tokens:
            self._stop_reason = StopReason.LENGTH
        elif not streamed and not self._continuable():
            self._forget()
        self._aborts += 1
        if not self.done and not expected and self._aborts > _MAX_SERVER_ABORTS:
            raise ServerUnavailable(
                f"{self._url}: the server aborted request {self.request.request_id} {self._aborts} times, at last with "
                f"{reply.message!r}; who else aborts or pauses this server?",
                url=self._url,
            )

    def abort(self) -> None:
        """End the call with what there is."""
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
        )

    def _continuable(self) -> bool:
        # A server looks for stop strings, and counts tokens for penalties, in the output of one request only.
        sampling = self.request.sampling
        return not sampling.stop and sampling.frequency_penalty == 0 and sampling.presence_penalty == 0

    def _add(self, reply: Reply, pinned: int | None) -> None:
        count, kept = len(reply.output_ids), len(self.output_ids)
        if not count:
            return
        spans = reply.spans
        if spans is None:
            if pinned is None:
                raise self._broken("no weight versions (weight_versions is missing)")
            spans = (VersionSpan(start=0, end=count, version=pinned),)
        last = self._spans[-1].version if self._spans else -1
        if spans[0].version < last:
            raise self._broken(f"version {spans[0].version} after version {last} in one call; was the server restarted?")
        for span in spans:
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

    def _check_abort(self, reply: Reply) -> None:
        status = reply.status_code
        if status is None:
            return
        message = f"{self._url}: HTTP {status} in the reply: {reply.message}"
        kind = RequestRejected if 400 <= status < 500 else ServerUnavailable
        raise kind(message, status=status, url=self._url)

    def _forget(self) -> None:
        self.output_ids, self._logprobs, self._spans = _NO_IDS, _NO_LOGPROBS, []

    def _broken(self, got: str) -> ReplyError:
        return ReplyError(f"{self._url}: request {self.request.request_id} got {got}", url=self._url)
