"""Replacing the weights: reading them, waiting for a moment at which they may be swapped, swapping them.

Invariant: the weights of a step are all of one version; an update that is refused changes nothing (but for
`Hazard.APPLIED_REFUSAL`), and one that is applied changes weights and label together. Who waits for whom: an update that
finds the server running waits for the requests that run to end, or for a pause; an update waits for the one before (but for
`Hazard.UPDATE_COLLISION`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Final

import anyio
import anyio.from_thread
import anyio.to_thread

from agentrl.errors import ConfigError
from agentrl.inference.embedded.aborting import Aborts
from agentrl.inference.embedded.core import Core
from agentrl.inference.embedded.gate import Gate
from agentrl.inference.embedded.hazards import Hazard
from agentrl.inference.embedded.weights import Weights
from agentrl.inference.engine import ControlReply

_UPDATED: Final = "Succeeded to update model weights."


class Updates:
    """The weights being served, and how they change.

    Args:
        core: computes with them.
        gate: says whether the engine is paused.
        aborts: ends requests.
        read: reads a checkpoint; called in a worker thread.
        model_path: of the first weights.
        faults: hazards switched on.
    """

    def __init__(
        self,
        core: Core,
        gate: Gate,
        aborts: Aborts,
        read: Callable[[str], Weights],
        *,
        model_path: str,
        faults: frozenset[Hazard],
    ) -> None:
        self._core, self._gate, self._aborts, self._read = core, gate, aborts, read
        self._faults = faults
        self.model_path = model_path
        self.version = core.label
        """As reported; what tokens are marked with is the core's label."""
        # Guards `draining` and the swap between concurrent updates.
        self._lock = anyio.Lock()
        self._reading = False
        """Whether an update that can collide with another is under way, or two have collided."""

    async def from_disk(
        self, model_path: str, *, weight_version: str | None, flush_cache: bool, abort_all_requests: bool
    ) -> ControlReply:
        """See `Engine.update_weights`.

        Cancellation: the weights are the former ones; reading goes on in its thread and is thrown away. With
        `Hazard.UPDATE_COLLISION` and a pause the update goes on.
        """
        if Hazard.UPDATE_COLLISION in self._faults and self._gate.paused is not None:
            if abort_all_requests:
                self._aborts.abort("", abort_all=True, exact=False)
            return await self._unguarded(model_path, weight_version, flush_cache=flush_cache)
        async with self._lock:
            if (refusal := self.flush_refusal(flush_cache)) is not None:
                return refusal
            try:
                weights = await anyio.to_thread.run_sync(self._read, model_path, abandon_on_cancel=True)
            except ConfigError as error:
                return ControlReply(success=False, message=str(error))
            async with self.quiet(abort_all_requests=abort_all_requests):
                if (refusal := self.flush_refusal(flush_cache)) is not None:
                    return refusal
                return self.swap(weights, model_path, weight_version, flush_cache=flush_cache)

    async def settled(self) -> None:
        """Return once no update is under way that can collide with another; never if two have. See `Engine.settled`."""
        while self._reading:
            await self._gate.wait()

    async def _unguarded(self, model_path: str, weight_version: str | None, *, flush_cache: bool) -> ControlReply:
        """Update whether another update is under way or not, and whether anybody waits for it or not."""
        gate = self._gate
        gate.stuck = gate.stuck or self._reading
        while gate.stuck:
            await gate.wait()
        self._reading = True
        done = await anyio.to_thread.run_sync(
            self._read_and_swap, model_path, weight_version, flush_cache, abandon_on_cancel=True
        )
        while gate.stuck:
            await gate.wait()
        return done

    def _read_and_swap(self, model_path: str, weight_version: str | None, flush_cache: bool) -> ControlReply:
        try:
            weights = self._read(model_path)
        except ConfigError as error:
            weights = str(error)
        return anyio.from_thread.run_sync(self._end_unguarded, weights, model_path, weight_version, flush_cache)

    def _end_unguarded(
        self, read: Weights | str, model_path: str, weight_version: str | None, flush_cache: bool
    ) -> ControlReply:
        self._reading = self._gate.stuck
        self._gate.notify()
        if isinstance(read, str):
            return ControlReply(success=False, message=read)
        if (refusal := self.flush_refusal(flush_cache)) is not None:
            return refusal
        return self.swap(read, model_path, weight_version, flush_cache=flush_cache)

    @asynccontextmanager
    async def quiet(self, *, abort_all_requests: bool) -> AsyncGenerator[None]:
        """Enter the block once nothing runs or the engine is paused; no request is admitted until it is left.

        Cancellation: as if it had not been entered.
        """
        gate, core = self._gate, self._core
        if abort_all_requests:
            self._aborts.abort("", abort_all=True, exact=False)
        racing = Hazard.UPDATE_RACE in self._faults and gate.paused is None
        before = set(core.live.values()) if racing else set()
        gate.draining = not racing
        gate.watched += racing
        try:
            while (gate.paused is None and core.num_running) or not before.isdisjoint(core.live.values()):
                await gate.wait()
            yield
        finally:
            gate.draining = False
            gate.watched -= racing
            gate.notify()

    def swap(
        self, weights: Weights, model_path: str | None, weight_version: str | None, *, flush_cache: bool
    ) -> ControlReply:
        """Put new weights in place, between two steps.

        KV computed by the former weights is never matched again, flushed or not (but for `Hazard.STALE_PREFIX`).
        """
        core = self._core
        core.model.weights = weights
        if flush_cache or Hazard.STALE_PREFIX not in self._faults:
            core.cache.next_epoch()
        if weight_version is not None:
            core.relabel(weight_version)
        if flush_cache and self._keeps_kv:
            return ControlReply(
                success=False,
                message="Weights were updated, but the cache was not flushed because requests are still running or queued.",
            )
        if model_path is not None:
            self.model_path = model_path
        self.version = core.label
        return ControlReply(success=True, message=_UPDATED)

    def rename(self, weight_version: str) -> None:
        """Name the weights anew."""
        self._core.relabel(weight_version)
        self.version = weight_version

    def flush_refusal(self, flush_cache: bool) -> ControlReply | None:
        """Return the answer to an update whose flush is impossible: requests paused in place keep their KV."""
        if not (flush_cache and self._keeps_kv) or Hazard.APPLIED_REFUSAL in self._faults:
            return None
        return ControlReply(
            success=False,
            message=f"the cache cannot be flushed: {self._core.num_running} requests are paused in place and keep "
            "their KV; send flush_cache=false, or pause with mode retract. The weights are unchanged.",
        )

    @property
    def _keeps_kv(self) -> bool:
        return self._gate.paused == "in_place" and self._core.num_running > 0
