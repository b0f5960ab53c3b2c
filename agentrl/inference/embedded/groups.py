"""Weights from the trainer's memory, by gloo: groups, sessions, and the swap.

Invariant: what a session has taken is served all at once, between two steps, when a bucket names the new version or the
session ends; until then the former weights are. Whatever waits for rank 0 does so in a thread that does not keep the process
from ending, and not longer than `TIMEOUT`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Final, TypeVar

import anyio
import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread
import torch
from torch import Tensor

from agentrl.collective import Group, join
from agentrl.errors import ConfigError
from agentrl.inference.embedded.updating import Updates
from agentrl.inference.embedded.weights import Weights
from agentrl.inference.engine import ControlReply
from agentrl.transfer import Bucket, GroupAddress

TIMEOUT: Final = timedelta(seconds=120)
"""Of waiting for rank 0; SGLang waits half an hour."""
_T = TypeVar("_T")


class GroupUpdates:
    """Implements `agentrl.inference.engine.WeightGroups`.

    Args:
        updates: swaps the weights.
        current: returns the weights being served.
        build: makes weights of tensors by HF name.
    """

    def __init__(
        self,
        updates: Updates,
        current: Callable[[], Weights],
        build: Callable[[dict[str, Tensor]], Weights],
    ) -> None:
        self._updates, self._current, self._build = updates, current, build
        self._groups: dict[str, Group] = {}
        self._taken: dict[str, Tensor] | None = None
        # One broadcast at a time, in the order of the calls, and no session that ends in the middle of one.
        self._lock = anyio.Lock()

    async def join(self, address: GroupAddress, rank: int) -> ControlReply:
        """See `WeightGroups.join`."""
        if address.name in self._groups:
            return _refused(f"group {address.name} is there already; leave it first, or choose another name")
        try:
            self._groups[address.name] = await _in_thread(lambda: join(address, rank, TIMEOUT))
        except RuntimeError as error:  # what torch raises
            return _refused(f"Failed to initialize custom process group: {error}.")
        return ControlReply(success=True, message="Succeeded to initialize custom process group.")

    async def leave(self, name: str) -> ControlReply:
        """See `WeightGroups.leave`."""
        await anyio.lowlevel.checkpoint()
        if self._groups.pop(name, None) is None:
            return _refused("The group to be destroyed does not exist.")
        return ControlReply(success=True, message="Succeeded to destroy custom process group.")

    async def begin(self) -> ControlReply:
        """See `WeightGroups.begin`."""
        async with self._lock:
            if self._taken is not None:
                return _refused("a weight-update session is already open; call end_weight_update() first")
            self._taken = {}
        return _SUCCESS

    async def receive(
        self,
        bucket: Bucket,
        group: str,
        *,
        flat: bool,
        weight_version: str | None,
        flush_cache: bool,
        abort_all_requests: bool,
    ) -> ControlReply:
        """See `WeightGroups.receive`."""
        async with self._lock:
            if self._taken is None:
                between = "between begin_weight_update() and end_weight_update()"
                return _refused(f"update_weights_from_distributed must run {between}")
            if group not in self._groups:
                return _refused(f"Failed to receive weights: Group {group} not in {list(self._groups)}.")
            if abort_all_requests:
                async with self._updates.quiet(abort_all_requests=True):
                    pass
            try:
                received = await _in_thread(lambda: _receive(self._groups[group], bucket, flat=flat))
            except RuntimeError as error:  # what torch raises when rank 0 is gone
                return _refused(f"Failed to receive weights: {error}")
            self._taken |= received
            if weight_version is None:
                return self._updates.flush_refusal(flush_cache) or _RECEIVED
            done = await self._serve(weight_version, flush_cache=flush_cache)
            return _RECEIVED if done.success else done

    async def end(self) -> ControlReply:
        """See `WeightGroups.end`."""
        async with self._lock:
            if self._taken is None:
                return _refused("no weight-update session is open; call begin_weight_update() first")
            try:
                if self._taken:
                    done = await self._serve(None, flush_cache=False)
                    return _SUCCESS if done.success else done
            finally:
                self._taken = None
        return _SUCCESS

    async def _serve(self, weight_version: str | None, *, flush_cache: bool) -> ControlReply:
        """Put what the session has taken in place of the tensors of the same names."""
        taken, served = self._taken or {}, self._current()
        others = {name: tensor.to(served.file_dtypes[name]) for name, tensor in served.named.items() if name not in taken}
        if served.head is served.embedding:
            others.pop("lm_head.weight", None)  # the same as the embedding, which is among the others or was taken
        try:
            weights = await anyio.to_thread.run_sync(self._build, others | taken)
        except ConfigError as error:
            return _refused(f"{error}. The weights are unchanged")
        async with self._updates.quiet(abort_all_requests=False):
            if (refusal := self._updates.flush_refusal(flush_cache)) is not None:
                return refusal
            self._taken = {}
            return self._updates.swap(weights, None, weight_version, flush_cache=flush_cache)


_SUCCESS: Final = ControlReply(success=True, message="Success")
_RECEIVED: Final = ControlReply(success=True, message="Succeeded to update parameter online.")


def _refused(message: str) -> ControlReply:
    return ControlReply(success=False, message=message)


def _receive(group: Group, bucket: Bucket, *, flat: bool) -> dict[str, Tensor]:
    """Return a bucket's tensors by name; `flat`: rank 0 sends them in one piece."""
    if not flat:
        apart = {spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in bucket}
        group.wait(group.broadcast(list(apart.values())))
        return apart
    whole = torch.empty(sum(spec.num_bytes for spec in bucket), dtype=torch.uint8)
    group.wait(group.broadcast([whole]))
    pieces = whole.split([spec.num_bytes for spec in bucket])
    return {
        spec.name: piece.view(getattr(torch, spec.dtype)).reshape(spec.shape)
        for spec, piece in zip(bucket, pieces, strict=True)
    }


async def _in_thread(work: Callable[[], _T]) -> _T:
    """Return what `work` returns; the loop's own threads would keep the process from ending while a broadcast hangs.

    Cancellation: the work goes on, and what it returns is thrown away.
    """
    token, done = anyio.lowlevel.current_token(), anyio.Event()
    results: list[_T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(work())
        except RuntimeError as error:
            errors.append(error)
        with suppress(anyio.RunFinishedError):
            anyio.from_thread.run_sync(done.set, token=token)

    threading.Thread(target=run, name="weights", daemon=True).start()
    await done.wait()
    if errors:
        raise errors[0]
    return results[0]
