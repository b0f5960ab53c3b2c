"""File systems that are prepared once: the next workbench of the same task begins with what the first preparation left.

Invariant: a preparation that failed or took too long leaves nothing to the next one. Of several workbenches that
want the same one, the first prepares and the others wait for it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

import anyio
import anyio.to_thread
import msgspec

from agentrl.errors import EnvironmentFault
from agentrl.support.concurrency import outside_work
from agentrl_sandbox.containers.kept_bytes import KeptBytes
from agentrl_sandbox.containers.layer_archive import snapshot_layers
from agentrl_sandbox.containers.protocol import MAX_STARTING, Workbench
from agentrl_sandbox.types import MIB

PREPARE_S: Final = 1800.0
"""Seconds that all commands of one preparation have together."""
KEPT_MB: Final = 1024


class Begun(NamedTuple):
    """What `PreparedLayers.begin` has done."""

    num_layers: int
    """That the workbench has now."""
    prepared_s: float
    """Seconds that it took to prepare them; 0: they were there."""


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

    async def begin(
        self,
        name: str,
        bench: Workbench,
        prepare: Callable[[Workbench], Awaitable[None]],
        *,
        begun: Begun | None = None,
        label: str | None = None,
    ) -> Begun:
        """Give a workbench the layers that `prepare` makes, over those that it has.

        Args:
            name: of the preparation; the same name stands for the same layers over the same ones.
            bench: without layers, unless `begun` says which it has.
            prepare: what to do where there are none yet.
            begun: what this did for the layers below; the seconds of both count together.
            label: what messages call it; None: its name.

        Raises:
            EnvironmentFault: it took longer than a preparation may, or what `prepare` raises.
        """
        begun = begun or Begun(0, 0.0)
        turn = self._turns.setdefault(name, anyio.Lock())
        with outside_work():
            async with turn:
                snapshot = self._kept.get(name)
                if snapshot is None:
                    return await self._prepare(name, bench, prepare, begun, label or name)
            await bench.restore(snapshot)
            added = len(await anyio.to_thread.run_sync(snapshot_layers, snapshot))
            return begun._replace(num_layers=begun.num_layers + added)

    async def _prepare(
        self, name: str, bench: Workbench, prepare: Callable[[Workbench], Awaitable[None]], begun: Begun, label: str
    ) -> Begun:
        async with self._preparing:
            begin, num_layers = anyio.current_time(), begun.num_layers
            with anyio.move_on_after(self._prepare_s - begun.prepared_s) as patience:
                await prepare(bench)
                layers = await anyio.to_thread.run_sync(snapshot_layers, await bench.snapshot())
                self._kept.keep(name, msgspec.msgpack.encode(layers[begun.num_layers :]))
                num_layers = len(layers)
            if patience.cancelled_caught:
                raise EnvironmentFault(
                    f"containers: the preparation of {label} took more than {self._prepare_s:g} s; put its result into an "
                    "image, or give it more (`prepare_s`)"
                )
            self.num_prepared += 1
            return Begun(num_layers, begun.prepared_s + anyio.current_time() - begin)
