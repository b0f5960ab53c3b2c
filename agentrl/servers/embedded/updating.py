"""Weight updates from disk and from process groups: read or receive, wait until a swap is allowed, swap.

Invariant: the weights of a step are all of one version; an update that is refused changes nothing (but for
`SGLangFault.APPLIED_REFUSAL`), and one that is applied changes weights and label together. Who waits for whom: an update
without a pause waits until the running requests end or a pause begins, and for the update before it (except with
`SGLangFault.UPDATE_COLLISION`).

The weights of a session are served all at once, between two steps, when a bucket names the new version or the session ends;
until then the former weights are served. A wait for rank 0 runs in a daemon thread, which does not keep the process alive,
and ends after `TIMEOUT`.

The gate decides whether the engine may step. A pause and a swap discard the step that is being computed, so the state is
that between two steps; every change wakes every waiting task, which then checks its condition again. A client's disconnect
(`exact`) ends its own request and no other.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from typing import Final, TypeVar

import anyio
import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread
import torch
from torch import Tensor

from agentrl.errors import ConfigError
from agentrl.servers.embedded.core import Core
from agentrl.servers.embedded.faults import SGLangFault
from agentrl.servers.embedded.sequences import EngineSequence
from agentrl.servers.embedded.served_model import VersionWeights
from agentrl.servers.engine import BucketUpdate, ControlReply, EnginePauseMode
from agentrl.weights.process_group import ProcessGroup, join
from agentrl.weights.types import Bucket, GroupAddress

_UPDATED: Final = "Succeeded to update model weights."


class Gate:
    """The pause and the admission of an engine, with a signal for every change."""

    def __init__(self) -> None:
        self.paused: EnginePauseMode | None = None
        self.draining = False
        """An update waits until the running requests end; no other request is admitted."""
        self.watched = 0
        """Number of tasks that need a notification after every step, not only when nothing runs."""
        self.stuck = False
        """No control call is answered again: `SGLangFault.ABORT_DEADLOCK` or `SGLangFault.UPDATE_COLLISION` happened."""
        self._changed = anyio.Event()

    def notify(self) -> None:
        """Wake every task that waits for a change."""
        event, self._changed = self._changed, anyio.Event()
        event.set()

    async def wait(self) -> None:
        """Wait for the next change, without limit. Cancellation: nothing is left behind."""
        await self._changed.wait()


class Aborts:
    """Ends requests."""

    def __init__(self, core: Core, gate: Gate, faults: frozenset[SGLangFault]) -> None:
        self._core, self._gate, self._faults = core, gate, faults
        self._late: list[EngineSequence] = []

    def abort(self, rid: str, *, abort_all: bool, exact: bool) -> int:
        """End the named requests with their partial output; return their number."""
        live = self._core.live
        if exact:
            chosen = [live[rid]] if rid in live else []
        else:
            named = [one for name, one in live.items() if abort_all or (rid and name.startswith(rid))]
            chosen = [one for one in named if self._reaches(one, abort_all=abort_all)]
        for one in chosen:
            if SGLangFault.COARSE_ABORTS in self._faults and one.row < 0 and not one.request.stream:
                one.round_down()
            self._core.abort(one)
        return len(chosen)

    def resumed(self) -> None:
        """Carry out the aborts that the pause delayed."""
        late, self._late = self._late, []
        for one in late:
            # Its id may belong to another request by now.
            if self._core.live.get(one.request.rid) is one:
                self._core.abort(one)
        for one in self._core.waiting:
            one.parked = False

    def _reaches(self, one: EngineSequence, *, abort_all: bool) -> bool:
        if SGLangFault.LOST_ABORTS in self._faults:
            if one.parked:
                one.deaf = one.deaf or not abort_all
                return False
            if one.deaf and not abort_all:
                return False
        if SGLangFault.LATE_ABORTS in self._faults and self._gate.paused == "in_place" and one.row >= 0:
            self._late.append(one)
            return False
        return True


class WeightUpdates:
    """The weights being served, and their changes; `read` reads a checkpoint in a thread."""

    def __init__(
        self,
        core: Core,
        gate: Gate,
        aborts: Aborts,
        read: Callable[[str], VersionWeights],
        *,
        model_path: str,
        faults: frozenset[SGLangFault],
    ) -> None:
        self._core, self._gate, self._aborts, self._read = core, gate, aborts, read
        self._faults = faults
        self.model_path = model_path
        self.version = core.label
        """The reported version; tokens carry the core's label."""
        # Guards `draining` and the swap between concurrent updates.
        self._lock = anyio.Lock()
        self._reading = False
        """An update that can collide with another is in progress, or two have collided."""

    async def from_disk(
        self, model_path: str, *, weight_version: str | None, flush_cache: bool, abort_all_requests: bool
    ) -> ControlReply:
        """Read the weights of `model_path` in a thread, wait until a swap is allowed, and swap them in.

        Cancellation: the weights are the former ones; the thread finishes reading and its result is dropped. With
        `SGLangFault.UPDATE_COLLISION` and a pause the update continues.
        """
        if SGLangFault.UPDATE_COLLISION in self._faults and self._gate.paused is not None:
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
                # Asked again: requests may have been paused in place while the weights were read.
                if (refusal := self.flush_refusal(flush_cache)) is not None:
                    return refusal
                return self.swap(weights, model_path, weight_version, flush_cache=flush_cache)

    async def settled(self) -> None:
        """Return once no update is in progress that can collide with another; never return if two have collided."""
        while self._reading:
            await self._gate.wait()

    async def _unguarded(self, model_path: str, weight_version: str | None, *, flush_cache: bool) -> ControlReply:
        """Update even if another update is in progress, and even if the caller is cancelled."""
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
        self, read: VersionWeights | str, model_path: str, weight_version: str | None, flush_cache: bool
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
        """Enter the block once nothing runs or the engine is paused; admit no request until the block ends.

        Cancellation: requests are admitted again.
        """
        gate, core = self._gate, self._core
        if abort_all_requests:
            self._aborts.abort("", abort_all=True, exact=False)
        racing = SGLangFault.UPDATE_RACE in self._faults and gate.paused is None
        before = set(core.live.values()) if racing else set()
        # Without this a busy server would never be quiet: new requests would replace those that end.
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
        self, weights: VersionWeights, model_path: str | None, weight_version: str | None, *, flush_cache: bool
    ) -> ControlReply:
        """Replace the weights between two steps.

        KV of the former weights is never matched again, even without a flush (except with `SGLangFault.STALE_PREFIX`).
        """
        core = self._core
        core.discard()  # what the former weights compute now
        core.model.weights = weights
        if flush_cache or SGLangFault.STALE_PREFIX not in self._faults:
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
        """Change the version of the weights."""
        self._core.relabel(weight_version)
        self.version = weight_version

    def flush_refusal(self, flush_cache: bool) -> ControlReply | None:
        """Return a refusal if requests paused in place, which keep their KV, make the flush impossible; else None."""
        if not (flush_cache and self._keeps_kv) or SGLangFault.APPLIED_REFUSAL in self._faults:
            return None
        return ControlReply(
            success=False,
            message=f"the cache cannot be flushed: {self._core.num_running} requests are paused in place and keep "
            "their KV; send flush_cache=false, or pause with mode retract. The weights are unchanged.",
        )

    @property
    def _keeps_kv(self) -> bool:
        return self._gate.paused == "in_place" and self._core.num_running > 0


TIMEOUT: Final = timedelta(seconds=120)
"""Longest wait for rank 0; SGLang waits half an hour."""
_ThreadResult = TypeVar("_ThreadResult")


class GroupUpdates:
    """Implements `agentrl.servers.engine.WeightGroups`."""

    def __init__(
        self,
        updates: WeightUpdates,
        current: Callable[[], VersionWeights],
        build: Callable[[dict[str, Tensor]], VersionWeights],
    ) -> None:
        self._updates, self._current, self._build = updates, current, build
        self._groups: dict[str, ProcessGroup] = {}
        self._taken: dict[str, Tensor] | None = None
        # One broadcast at a time, in the order of the calls, and no session that ends in the middle of one.
        self._lock = anyio.Lock()

    async def join(self, address: GroupAddress, rank: int) -> ControlReply:
        """Join a group; refuse a name in use."""
        if address.name in self._groups:
            return _refused(f"group {address.name} already exists; leave it first, or choose another name")
        try:
            self._groups[address.name] = await _in_thread(lambda: join(address, rank, TIMEOUT))
        except RuntimeError as error:  # what torch raises
            return _refused(f"Failed to initialize custom process group: {error}.")
        return ControlReply(success=True, message="Succeeded to initialize custom process group.")

    async def leave(self, name: str) -> ControlReply:
        """Leave a group; refuse an unknown name."""
        await anyio.lowlevel.checkpoint()
        if self._groups.pop(name, None) is None:
            return _refused("The group to be destroyed does not exist.")
        return ControlReply(success=True, message="Succeeded to destroy custom process group.")

    async def begin(self) -> ControlReply:
        """Open a session; refuse if one is open."""
        async with self._lock:
            if self._taken is not None:
                return _refused("a weight-update session is already open; call end_weight_update() first")
            self._taken = {}
        return _SUCCESS

    async def receive(self, update: BucketUpdate) -> ControlReply:
        """Receive a bucket; with a version, serve everything received in this session.

        Cancellation: the bucket is lost, and the session stays open.
        """
        async with self._lock:
            if self._taken is None:
                between = "between begin_weight_update() and end_weight_update()"
                return _refused(f"update_weights_from_distributed must run {between}")
            if update.group not in self._groups:
                return _refused(f"Failed to receive weights: Group {update.group} not in {list(self._groups)}.")
            if update.abort_all_requests:
                async with self._updates.quiet(abort_all_requests=True):
                    pass
            try:
                received = await _in_thread(lambda: _receive(self._groups[update.group], update.bucket, flat=update.flat))
            except RuntimeError as error:  # what torch raises when rank 0 is gone
                return _refused(f"Failed to receive weights: {error}")
            self._taken |= received
            if update.weight_version is None:
                return self._updates.flush_refusal(update.flush_cache) or _RECEIVED
            done = await self._serve(update.weight_version, flush_cache=update.flush_cache)
            return _RECEIVED if done.success else done

    async def end(self) -> ControlReply:
        """Close the session and serve what it received."""
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
        """Replace the served tensors that the session has received; keep the others."""
        taken, served = self._taken or {}, self._current()
        others = served.others(taken)
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


def _receive(group: ProcessGroup, bucket: Bucket, *, flat: bool) -> dict[str, Tensor]:
    """Return the tensors of a bucket by name; `flat`: rank 0 sends them as one tensor."""
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


async def _in_thread(work: Callable[[], _ThreadResult]) -> _ThreadResult:
    """Return the result of `work`, run in a daemon thread: anyio's threads would keep the process alive while it hangs."""
    token, done = anyio.lowlevel.current_token(), anyio.Event()
    results: list[_ThreadResult] = []
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
