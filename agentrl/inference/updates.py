"""One weight update over all servers: pause, load, verify, continue, probe.

Invariants: no server samples with new weights while another that serves still samples with the former ones, so versions
never go back along an episode, wherever its turns are sampled; whatever happens, a server that was paused is told to
continue; a server serves only if its digests agree: an embedded server's with the published ones, SGLang's (of another kind)
with those of the other servers, where the probe says whether they are the published weights.

Who waits for what: every server waits, paused, for the slowest to load; each control call has the server's deadline, and
a server that misses it is left out.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Literal

import anyio
import numpy as np

from agentrl.errors import ServerError, ServerUnavailable, WeightSyncError
from agentrl.inference.base import Probe, UpdateReport
from agentrl.inference.roster import Member, PauseMode, Roster, State
from agentrl.inference.scope import task_group
from agentrl.types import Publication

CLEANUP_S = 3.0
"""Seconds spent on telling paused servers to continue after an error or a cancellation."""


class Updater:
    """Changes the weights of a roster's servers, one update at a time."""

    def __init__(self, roster: Roster, *, mode: PauseMode, on_failure: Literal["evict", "stop"]) -> None:
        """Begin with no update running.

        Args:
            roster: the servers.
            mode: how they are paused.
            on_failure: whether a server that fails is left out or ends the update.
        """
        self._roster = roster
        self._mode: PauseMode = mode
        self._on_failure: Literal["evict", "stop"] = on_failure
        self._lock = anyio.Lock()  # two callers of `update`
        self.running = False

    async def update(self, publication: Publication, probe: Probe | None) -> UpdateReport:
        """Give all servers the published weights; see `Inference.update_weights`. A second update waits for the first.

        Raises:
            WeightSyncError: see `Inference.update_weights`; also for a version below the current one.

        Cancellation: paused servers are continued. If some have the new weights already, those serve, and the others are
        brought up to them by the pool.
        """
        roster = self._roster
        async with self._lock:
            if publication.version < roster.version:
                raise WeightSyncError(f"version {publication.version} is older than the servers' version {roster.version}")
            members = [member for member in roster.members if member.state is not State.DEAD]
            if not members:
                raise WeightSyncError(f"no server to give version {publication.version}: {roster.reasons()}")
            self.running = True
            roster.target = publication.version
            try:
                await self._take_over(members)
                return await _Update(roster, publication, self._mode, self._on_failure, members).run(probe)
            finally:
                self.running = False
                roster.target = roster.version
                for member in members:
                    member.control.release()
                for member in roster.members:
                    if member.state is not State.SERVING:
                        member.wake.set()

    async def _take_over(self, members: list[Member]) -> None:
        held: list[Member] = []
        try:
            for member in members:
                if member.catch_up is not None:
                    member.catch_up.cancel()
                await member.control.acquire()
                held.append(member)
        except BaseException:
            members[:] = held
            raise

    async def catch_up(self, member: Member) -> None:
        """Give an evicted server the current weights and let it serve; an update that starts meanwhile takes over.

        Raises:
            ServerError, WeightSyncError: the server does not serve.

        Cancellation: the server is continued and does not serve.
        """
        roster = self._roster
        async with member.control:
            while not self.running and member.state is not State.SERVING:
                target = roster.publication
                with anyio.CancelScope() as member.catch_up:
                    await self._bring_up(member, target)
                cancelled, member.catch_up = member.catch_up.cancelled_caught, None
                if not cancelled and not self.running and roster.publication is target:
                    roster.admit(member)

    async def _bring_up(self, member: Member, target: Publication | None) -> None:
        if target is None:
            version = await member.server.check()
            if version != self._roster.version:
                raise WeightSyncError(
                    f"{member.url}: has version {version}, the others {self._roster.version}, and no weights have been "
                    "published yet that it could be given"
                )
            return
        try:
            await member.server.pause(self._mode)
            await member.server.load_weights(target)
            compare(target, {member: await member.server.checksums()})
            await member.server.resume()
        finally:
            if member.server.paused:
                await _resume_quietly(member)


class _Update:
    """The state of one update: which servers are paused, and which are proved to have the weights."""

    def __init__(
        self,
        roster: Roster,
        publication: Publication,
        mode: PauseMode,
        on_failure: Literal["evict", "stop"],
        members: Sequence[Member],
    ) -> None:
        self._roster, self._publication = roster, publication
        self._mode: PauseMode = mode
        self._on_failure: Literal["evict", "stop"] = on_failure
        self._alive = list(members)
        self._touched: set[Member] = set()
        self._digests: dict[Member, Mapping[str, str] | None] = {}
        self._failures: dict[Member, Exception] = {}

    async def run(self, probe: Probe | None) -> UpdateReport:
        version, members = self._publication.version, tuple(self._alive)
        began = anyio.current_time()
        try:
            await self._each(self._pause)
            await self._each(self._load)
            compare(self._publication, self._digests)
            self._commit()
            await self._each(self._resume)
            pause_s = anyio.current_time() - began
        finally:
            self._settle()
            await _resume_all([member for member in members if member.server.paused])
        difference = None if probe is None else await self._probe(probe)
        return UpdateReport(
            version=version,
            pause_s=pause_s,
            updated=tuple(member.url for member in self._alive),
            evicted=tuple(member.url for member in self._failures),
            probe_difference=difference,
        )

    async def _pause(self, member: Member) -> None:
        await member.server.pause(self._mode)

    async def _load(self, member: Member) -> None:
        self._touched.add(member)
        await member.server.load_weights(self._publication)
        digests = await member.server.checksums()
        compare(self._publication, {member: digests})
        self._digests[member] = digests

    async def _resume(self, member: Member) -> None:
        await member.server.resume()

    def _commit(self) -> None:
        """From here on the new version is the one that serves; called before any server continues."""
        roster = self._roster
        roster.version, roster.publication = self._publication.version, self._publication
        for member in self._alive:
            if member.state is not State.SERVING:
                roster.admit(member)

    def _settle(self) -> None:
        """After an error or a cancellation: let those serve that surely have the same weights."""
        roster = self._roster
        if roster.publication is self._publication:
            return
        ours = {member: digests for member, digests in self._digests.items() if member.server.checksum_kind == "agentrl"}
        if ours:
            self._alive = [member for member in self._alive if member in ours]
            self._commit()
        for member in self._touched - set(ours):
            if member not in self._failures:
                roster.evict(member, State.BEHIND, "a weight update was cut off here; which weights it has is not known")
        for member in roster.serving():
            if ours and member not in ours:
                roster.evict(member, State.BEHIND, f"missed the update to version {roster.version}")

    async def _each(self, action: Callable[[Member], Awaitable[None]]) -> None:
        """Run `action` on all servers still in the update at once; those that fail are evicted.

        Raises:
            WeightSyncError: when none is left, or one failed and the policy is to stop.
        """
        async with task_group() as tasks:
            for member in self._alive:
                tasks.start_soon(self._attempt, action, member)
        failed = [member for member in self._alive if member in self._failures]
        self._alive = [member for member in self._alive if member not in self._failures]
        if failed and (not self._alive or self._on_failure == "stop"):
            why = "; ".join(f"{member.url}: {self._failures[member]}" for member in failed)
            what = "no server holds" if not self._alive else "not every server holds"
            raise WeightSyncError(f"{what} version {self._publication.version}: {why}") from self._failures[failed[0]]

    async def _attempt(self, action: Callable[[Member], Awaitable[None]], member: Member) -> None:
        try:
            await action(member)
        except (ServerError, WeightSyncError) as error:
            self._failures[member] = error
            answered = isinstance(error, WeightSyncError) or (error.status is not None)
            self._roster.evict(member, State.BEHIND if answered else State.DEAD, str(error))

    async def _probe(self, probe: Probe) -> float:
        """Return the largest difference of any server's log-probs from the trainer's."""
        differences: dict[Member, float] = {}

        async def measure(member: Member) -> None:
            scores = await member.server.score(probe.token_ids)
            differences[member] = float(np.abs(scores - probe.logprobs).max())

        await self._each(measure)
        worst = max(differences, key=lambda member: differences[member])
        if not differences[worst] <= probe.tolerance:
            raise WeightSyncError(
                f"{worst.url}: with version {self._publication.version}, log-probs of the probe differ from the trainer's "
                f"by up to {differences[worst]:.2e} nats, tolerance {probe.tolerance:.0e}: the server does not compute what "
                "the trainer trains (other weights, another dtype, or another attention kernel?)"
            )
        return differences[worst]


def compare(publication: Publication, digests: Mapping[Member, Mapping[str, str] | None]) -> None:
    """Compare what servers hold with what was published, or, where digests are of another kind, with one another.

    Raises:
        WeightSyncError: naming the servers and the first tensors that differ.
    """
    first: dict[str, tuple[str, Mapping[str, str]]] = {}
    for member, held in digests.items():
        if held is None:
            continue
        kind = member.server.checksum_kind
        if kind == "agentrl":
            peer, expected = "the published weights", publication.tensor_checksums
            names = sorted(expected.keys() | held.keys())
        else:
            peer, expected = first.setdefault(kind, (member.url, held))
            names = sorted(expected.keys() & held.keys())
        differing = [name for name in names if expected.get(name) != held.get(name)]
        if differing:
            raise WeightSyncError(
                f"{member.url}: after the update to version {publication.version}, {len(differing)} of {len(names)} tensors "
                f"differ from {peer} ({publication.path}): {', '.join(differing[:3])}"
            )


async def _resume_all(members: Sequence[Member]) -> None:
    async with task_group() as tasks:
        for member in members:
            tasks.start_soon(_resume_quietly, member)


async def _resume_quietly(member: Member) -> None:
    """Tell a server to continue when the reason for stopping is being reported already."""
    with anyio.move_on_after(CLEANUP_S, shield=True):
        try:
            await member.server.resume()
        except ServerUnavailable:
            return  # it died: nothing is left to continue
        except ServerError as error:
            member.reason = f"{member.reason}; it was not continued either: {error}"
