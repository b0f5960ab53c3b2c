"""The driver's side of sending weights from a trainer worker to servers: a `WeightChannel`.

Invariant: what is sent as a version is what the trainer held as that version. Where the worker keeps a snapshot, sending
and stepping do not wait for each other, and several sendings run at once; the snapshot stays until the next version is
held. Where it does not (`trainer.snapshot: stream`), the driver never asks for a step while weights are being sent, and one
sending follows the other. However a sending ends, its groups are finished or closed and the worker stays usable: a
cancelled caller still waits for the worker's reply.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Protocol, TypeVar

import anyio

from agentrl.errors import InvariantError, TrainError, UpdatePending
from agentrl.trainer.worker.protocol import (
    BeginSending,
    FinishSending,
    GroupsOpened,
    HoldWeights,
    OpenGroups,
    SendingBegun,
    SendingFinished,
    SendingStarted,
    StartSending,
    WeightsHeld,
    WorkerReply,
    WorkerRequest,
)
from agentrl.weights.types import GroupAddress, GroupRequest, Manifest

logger = logging.getLogger(__name__)

AnyReply = TypeVar("AnyReply", bound=WorkerReply)


class Exchange(Protocol):
    """One request and its reply, bounded by a deadline."""

    def __call__(self, request: WorkerRequest, expected: type[AnyReply], what: str, /) -> Awaitable[AnyReply]:
        """Return the worker's reply."""
        ...


class TrainerChannel:
    """The weights that a trainer worker holds for its servers, and its groups with them."""

    def __init__(self, call: Exchange) -> None:
        self._call = call
        # Held while the weights change and while they must not change.
        self._weights = anyio.Lock()
        self._stepping = False
        self._snapshot: bool | None = None
        """Whether the worker keeps snapshots; None before the first version."""
        self._held: tuple[int, str | None] | None = None
        """Version and type that `hold` took last; None once it is written."""

    @property
    def steps_while_sending(self) -> bool:
        return self._snapshot is True

    async def hold(self, version: int, *, dtype: str | None) -> None:
        """Take the present weights as `version`; the next `sending` or `holding` of it uses these, or is refused."""
        # If the request fails, the version before must not pass for the new one.
        self._held = None
        async with self.holding(version, dtype=dtype, what=f"holding version {version}"):
            self._held = version, dtype

    @asynccontextmanager
    async def stepping(self) -> AsyncGenerator[None]:
        """Wait until weights without a snapshot have been sent, and refuse to send such weights while the block runs."""
        async with self._weights:
            self._stepping = True
            try:
                yield
            finally:
                self._stepping = False

    async def open(self, requests: Sequence[GroupRequest], close: Collection[str]) -> Sequence[GroupAddress]:
        """Close the groups in `close`, open one for each of `requests`, and return where the servers join.

        Raises:
            ConfigError: the address is not the worker's, or the backend cannot be used.
        """
        request = OpenGroups(tuple(requests), tuple(close))
        return (await _shielded_exchange(self._call, request, GroupsOpened, "listening for servers")).addresses

    @asynccontextmanager
    async def holding(
        self, version: int, *, dtype: str | None, again: bool = False, what: str, shield: bool = False
    ) -> AsyncGenerator[None]:
        """Hold the weights as `version` for the length of the block, or, in a snapshot, until the next call.

        The weights that `hold` took as that version are used; without a snapshot the trainer must not have changed them
        since. With `again`, the present weights must have been held as `version` before. With `shield`, a cancelled caller
        waits for the reply.

        Raises:
            UpdatePending: `again` is set or `hold` was called, and the trainer is in a step or has stepped since.
            InvariantError: neither is so and the trainer is in a step.
        """
        if self._held == (version, dtype):
            again = True
            if self._snapshot:
                yield
                # A snapshot stays as it is while the trainer steps, so this block needs neither a request nor the lock.
                if dtype is None:  # written once; what is sent may be sent again, such as when every server failed
                    self._held = None
                return
            if dtype is None:
                self._held = None
        if self._stepping:
            if again:
                raise UpdatePending("the trainer is in a step; the server gets weights with the next update")
            raise InvariantError(f"{what}: the trainer is in a step, which changes the weights; call `hold` before the step")
        request = HoldWeights(version, dtype, again)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._weights)
            exchange = _shielded_exchange if shield else _exchange
            held = await exchange(self._call, request, WeightsHeld, what)
            self._log_choice(held)
            # The copy is made: steps may change the weights from here on, while the copy is sent.
            if held.snapshot:
                await stack.aclose()
            yield

    @asynccontextmanager
    async def sending(
        self, version: int, groups: Sequence[str], *, dtype: str, again: bool
    ) -> AsyncGenerator[WorkerSending]:
        """Hold the weights while the block runs and prepare to send them, as `WeightChannel.sending`; raises as `holding`.

        Cancellation: unfinished groups are closed; the trainer stays usable.
        """
        # The worker still has the snapshot of this version, whatever the trainer has done since.
        if again and self._snapshot:
            async with self._begun(version, groups) as sending:
                yield sending
            return
        what = f"preparing version {version} for the servers"
        async with (
            self.holding(version, dtype=dtype, again=again, what=what, shield=True),
            self._begun(version, groups) as sending,
        ):
            yield sending

    @asynccontextmanager
    async def _begun(self, version: int, groups: Sequence[str]) -> AsyncGenerator[WorkerSending]:
        request = BeginSending(version, tuple(groups))
        begun = await _shielded_exchange(self._call, request, SendingBegun, f"beginning to send version {version}")
        sending = WorkerSending(self._call, groups, begun.manifest)
        try:
            yield sending
        except anyio.get_cancelled_exc_class():
            if not sending.finished:
                with suppress(TrainError):  # a step was cancelled too: the worker ends, and its groups with it
                    await sending.finish(groups)
            raise
        finally:
            if not sending.finished:
                await sending.finish(groups)

    def _log_choice(self, held: WeightsHeld) -> None:
        if held.snapshot == self._snapshot:
            return
        self._snapshot = held.snapshot
        size = f"{held.num_bytes / 2**30:.2f} GiB"
        free = "" if held.free_bytes is None else f", with {held.free_bytes / 2**30:.2f} GiB of memory free"
        if held.in_file:
            logger.warning(
                "weights are published from a copy of %s in a file of TMPDIR on the machine of rank 0%s (trainer.snapshot); "
                "a disk is slower than memory",
                size,
                free,
            )
        elif held.snapshot:
            logger.info("weights are published from a snapshot in host memory: %s%s", size, free)
        else:
            logger.warning(
                "weights are published without a snapshot in host memory, which would take %s%s: steps wait until weights "
                "are sent, and a server that returns during a step waits for the next version (trainer.snapshot)",
                size,
                free,
            )


class WorkerSending:
    """The sending of one version; a `Sending`."""

    def __init__(self, call: Exchange, groups: Sequence[str], manifest: Manifest) -> None:
        self._call, self._groups = call, tuple(groups)
        self.manifest = manifest
        self.finished = False

    async def start(self, groups: Sequence[str]) -> None:
        await _shielded_exchange(self._call, StartSending(tuple(groups)), SendingStarted, "starting to send weights")

    async def finish(self, abandoned: Collection[str]) -> Mapping[str, str]:
        """Close the abandoned groups, wait at most `sync.timeout_s` for the others, and return the errors by group."""
        self.finished = True
        request = FinishSending(self._groups, tuple(abandoned))
        return (await _shielded_exchange(self._call, request, SendingFinished, "sending weights to the servers")).failures


async def _exchange(call: Exchange, request: WorkerRequest, expected: type[AnyReply], what: str) -> AnyReply:
    return await call(request, expected, what)


async def _shielded_exchange(call: Exchange, request: WorkerRequest, expected: type[AnyReply], what: str) -> AnyReply:
    """Return the reply, shielded from cancellation: otherwise the driver would not know which groups are open."""
    with anyio.CancelScope(shield=True):  # the call has its own deadline
        return await call(request, expected, what)
    raise AssertionError("unreachable: a shielded scope is never cancelled")
