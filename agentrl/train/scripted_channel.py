"""A trainer's end of process groups without a process, for tests of pools and engines; no torch, nothing is sent.

Invariant: it refuses what a real trainer refuses, and records what it is asked, in order.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel

from agentrl.errors import InvariantError, WeightSyncError
from agentrl.transfer import GroupAddress, GroupRequest, Manifest, TensorSpec, scripted_checksums


class ScriptedSending:
    """One version on its way; a `Sending`."""

    def __init__(self, version: int, groups: Sequence[str]) -> None:
        """Begin with nothing sent."""
        buckets = ((TensorSpec("steps_applied", "float32", (1,)),),)
        self.manifest = Manifest(version, buckets, scripted_checksums(version, buckets))
        """What is sent."""
        self.groups = tuple(groups)
        self.started: list[str] = []
        """Groups it was told to send to."""
        self.abandoned: tuple[str, ...] | None = None
        """Groups that were given up; None until it is finished."""
        self.failures: dict[str, str] = {}
        """What `finish` says went wrong, by group; set it before."""

    async def start(self, groups: Sequence[str]) -> None:
        """Take note of the groups; see `Sending.start`."""
        await anyio.lowlevel.checkpoint()
        self.started += groups

    async def finish(self, abandoned: Collection[str]) -> Mapping[str, str]:
        """Return `failures`; see `Sending.finish`."""
        self.abandoned = tuple(abandoned)
        with anyio.CancelScope(shield=True):
            await anyio.lowlevel.checkpoint()
        return self.failures


class ScriptedChannel:
    """A `WeightChannel` that records.

    Example:
        >>> channel = ScriptedChannel()
        >>> [address] = anyio.run(channel.open, [GroupRequest("a", ranks=2, nccl=False, flat=True)], ())
        >>> address.world_size, sorted(channel.groups)
        (3, ['a'])
    """

    def __init__(self) -> None:
        """Begin without groups, with weights that nobody was given."""
        self.groups: set[str] = set()
        """Those that are open."""
        self.sendings: list[ScriptedSending] = []
        """All, in order."""
        self.given_out: int | None = None
        """Version of the weights, once servers were given them; a step makes it None."""
        self.stepping = False
        """Whether it refuses because the trainer is in a step."""
        self.failures: dict[str, str] = {}
        """For the next sendings; see `ScriptedSending.failures`."""

    async def open(self, requests: Sequence[GroupRequest], keep: Collection[str]) -> Sequence[GroupAddress]:
        """Return made-up addresses; see `WeightChannel.open`."""
        await anyio.lowlevel.checkpoint()
        self._check_idle()
        self.groups = (self.groups & set(keep)) | {request.name for request in requests}
        return [GroupAddress(request.name, "scripted", 1, 1 + request.ranks, "gloo") for request in requests]

    @asynccontextmanager
    async def sending(
        self, version: int, groups: Sequence[str], *, dtype: str, digests: bool, again: bool
    ) -> AsyncGenerator[ScriptedSending]:
        """Yield a sending that sends nothing; see `WeightChannel.sending`."""
        if again:
            self._check_idle()
        if again and self.given_out != version:
            raise WeightSyncError(f"the trainer's weights are past version {version}; the server gets weights later")
        if not self.groups >= set(groups):
            raise InvariantError(f"groups {groups}, open are {self.groups}")
        sending = ScriptedSending(version, groups)
        sending.failures = dict(self.failures)
        self.sendings.append(sending)
        self.given_out = version
        try:
            yield sending
        finally:
            if sending.abandoned is None:
                await sending.finish(groups)
            self.groups -= {*(sending.abandoned or ()), *sending.failures}

    def _check_idle(self) -> None:
        if self.stepping:
            raise WeightSyncError("the trainer is in a step; the server gets weights with the next update")
