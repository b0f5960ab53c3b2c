"""Control calls to one server: each has a deadline and a message that says who waited for what.

Invariant: a control call returns the server's answer, or raises a `ServerError` within `timeout_s`; a change of weights is
asked for only when the server is done with the one before, as two at once during a pause end SGLang's whole server.
"""

from __future__ import annotations

import orjson

from agentrl.concurrency import Deadline
from agentrl.errors import RequestRejected, WeightSyncError
from agentrl.inference.sglang.transport import Transport
from agentrl.inference.sglang.wire import Outcome, decode


class Control:
    """Control calls over a transport."""

    def __init__(self, transport: Transport, *, timeout_s: float) -> None:
        """Call by `transport`, with `timeout_s` seconds for each call."""
        self._transport = transport
        self.url = transport.url
        self.timeout_s = timeout_s
        self._unanswered = False
        """Whether a call about weights was given up before its answer came, so that the server may still be at it."""

    async def call(self, method: str, path: str, body: bytes | None, what: str) -> bytes:
        """Return the body of the reply; `what` was waited for.

        Raises:
            ServerError: refused, or no answer within the deadline.

        Cancellation: the connection is closed; the server may do what was asked.
        """
        with Deadline(self.timeout_s, lambda: f"{self.url}{path}: waited for {what}", self.url):
            return await self._transport.call(method, path, body)

    async def get(self, name: str, what: str) -> bytes:
        """GET an endpoint that servers before 0.5.21 know by another name; see `call`."""
        try:
            return await self.call("GET", f"/{name}", None, what)
        except RequestRejected as error:
            if error.status != 404:
                raise
        return await self.call("GET", f"/get_{name}", None, what)

    async def weights(self, path: str, body: object, what: str) -> None:
        """POST a call after which the server is to have done `what`, such as "join a group", and check that it has.

        A call that was given up before is waited out first.

        Raises:
            WeightSyncError: the server refused.
            ServerError: no answer.

        Cancellation: as for `call`.
        """
        if self._unanswered:
            await self._let_it_finish()
        self._unanswered = True
        try:
            outcome = decode(await self.call("POST", path, orjson.dumps(body), f"it to {what}"), Outcome, path, self.url)
        except RequestRejected as error:
            outcome = Outcome(success=False, message=str(error))
        self._unanswered = False
        if not outcome.success:
            raise WeightSyncError(f"{self.url}: did not {what}: {outcome.message}")

    async def _let_it_finish(self) -> None:
        # SGLang's workers take calls in the order they come, and these ask the workers. The first may overtake a call that
        # has not been read from its connection yet; after its answer, that call is at the workers, before the second.
        for _ in range(2):
            await self.get("server_info", "it to finish a change of weights that was given up")
