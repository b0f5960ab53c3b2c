"""The LoRA adapter that calls at one server name, and how many pieces in flight have each adapter.

Invariant: a piece keeps the adapter that it was sent with. Who waits for whom: `until_unused` waits for the end of pieces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

import anyio

from agentrl.errors import RequestRejected, ServerError, ServerUnavailable
from agentrl.inference.sglang.wire import GenerateReply
from agentrl.types import VersionSpan


class NamedAdapter(NamedTuple):
    """A LoRA adapter that calls name."""

    name: str
    version: int
    base: int
    """Version of the weights below it, which the server reports for every token."""

    def labelled(self, reply: GenerateReply, url: str) -> GenerateReply:
        """Return `reply` with the version of the adapter; the server reports the version of the base weights."""
        if others := {span.version for span in reply.spans} - {self.base}:
            raise ServerUnavailable(
                f"{url}: answered with weights of version {min(others)} below the adapter {self.name}, which was loaded on "
                f"version {self.base}; does another program update this server?",
                url=url,
            )
        if not len(reply.output_ids):
            return reply
        return reply._replace(spans=(VersionSpan(start=0, end=len(reply.output_ids), version=self.version),))

    def lost(self, error: RequestRejected) -> ServerError:
        """Return the error of a call whose server lost this adapter, as by a restart: it is sent again; else `error`."""
        if self.name not in str(error):
            return error
        return ServerUnavailable(f"{error}; was the server restarted?", status=error.status, url=error.url)


class AdapterUses:
    """The adapters of one server's calls."""

    def __init__(self) -> None:
        self.served: NamedAdapter | None = None
        """Named by every piece that is sent from now on; None: the weights alone."""
        self._pieces: Counter[str] = Counter()
        self._changed = anyio.Event()

    @property
    def names(self) -> Collection[str]:
        """Names of the adapters that pieces in flight have."""
        return self._pieces.keys()

    def begin(self) -> NamedAdapter | None:
        """Return the adapter of a piece that is sent now; `end` must follow where there is one."""
        if self.served is not None:
            self._pieces[self.served.name] += 1
        return self.served

    def end(self, adapter: NamedAdapter) -> None:
        self._pieces[adapter.name] -= 1
        if not self._pieces[adapter.name]:
            del self._pieces[adapter.name]
            changed, self._changed = self._changed, anyio.Event()
            changed.set()

    async def until_unused(self, name: str) -> None:
        """Return when no piece in flight has the adapter; the caller sets the deadline."""
        while name in self._pieces:
            await self._changed.wait()
