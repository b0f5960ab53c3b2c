"""Who updates which servers when: updates one after the other, and servers that were left out brought up in between.

Invariant: a server is paused and loaded by one task at a time, which holds its `control`.

Who waits for what: an update waits for the one before it, and for the calls a server's way back is in; where no server
answers, for one that is being started again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Literal

import anyio

from agentrl.errors import ServerUnavailable, WeightSyncError
from agentrl.inference.base import Probe, UpdateReport, WeightSource
from agentrl.inference.delivery import compare, opened
from agentrl.inference.roster import Member, PauseMode, Roster, State
from agentrl.inference.update import Update, resume_quietly


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
