"""One weight update over all servers: pause, load (from files or from the trainer's memory), verify, continue, probe.

Invariants: no server samples with new weights while another that serves still samples with the former ones, so versions
never go back along an episode, wherever its turns are sampled; whatever happens, a server that was paused is told to
continue; a server serves only if its digests agree: an embedded server's with the published ones, SGLang's (of another kind)
with those of the other servers, where the probe says whether they are the published weights; a server whose weights may be
those of two versions, as after an update that was cut off, does not serve before it has taken all of one.

Who waits for what: every server waits, paused, for the slowest to load; each control call has the server's deadline, and
a server that misses it is left out.

Who updates which servers when: updates one after the other, and servers that were left out brought up in between.

Invariant: a server is paused and loaded by one task at a time, which holds its `control`.

Who waits for what: an update waits for the one before it, and for the calls a server's way back is in; where no server
answers, for one that is being started again.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Literal

import anyio
import numpy as np

from agentrl.concurrency import task_group
from agentrl.errors import ServerError, ServerUnavailable, WeightSyncError
from agentrl.inference.backend import Probe, UpdateReport, WeightSource
from agentrl.inference.pool.delivery import Delivery, compare, opened
from agentrl.inference.pool.members import Member, PauseMode, Roster, State

logger = logging.getLogger(__name__)
CLEANUP_S = 3.0
"""Seconds spent on telling paused servers to continue after an error or a cancellation."""


class Update:
    """The state of one update: which servers are paused, and which are proved to have the weights."""

    def __init__(
        self,
        roster: Roster,
        source: WeightSource,
        mode: PauseMode,
        on_failure: Literal["evict", "stop"],
        members: Sequence[Member],
    ) -> None:
        """Begin with no server paused; see `Updater` for the arguments, and `members` are those to update."""
        self._roster, self._source = roster, source
        self._mode: PauseMode = mode
        self._on_failure: Literal["evict", "stop"] = on_failure
        self._alive = list(members)
        self._touched: set[Member] = set()
        self._digests: dict[Member, Mapping[str, str] | None] = {}
        self._failures: dict[Member, Exception] = {}

    async def run(self, probe: Probe | None) -> UpdateReport:
        """Update the servers; see `Inference.update_weights`. Cancellation: see `Updater.update`."""
        members = tuple(self._alive)
        try:
            async with opened(self._source, self._roster, members, self._each, again=False) as delivery:
                began = anyio.current_time()
                await self._each(self._pause)
                await delivery.start(self._alive)
                await self._each(partial(self._load, delivery))
                await delivery.complete(self._alive)
                await self._each(partial(self._check, delivery))
                compare(delivery.delivered, self._digests)
                self._commit()
                await self._each(self._resume)
                pause_s = anyio.current_time() - began
        finally:
            self._settle()
            await _resume_all([member for member in members if member.server.paused])
        difference = None if probe is None else await self._probe(probe)
        return UpdateReport(
            version=self._source.version,
            pause_s=pause_s,
            updated=tuple(member.url for member in self._alive),
            evicted=tuple(member.url for member in self._failures),
            probe_difference=difference,
            num_bytes=delivery.num_bytes,
        )

    async def _pause(self, member: Member) -> None:
        await member.server.pause(self._mode)

    async def _load(self, delivery: Delivery, member: Member) -> None:
        self._touched.add(member)
        await delivery.load(member)
        digests = await member.server.checksums()
        compare(delivery.delivered, {member: digests})
        self._digests[member] = digests

    async def _check(self, delivery: Delivery, member: Member) -> None:
        try:
            delivery.check(member)
        except WeightSyncError:
            del self._digests[member]
            raise

    async def _resume(self, member: Member) -> None:
        await member.server.resume()

    def _commit(self) -> None:
        """From here on the new version is the one that serves; called before any server continues."""
        roster = self._roster
        roster.version, roster.source = self._source.version, self._source
        roster.digests = {}
        for member, digests in self._digests.items():
            if digests is not None and member.server.checksum_kind != "agentrl":
                roster.digests.setdefault(member.server.checksum_kind, (member.url, digests))
        for member in self._alive:
            if member.state is not State.SERVING:
                logger.warning("%s serves again, version %d", member.url, roster.version)
                roster.admit(member)

    def _settle(self) -> None:
        """After an error or a cancellation: let those serve that surely have the same weights."""
        roster = self._roster
        if roster.source is self._source:
            return
        ours = {
            member: digests
            for member, digests in self._digests.items()
            if member.server.checksum_kind == "agentrl" and not roster.away(member)
        }
        if ours:
            self._alive = [member for member in self._alive if member in ours]
            self._commit()
        for member in self._touched - set(ours):
            if member not in self._failures and not roster.away(member):
                roster.evict(member, State.BEHIND, "a weight update was cut off here; which weights it has is not known")
        for member in roster.serving():
            if ours and member not in ours:
                roster.evict(member, State.BEHIND, f"missed the update to version {roster.version}")

    async def _each(self, action: Callable[[Member], Awaitable[None]]) -> Sequence[Member]:
        """Run `action` on all servers still in the update at once; those that fail are evicted, the others returned.

        Raises:
            WeightSyncError: when none is left, or one failed and the policy is to stop.
        """
        async with task_group() as tasks:
            for member in self._alive:
                tasks.start_soon(self._attempt, action, member)
        for member in self._alive:  # its process may have ended while the others were waited for
            if self._roster.away(member) and member not in self._failures:
                self._failures[member] = ServerUnavailable(f"{member.url}: {member.reason}", url=member.url)
        failed = [member for member in self._alive if member in self._failures]
        self._alive = [member for member in self._alive if member not in self._failures]
        if failed and (not self._alive or self._on_failure == "stop"):
            why = "; ".join(f"{member.url}: {self._failures[member]}" for member in failed)
            what = "no server holds" if not self._alive else "not every server holds"
            raise WeightSyncError(f"{what} version {self._source.version}: {why}") from self._failures[failed[0]]
        return self._alive

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
                f"{worst.url}: with version {self._source.version}, log-probs of the probe differ from the trainer's "
                f"by up to {differences[worst]:.2e} nats, tolerance {probe.tolerance:.0e}: the server does not compute what "
                "the trainer trains (other weights, another dtype, or another attention kernel?)"
            )
        return differences[worst]


async def _resume_all(members: Sequence[Member]) -> None:
    async with task_group() as tasks:
        for member in members:
            tasks.start_soon(resume_quietly, member)


async def resume_quietly(member: Member) -> None:
    """Tell a server to continue when the reason for stopping is being reported already."""
    with anyio.move_on_after(CLEANUP_S, shield=True):
        try:
            await member.server.resume()
        except ServerUnavailable:
            return  # it died: nothing is left to continue
        except ServerError as error:
            member.reason = f"{member.reason}; it was not continued either: {error}"


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

    async def update(self, source: WeightSource, probe: Probe | None) -> UpdateReport:
        """Give all servers the published weights; see `Inference.update_weights`. A second update waits for the first.

        Raises:
            WeightSyncError: see `Inference.update_weights`; also for a version below the current one.

        Cancellation: paused servers are continued. If some have the new weights already, those serve, and the others are
        brought up to them by the pool.
        """
        roster = self._roster
        async with self._lock:
            if source.version < roster.version:
                raise WeightSyncError(f"version {source.version} is older than the servers' version {roster.version}")
            failure: WeightSyncError | None = None
            while True:
                members = await self._answering(source, failure)
                try:
                    return await self._update(members, source, probe)
                except WeightSyncError as error:
                    lost = all(roster.away(member) for member in roster.members)
                    if self._on_failure == "stop" or not lost or not await roster.starting():
                        raise
                    failure = error

    async def _answering(self, source: WeightSource, failure: WeightSyncError | None) -> list[Member]:
        """Return the servers to update; while none answers, wait for one that is being started again.

        Raises:
            WeightSyncError: none is: `failure`, or that there is no server.
        """
        roster = self._roster
        while not (members := [member for member in roster.members if not roster.away(member)]):
            try:
                await roster.hope()
            except ServerUnavailable as error:
                none = WeightSyncError(f"no server to give version {source.version}: {roster.reasons()}")
                raise failure or none from error
        return members

    async def _update(self, members: list[Member], source: WeightSource, probe: Probe | None) -> UpdateReport:
        roster = self._roster
        self.running = True
        roster.target = source.version
        try:
            await self._take_over(members)
            return await Update(roster, source, self._mode, self._on_failure, members).run(probe)
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
                target = roster.source
                with anyio.CancelScope() as member.catch_up:
                    await self._bring_up(member, target)
                cancelled, member.catch_up = member.catch_up.cancelled_caught, None
                if not cancelled and not self.running and roster.source is target:
                    roster.admit(member)

    async def _bring_up(self, member: Member, target: WeightSource | None) -> None:
        roster, server = self._roster, member.server
        if target is None:
            version = await server.check()
            if version != roster.version:
                raise WeightSyncError(
                    f"{member.url}: has version {version}, the others {roster.version}, and no weights have been "
                    "published yet that it could be given"
                )
            return

        async def each(action: Callable[[Member], Awaitable[None]]) -> Sequence[Member]:
            await action(member)
            return [member]

        try:
            async with opened(target, roster, [member], each, again=True) as delivery:
                await server.pause(self._mode)
                await delivery.start([member])
                await delivery.load(member)
                await delivery.complete([member])
                delivery.check(member)
                compare(delivery.delivered, {member: await server.checksums()}, roster.digests)
                await server.resume()
        finally:
            if server.paused:
                await resume_quietly(member)
