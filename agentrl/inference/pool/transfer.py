"""How a version reaches the servers: from the files of a publication, or straight from the trainer's memory.

Invariant: `load` is called for paused servers only; afterwards they hold the `expected` weights, or it raises. However the
block of `open_transfer` is left, unfinished groups are closed, so the trainer may step and no server waits for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import anyio.lowlevel
import anyio.to_thread

from agentrl.errors import ServerError, WeightSyncError
from agentrl.inference.backend import WeightSource
from agentrl.inference.pool.members import Member
from agentrl.support.concurrency import task_group
from agentrl.weights.peft_files import ADAPTER_WEIGHTS_FILE
from agentrl.weights.tensors import WEIGHTS_FILE, equal_as_bfloat16, held_checksums
from agentrl.weights.types import ExpectedWeights, Publication, Sending, WeightFeed

Each: TypeAlias = Callable[[Callable[[Member], Awaitable[None]]], Awaitable[Sequence[Member]]]
"""Does something to every server of an update at once, and returns those that did not fail."""


_NARROW: Final = frozenset({"bfloat16", "float16"})
"""Types that cannot hold every value of the weights in files."""


class HeldDigests(NamedTuple):
    """Digests that a server of one type must report after a transfer."""

    kind: str
    """`agentrl`, followed by the type where it differs from the type of the file."""
    tensors: Mapping[str, str]
    """Digest of each tensor, by its name."""


class WeightTransfer:
    """A version on its way into servers."""

    num_bytes: int | None = None
    """Bytes sent to each server; None when servers read files."""
    pauses = True
    """Whether servers stop sampling meanwhile. An adapter is loaded beside the one that running calls keep."""
    may_load_twice = True
    """Whether `load` may be called again for a server that closed the connection; a broadcast has room for one."""

    def __init__(self, expected: ExpectedWeights) -> None:
        self.expected = expected
        """The weights that servers must hold afterwards."""

    async def start(self, members: Sequence[Member]) -> None:
        """Begin for these servers, which are paused and about to `load`."""

    async def load(self, member: Member) -> None:
        """Have one server take the weights."""
        raise NotImplementedError

    async def digests(self, member: Member) -> Mapping[str, str]:
        """Return the digests of the weights that one server has loaded."""
        return await member.server.checksums()

    async def wanted(self, member: Member) -> HeldDigests:
        """Return the digests that a server of agentrl's must report: of the weights in the type in which it holds them."""
        await anyio.lowlevel.checkpoint()
        return HeldDigests("agentrl", self.expected.tensor_checksums)

    async def serve(self, member: Member) -> None:
        """Have one server use the loaded weights, after their digests were found right; most servers use them at once."""

    async def complete(self, members: Sequence[Member]) -> None:
        """End for these servers, which have loaded, and give up the rest."""

    def check(self, member: Member) -> None:
        """Raise `WeightSyncError` when the sender failed for this server; comes after `complete`."""


def open_transfer(
    source: WeightSource, chosen: Sequence[Member], each: Each, *, again: bool
) -> AbstractAsyncContextManager[WeightTransfer]:
    """Return the context manager of a transfer."""
    if isinstance(source, Publication):
        return nullcontext(_AdapterTransfer(source) if source.adapter else _DiskTransfer(source))
    return _from_trainer(source, chosen, each, again=again)


class _DiskTransfer(WeightTransfer):
    file = WEIGHTS_FILE

    def __init__(self, publication: Publication) -> None:
        self._publication, path = publication, publication.path
        self._rounded: dict[str, HeldDigests] = {}
        sums = publication.tensor_checksums
        super().__init__(ExpectedWeights(version=publication.version, tensor_checksums=sums, origin=path, directory=path))

    async def load(self, member: Member) -> None:
        await member.server.load_weights(self._publication)

    async def wanted(self, member: Member) -> HeldDigests:
        held = member.server.dtype
        # Only a server that rounds the weights reports digests that differ from those of the file.
        if held not in _NARROW or member.server.checksum_kind != "agentrl":
            return await super().wanted(member)
        if held not in self._rounded:
            path = Path(self._publication.path) / self.file
            # A thread, because it reads and hashes the whole model; once per type, for all servers that hold it.
            digests = await anyio.to_thread.run_sync(held_checksums, path, held, abandon_on_cancel=True)
            same = digests == self._publication.tensor_checksums
            self._rounded[held] = HeldDigests("agentrl" if same else f"agentrl {held}", digests)
        return self._rounded[held]


class _AdapterTransfer(_DiskTransfer):
    file = ADAPTER_WEIGHTS_FILE
    pauses = False

    async def load(self, member: Member) -> None:
        await member.server.adapters.load(self._publication)

    async def digests(self, member: Member) -> Mapping[str, str]:
        return await member.server.adapters.checksums(self._publication)

    async def serve(self, member: Member) -> None:
        await member.server.adapters.serve(self._publication)


@asynccontextmanager
async def _from_trainer(
    feed: WeightFeed, chosen: Sequence[Member], each: Each, *, again: bool
) -> AsyncGenerator[WeightTransfer]:
    chosen = await _join_all(feed, chosen, each)
    names = [member.group for member in chosen]
    async with feed.channel.sending(feed.version, names, dtype=feed.dtype, again=again) as sending:
        transfer = _BroadcastTransfer(sending, dict(zip(chosen, names, strict=True)))
        try:
            yield transfer
        finally:
            transfer.forget_closed_groups()


class _BroadcastTransfer(WeightTransfer):
    may_load_twice = False

    def __init__(self, sending: Sending, groups: Mapping[Member, str]) -> None:
        self._sending, self._groups = sending, groups
        sent = sending.manifest
        super().__init__(
            ExpectedWeights(version=sent.version, tensor_checksums=sent.tensor_checksums, origin="the trainer's memory")
        )
        self.num_bytes = sent.num_bytes
        self._open: set[str] = set()
        self._failures: Mapping[str, str] = {}

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
            # The trainer closed its end, so the server must join a new group before the next version.
            if group not in self._open and member.group == group:
                member.channel = None


async def _join_all(feed: WeightFeed, chosen: Sequence[Member], each: Each) -> Sequence[Member]:
    """Return the servers that are in a group with the trainer, after those that were in none have joined one."""
    # A restarted trainer has a new channel, and a restarted server none: both need a new group.
    new = [member for member in chosen if member.channel is not feed.channel]
    if not new:
        return chosen
    requests = [member.server.groups.request() for member in new]
    opened = await feed.channel.open(requests, [member.group for member in new if member.group])
    # Not while they join: a cancellation between the two must not lose the name of an open group.
    joins = {member: (address, member.group) for member, address in zip(new, opened, strict=True)}
    for member, (address, _) in joins.items():
        member.group = address.name

    async def join(member: Member) -> None:
        if member in joins:
            address, former = joins[member]
            if former:
                await _leave_group(member, former)
            await member.server.groups.join(address)
            member.channel = feed.channel

    left = await each(join)
    lost = [member for member in joins if member not in left]
    if lost:  # one that comes back joins another group
        await feed.channel.open((), [member.group for member in lost])
        for member in lost:
            member.group = ""
    return left


async def leave_all(members: Sequence[Member], *, timeout_s: float) -> None:
    """Have servers that outlive the pool forget the trainer's groups; a cancellation leaves some of them uninformed."""
    with anyio.move_on_after(timeout_s):
        async with task_group() as tasks:
            for member in members:
                if member.channel is not None:
                    tasks.start_soon(_leave_group, member, member.group)


async def _leave_group(member: Member, group: str) -> None:
    with suppress(ServerError):  # the trainer's end of the group is closed: the server keeps a name and nothing more
        await member.server.groups.leave(group)


async def check_changed(member: Member, expected: ExpectedWeights, held: Mapping[str, str]) -> None:
    """Refuse a server that still reports the digests of its former version, where the trainer cannot compute digests itself.

    Cancellation: a comparison of files continues in its thread, and its result is dropped.
    """
    if member.server.checksum_kind == "agentrl" or member.held is None:
        return
    former, digests = member.held
    if digests != held or former.version == expected.version or former.tensor_checksums == expected.tensor_checksums:
        return
    # Steps smaller than the rounding of bfloat16 leave a server's digests as they were, and rightly so.
    if former.directory is not None and expected.directory is not None:
        paths = Path(former.directory), Path(expected.directory)
        with suppress(WeightSyncError):  # files that are gone prove nothing
            if await anyio.to_thread.run_sync(equal_as_bfloat16, *paths, abandon_on_cancel=True):
                return
    raise WeightSyncError(
        f"{member.url}: took version {expected.version}, but its digests are those of version {former.version}, from which "
        f"the published weights differ ({expected.origin}): it kept its former weights"
    )


def labelled_digest(kind: str, tensors: Mapping[str, str]) -> str:
    """Return one digest of all tensors of a model, from the digest of each, with their kind in front: `agentrl:HEX`."""
    listed = "".join(f"{name} {tensors[name]}\n" for name in sorted(tensors))
    return f"{kind}:{hashlib.blake2b(listed.encode(), digest_size=16).hexdigest()}"


def compare(
    expected: ExpectedWeights,
    digests: Mapping[Member, Mapping[str, str]],
    wanted: Mapping[Member, HeldDigests],
    known: Mapping[str, tuple[str, Mapping[str, str]]] | None = None,
) -> None:
    """Compare the tensors of servers with the `wanted` ones or, where digests are of another kind, with one another.

    `known` has, by kind, the digests of a server that holds the same weights, and its URL. A `WeightSyncError` names the
    server and the first tensor that differs.
    """
    first = dict(known or {})
    for member, held in digests.items():
        kind = member.server.checksum_kind
        if kind == "agentrl":
            peer, right = "the published weights", wanted[member].tensors
            names = sorted(right.keys() | held.keys())
        else:
            peer, right = first.setdefault(kind, (member.url, held))
            names = sorted(right.keys() & held.keys())
        differing = [name for name in names if right.get(name) != held.get(name)]
        if differing:
            hint = ""
            if expected.directory is None and kind == "agentrl":
                hint = f"; it holds weights as {member.server.dtype}: is inference.dtype that?"
            raise WeightSyncError(
                f"{member.url}: after the update to version {expected.version}, {len(differing)} of {len(names)} tensors "
                f"differ from {peer} ({expected.origin}): {', '.join(differing[:3])}{hint}"
            )
