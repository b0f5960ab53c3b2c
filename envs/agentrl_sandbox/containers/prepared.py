"""File systems that are prepared once: the next workbench of the same task begins with what the first preparation left.

Invariant: a preparation that failed or took too long leaves nothing to the next one. Of several workbenches that
want the same one, the first prepares and the others wait for it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import anyio

from agentrl.errors import EnvironmentFault
from agentrl.support.concurrency import outside_work
from agentrl_sandbox.containers.kept_bytes import KeptBytes
from agentrl_sandbox.containers.protocol import MAX_STARTING, Workbench
from agentrl_sandbox.types import MIB

PREPARE_S: Final = 1800.0
"""Seconds that all commands of one preparation have together."""
KEPT_MB: Final = 1024


class PreparedLayers:
    """Keeps snapshots of prepared workbenches in memory, those that were used least recently not.

    Args:
        prepare_s: seconds that one preparation has.
        max_preparing: preparations at a time.
        kept_mb: of all snapshots together, in MiB; one that is larger is prepared each time.
    """

    def __init__(self, *, prepare_s: float = PREPARE_S, max_preparing: int = MAX_STARTING, kept_mb: int = KEPT_MB) -> None:
        self._prepare_s, self._kept = prepare_s, KeptBytes(kept_mb * MIB)
        self._preparing = anyio.Semaphore(max_preparing)
        self._turns: dict[str, anyio.Lock] = {}
        self.num_prepared = 0
        """Preparations that ran to their end."""

    async def begin(self, name: str, bench: Workbench, prepare: Callable[[Workbench], Awaitable[None]]) -> None:
        """Give a new workbench the layers that `prepare` makes.

        Args:
            name: of the preparation; the same name stands for the same layers.
            bench: without layers.
            prepare: what to do where there are none yet.

        Raises:
            EnvironmentFault: it took longer than a preparation may, or what `prepare` raises.
        """
        turn = self._turns.setdefault(name, anyio.Lock())
        with outside_work():
            async with turn:
                snapshot = self._kept.get(name)
                if snapshot is None:
                    await self._prepare(name, bench, prepare)
                    return
            await bench.restore(snapshot)

    async def _prepare(self, name: str, bench: Workbench, prepare: Callable[[Workbench], Awaitable[None]]) -> None:
        async with self._preparing:
            with anyio.move_on_after(self._prepare_s) as patience:
                await prepare(bench)
                self._kept.keep(name, await bench.snapshot())
            if patience.cancelled_caught:
                raise EnvironmentFault(
                    f"containers: the preparation of {name} took more than {self._prepare_s:g} s; put its result into an "
                    "image, or give it more (`prepare_s`)"
                )
            self.num_prepared += 1
