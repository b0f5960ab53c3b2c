"""A client of a server whose deadline a test sets only for the calls that shall miss it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from agentrl.inference.sglang.server import SGLangServer


class Impatient(SGLangServer):
    """Has the deadlines of any client, but for the control calls in a block."""

    @contextmanager
    def waiting_only(self, seconds: float) -> Generator[None]:
        """Give each control call in the block `seconds`."""
        patience, self._control.timeout_s = self._control.timeout_s, seconds
        try:
            yield
        finally:
            self._control.timeout_s = patience
