"""How a version gets into servers: from the files of a publication, or straight from the trainer's memory.

Invariant: `load` is called for paused servers only, and afterwards they hold what `delivered` says, or it raises. However
the block of `opened` is left, the trainer may step again and no server waits for it: groups not finished are closed.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import anyio

from agentrl.concurrency import task_group
from agentrl.errors import ServerError, WeightSyncError
from agentrl.inference.backend import WeightSource
from agentrl.inference.pool.members import Member, Roster
from agentrl.weights.types import GroupAddress, Publication, Sending, WeightChannel, WeightFeed

Each: TypeAlias = Callable[[Callable[[Member], Awaitable[None]]], Awaitable[Sequence[Member]]]
"""Does something to every server that is to have the weights, at once, and returns those that did not fail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """What servers must have now."""

    version: int
    tensor_checksums: Mapping[str, str]
    """By HF name; of use to servers that report agentrl's kind of digest."""
    origin: str
    """For messages."""


class Delivery(Protocol):
    """One version on its way into servers."""

    @property
    def num_bytes(self) -> int | None:
        """Sent to each server; None when it reads files."""
        ...

    @property
    def delivered(self) -> Delivered:
        """What servers must have."""
        ...

    async def start(self, members: Sequence[Member]) -> None:
        """Take note that these servers are paused and about to `load`."""
        ...

    async def load(self, member: Member) -> None:
        """Have a server take the weights."""
        ...

    async def complete(self, members: Sequence[Member]) -> None:
        """Take note that these servers took the weights; what the others were to get is given up."""
        ...

    def check(self, member: Member) -> None:
        """Raise `WeightSyncError` when a server cannot have everything, whatever it says; after `complete`."""
        ...


def opened(
    source: WeightSource, roster: Roster, members: Sequence[Member], each: Each, *, again: bool
) -> AbstractAsyncContextManager[Delivery]:
    """Return the context manager of a delivery.

    Args:
        source: the weights.
        roster: all servers.
        members: those to have the weights.
        each: reaches them.
        again: the version has been delivered to others before.
    """
    if isinstance(source, Publication):
        return _from_disk(source)
    return _from_trainer(source, roster, members, each, again=again)


@asynccontextmanager
async def _from_disk(publication: Publication) -> AsyncGenerator[Delivery]:
    yield _Files(publication)


class _Files:
    num_bytes = None

    def __init__(self, publication: Publication) -> None:
        self._publication = publication
        self.delivered = Delivered(
            version=publication.version, tensor_checksums=publication.tensor_checksums, origin=publication.path
        )

    async def start(self, members: Sequence[Member]) -> None:
        pass

    async def load(self, member: Member) -> None:
        await member.server.load_weights(self._publication)

    async def complete(self, members: Sequence[Member]) -> None:
        pass

    def check(self, member: Member) -> None:
        pass


@asynccontextmanager
async def _from_trainer(
    feed: WeightFeed, roster: Roster, members: Sequence[Member], each: Each, *, again: bool
) -> AsyncGenerator[Delivery]:
    members = await _linked(feed, roster, members, each)
    digests = any(member.server.checksum_kind == "agentrl" for member in members)
    names = [member.group for member in members]
    async with feed.channel.sending(feed.version, names, dtype=feed.dtype, digests=digests, again=again) as sending:
        delivery = _Broadcasts(sending, dict(zip(members, names, strict=True)))
        try:
            yield delivery
        finally:
            delivery.forget_closed_groups()


class _Broadcasts:
    def __init__(self, sending: Sending, groups: Mapping[Member, str]) -> None:
        self._sending, self._groups = sending, groups
        sent = sending.manifest
        self.delivered = Delivered(
            version=sent.version, tensor_checksums=sent.tensor_checksums, origin="the trainer's memory"
        )
        self._open: set[str] = set()
        self._failures: Mapping[str, str] = {}

    @property
    def num_bytes(self) -> int | None:
        return self._sending.manifest.num_bytes

    async def start(self, members: Sequence[Member]) -> None:
        await self._sending.start([self._groups[member] for member in members])

    async def load(self, member: Member) -> None:
        await member.server.groups.receive(self._sending.manifest, self._groups[member])

    async def complete(self, members: Sequence[Member]) -> None:
        abandoned = [group for member, group in self._groups.items() if member not in members]
        self._failures = await self._sending.finish(abandoned)
        self._open = {self._groups[member] for member in members} - self._failures.keys()

    def check(self, member: Member) -> None:
        failure = self._failures.get(self._groups[member])
        if failure is not None:
            raise WeightSyncError(f"{member.url}: {failure}")

    def forget_closed_groups(self) -> None:
        for member, group in self._groups.items():
            if group not in self._open and member.group == group:
                member.channel = None


async def _linked(feed: WeightFeed, roster: Roster, members: Sequence[Member], each: Each) -> Sequence[Member]:
    """Return the members that are in a group with the trainer; those that were in none have joined one."""
    new = [member for member in members if member.channel is not feed.channel]
    if not new:
        return members
    requests = [member.server.groups.request() for member in new]
    kept = [member.group for member in roster.members if member.channel is feed.channel]
    opened = await feed.channel.open(requests, kept)
    addresses = dict(zip(new, opened, strict=True))

    async def join(member: Member) -> None:
        if member in addresses:
            await _join(member, addresses[member], feed.channel)

    return await each(join)


async def _join(member: Member, address: GroupAddress, channel: WeightChannel) -> None:
    if member.group:
        await _leave(member)
    member.group, member.channel = address.name, channel
    await member.server.groups.join(address)


async def leave_all(members: Sequence[Member], *, timeout_s: float) -> None:
    """Have servers that run on forget the trainer's groups.

    Cancellation: some have forgotten theirs.
    """
    with anyio.move_on_after(timeout_s):
        async with task_group() as tasks:
            for member in members:
                if member.channel is not None:
                    tasks.start_soon(_leave, member)


async def _leave(member: Member) -> None:
    group, member.group, member.channel = member.group, "", None
    try:
        await member.server.groups.leave(group)
    except ServerError:
        return  # the group is closed at the trainer's end: to the server it is a name and nothing more


def compare(
    delivered: Delivered,
    digests: Mapping[Member, Mapping[str, str] | None],
    known: Mapping[str, tuple[str, Mapping[str, str]]] | None = None,
) -> None:
    """Compare what servers hold with what was delivered, or, where digests are of another kind, with one another.

    Args:
        delivered: what they must hold.
        digests: what each reports.
        known: by kind, what a server that has the same weights reported.

    Raises:
        WeightSyncError: naming the servers and the first tensors that differ.
    """
    first = dict(known or {})
    for member, held in digests.items():
        if held is None:
            continue
        kind = member.server.checksum_kind
        if kind == "agentrl":
            peer, expected = "the published weights", delivered.tensor_checksums
            names = sorted(expected.keys() | held.keys())
        else:
            peer, expected = first.setdefault(kind, (member.url, held))
            names = sorted(expected.keys() & held.keys())
        differing = [name for name in names if expected.get(name) != held.get(name)]
        if differing:
            raise WeightSyncError(
                f"{member.url}: after the update to version {delivered.version}, {len(differing)} of {len(names)} tensors "
                f"differ from {peer} ({delivered.origin}): {', '.join(differing[:3])}"
            )
