"""The driver's side of the groups between a trainer worker and its servers: a `WeightChannel` over the worker's protocol.

Invariant: the worker is never asked to step while weights leave it, and whatever ends a sending, its groups are finished or
closed and the worker can be used; a cancelled caller waits for the worker's answer, which comes at once but for digests, in
`sending`, and for what is on the wire, in `finish`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar

import anyio

from agentrl.errors import WeightSyncError
from agentrl.train.protocol import (
    BeginSending,
    FinishSending,
    GroupsOpened,
    OpenGroups,
    Reply,
    Request,
    SendingBegun,
    SendingFinished,
    SendingStarted,
    StartSending,
)
from agentrl.transfer import GroupAddress, GroupRequest, Manifest

AnyReply = TypeVar("AnyReply", bound=Reply)


class Call(Protocol):
    """An exchange with the worker, bounded by its own deadline."""

    def __call__(self, request: Request, expected: type[AnyReply], what: str, /) -> Awaitable[AnyReply]:
        """Return the worker's reply."""
        ...


class TrainerChannel:
    """The groups of one trainer worker."""

    def __init__(self, call: Call) -> None:
        """Talk to the worker by `call`."""
        self._call = call
        # Held by whoever needs the weights to change, or to stay as they are.
        self._weights = anyio.Lock()
        self._stepping = False

    @asynccontextmanager
    async def stepping(self) -> AsyncGenerator[None]:
        """Wait until no weights are being sent, and keep them from being sent for the length of the block."""
        async with self._weights:
            self._stepping = True
            try:
                yield
            finally:
                self._stepping = False

    async def open(self, requests: Sequence[GroupRequest], keep: Collection[str]) -> Sequence[GroupAddress]:
        """Listen for the servers of `requests`; see `WeightChannel.open`.

        Raises:
            WeightSyncError: while the trainer is in a step.
            ConfigError: the address is not the worker's, or the backend cannot be used.
            TrainError: the worker died.

        Cancellation: the groups are open.
        """
        self._check_idle()
        request = OpenGroups(tuple(requests), tuple(keep))
        return (await _answer(self._call, request, GroupsOpened, "listening for servers")).addresses

    @asynccontextmanager
    async def sending(
        self, version: int, groups: Sequence[str], *, dtype: str, digests: bool, again: bool
    ) -> AsyncGenerator[WorkerSending]:
        """Hold the weights still and make ready to send them; see `WeightChannel.sending`.

        Raises:
            WeightSyncError: `again`, and the trainer is in a step or has other weights by now.
            TrainError: the worker died.

        Cancellation: groups that were not finished are closed; the trainer can be used.
        """
        if again:
            self._check_idle()
        async with self._weights:
            request = BeginSending(version, tuple(groups), dtype, digests, again)
            begun = await _answer(self._call, request, SendingBegun, f"preparing version {version} for the servers")
            sending = WorkerSending(self._call, begun.manifest)
            try:
                yield sending
            finally:
                if not sending.finished:
                    await sending.finish(groups)

    def _check_idle(self) -> None:
        if self._stepping:
            raise WeightSyncError("the trainer is in a step; the server gets weights with the next update")


class WorkerSending:
    """One version on its way; a `Sending`."""

    def __init__(self, call: Call, manifest: Manifest) -> None:
        """Begin with nothing sent; see `TrainerChannel.sending`."""
        self._call = call
        self.manifest = manifest
        """What is sent."""
        self.finished = False
        """Whether `finish` was called."""

    async def start(self, groups: Sequence[str]) -> None:
        """Send to `groups`.

        Cancellation: they are sent to.
        """
        await _answer(self._call, StartSending(tuple(groups)), SendingStarted, "starting to send weights")

    async def finish(self, abandoned: Collection[str]) -> Mapping[str, str]:
        """Close the abandoned groups, wait for what goes to the others (at most `sync.timeout_s`), and let the trainer step.

        Cancellation: waits all the same.
        """
        self.finished = True
        request = FinishSending(tuple(abandoned))
        return (await _answer(self._call, request, SendingFinished, "sending weights to the servers")).failures


async def _answer(call: Call, request: Request, expected: type[AnyReply], what: str) -> AnyReply:
    """Return the answer, also to a caller that is cancelled: an exchange cut in two would break the worker's stream."""
    with anyio.CancelScope(shield=True):  # the call has its own deadline
        return await call(request, expected, what)
    raise AssertionError("nobody cancels the scope")
