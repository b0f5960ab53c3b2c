"""A weight update: pause, load, compare, resume; the servers that take part, and one update after the other.

Invariant: a server that continues holds the version that it names, tensor by tensor where its digests are comparable. A
server that may hold a mixture, as after an interrupted update, does not serve before it has taken a whole version. One task
at a time pauses and loads a server, and holds its `control`.

Who waits for whom: every server waits, paused, for the slowest to load. An update waits for the one before it, for the
control call of a server that is catching up, and, where no server answers, for one that starts again or, at most
`inference.control_timeout_s`, for one that others run. Each control call has a deadline; a server that misses it is evicted.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple

import anyio
import numpy as np

from agentrl.errors import ServerError, ServerUnavailable, WeightSyncError
from agentrl.inference.backend import Probe, UpdateReport, WeightSource
from agentrl.inference.pool.members import Member, Members, PauseMode, State, ask_member
from agentrl.inference.pool.transfer import (
    Each,
    HeldDigests,
    WeightTransfer,
    check_changed,
    compare,
    labelled_digest,
    open_transfer,
)
from agentrl.support.concurrency import task_group

logger = logging.getLogger(__name__)
CLEANUP_S = 3.0
"""Seconds that the pool spends on continuing paused servers after an error or a cancellation."""


class SwapReport(NamedTuple):
    """When and how long servers paused, and what each was sent."""

    pause_after_s: float
    """Seconds from the beginning of the swap to the first pause."""
    pause_s: float
    """Seconds from the first pause to the last continue; 0 where servers did not pause."""
    num_bytes: int | None
    """Bytes sent to each server; None where servers read files."""
    trainer_digest: str
    """Digest of the weights that servers were to take, after its kind: `agentrl:HEX`."""
    server_digests: Mapping[str, str]
    """The same of the weights in each server that took them, by its URL."""


class WeightSwap:
    """A version on its way into some servers, by the one sequence in which the pool changes weights."""

    def __init__(self, members: Members, source: WeightSource, mode: PauseMode, *, retries: int) -> None:
        self._members, self._source, self._retries = members, source, retries
        self._mode: PauseMode = mode
        self.touched: set[Member] = set()
        """Servers that may hold a part of the version."""
        self.digests: dict[Member, Mapping[str, str]] = {}
        """Reported by the servers that have loaded the version, and equal to the wanted ones where comparable."""
        self.wanted: dict[Member, HeldDigests] = {}

    async def run(self, chosen: Sequence[Member], each: Each, commit: Callable[[], None], *, again: bool) -> SwapReport:
        """Pause, load, compare and resume; return when and how long servers paused, and the bytes sent to each.

        Args:
            chosen: the servers.
            each: applies an action to all servers that are left.
            commit: called once every server left is proved to hold the version, before any of them continues.
            again: other servers have taken this version before; their digests count too.
        """
        known = self._members.digests if again else None
        entered = anyio.current_time()
        async with open_transfer(self._source, chosen, each, again=again) as transfer:
            began = anyio.current_time()
            await transfer.start(await each(partial(self._pause, transfer)))
            await transfer.complete(await each(partial(self._load, transfer)))
            await each(partial(self._check, transfer))
            compare(transfer.expected, self.digests, self.wanted, known)
            # Before any server continues: from its first token on, the pool must know the version that it samples with.
            commit()
            await each(partial(self._resume, transfer))
            return SwapReport(
                pause_after_s=began - entered,
                pause_s=anyio.current_time() - began if transfer.pauses else 0.0,
                num_bytes=transfer.num_bytes,
                trainer_digest=self._trainer_digest(transfer),
                server_digests={member.url: self._digest_of(member, held) for member, held in self.digests.items()},
            )

    def _trainer_digest(self, transfer: WeightTransfer) -> str:
        """Return the digest of the weights, in the type of the servers where one server is of agentrl's."""
        ours = [self.wanted[member] for member in self.digests if member.server.checksum_kind == "agentrl"]
        return labelled_digest(*(ours[0] if ours else HeldDigests("agentrl", transfer.expected.tensor_checksums)))

    def _digest_of(self, member: Member, held: Mapping[str, str]) -> str:
        kind = member.server.checksum_kind
        return labelled_digest(self.wanted[member].kind if kind == "agentrl" else kind, held)

    async def _pause(self, transfer: WeightTransfer, member: Member) -> None:
        if transfer.pauses:
            await ask_member(member, lambda: member.server.pause(self._mode), retries=self._retries)

    async def _load(self, transfer: WeightTransfer, member: Member) -> None:
        self.touched.add(member)
        if transfer.may_load_twice:
            await ask_member(member, lambda: transfer.load(member), retries=self._retries)
        else:
            await transfer.load(member)
        digests = await ask_member(member, lambda: transfer.digests(member), retries=self._retries)
        self.wanted[member] = await transfer.wanted(member)
        compare(transfer.expected, {member: digests}, self.wanted)
        if transfer.pauses:  # the weights below an adapter stay as they are
            await check_changed(member, transfer.expected, digests)
        await ask_member(member, lambda: transfer.serve(member), retries=self._retries)
        self.digests[member] = digests
        member.held = transfer.expected, digests

    async def _check(self, transfer: WeightTransfer, member: Member) -> None:
        try:
            transfer.check(member)
        except WeightSyncError:
            del self.digests[member]
            raise

    async def _resume(self, transfer: WeightTransfer, member: Member) -> None:
        if transfer.pauses:
            await ask_member(member, member.server.resume, retries=self._retries)


async def resume_paused(members: Sequence[Member]) -> None:
    """Continue the servers that are still paused after an error or a cancellation, within `CLEANUP_S`."""
    async with task_group() as tasks:
        for member in members:
            if member.server.paused and not member.frozen.is_set():  # a frozen one continues when it is brought back
                tasks.start_soon(_resume_quietly, member)


async def _resume_quietly(member: Member) -> None:
    with anyio.move_on_after(CLEANUP_S, shield=True):
        try:
            await member.server.resume()
        except ServerUnavailable:
            return  # it died: nothing is left to continue
        except ServerError as error:
            member.reason = f"{member.reason}; and it did not continue: {error}"


class Update:
    """An update of all servers: those that fail are evicted, and the others continue without them."""

    def __init__(
        self,
        members: Members,
        source: WeightSource,
        mode: PauseMode,
        on_failure: Literal["evict", "stop"],
        chosen: Sequence[Member],
        *,
        retries: int,
    ) -> None:
        self._members, self._source, self._retries = members, source, retries
        self._on_failure: Literal["evict", "stop"] = on_failure
        self._swap = WeightSwap(members, source, mode, retries=retries)
        self._left = list(chosen)
        self._failures: dict[Member, Exception] = {}

    async def run(self, probe: Probe | None) -> UpdateReport:
        chosen = tuple(self._left)
        try:
            swap = await self._swap.run(chosen, self._each, self._commit, again=False)
        finally:
            # Before servers continue: one whose weights are not known must not get a call.
            self._settle()
            await resume_paused(chosen)
        difference = None if probe is None else await self._probe(probe)
        return UpdateReport(
            version=self._source.version,
            pause_after_s=swap.pause_after_s,
            pause_s=swap.pause_s,
            updated=tuple(member.url for member in self._left),
            evicted=tuple(member.url for member in self._failures),
            probe_difference=difference,
            num_bytes=swap.num_bytes,
            trainer_digest=swap.trainer_digest,
            server_digests=swap.server_digests,
        )

    def _commit(self) -> None:
        """Make the new version the one that serves; called before any server continues."""
        members = self._members
        members.version, members.source = self._source.version, self._source
        members.digests = {}
        for member, digests in self._swap.digests.items():
            if member.server.checksum_kind != "agentrl":
                members.digests.setdefault(member.server.checksum_kind, (member.url, digests))
        for member in self._left:
            if member.state is not State.SERVING:
                logger.warning("%s serves again, version %d", member.url, members.version)
                members.admit(member)

    def _settle(self) -> None:
        """After an error or a cancellation, leave only servers that surely hold the same weights."""
        members = self._members
        # The swap was committed, so every server that is left has the new weights, whatever failed afterwards.
        if members.source is self._source:
            return
        # Digests of agentrl's kind prove a server's weights by themselves; others only compare servers with each other.
        proved = {
            member
            for member in self._swap.digests
            if member.server.checksum_kind == "agentrl" and not members.unreachable(member)
        }
        if proved:
            # Forward, not back: the former weights of these servers are overwritten.
            self._left = [member for member in self._left if member in proved]
            self._commit()
        for member in self._swap.touched - proved:
            if member not in self._failures and not members.unreachable(member):
                members.evict(member, State.BEHIND, "a weight update ended here too early; its weights are not known")
        for member in members.serving():
            if proved and member not in proved:
                members.evict(member, State.BEHIND, f"missed the update to version {members.version}")

    async def _each(self, action: Callable[[Member], Awaitable[None]]) -> Sequence[Member]:
        """Run `action` on all servers left at once; evict those that fail, and return the others."""
        async with task_group() as tasks:
            for member in self._left:
                tasks.start_soon(self._attempt, action, member)
        for member in self._left:  # its process may have ended while the update waited for the others
            if self._members.unreachable(member) and member not in self._failures:
                self._failures[member] = ServerUnavailable(f"{member.url}: {member.reason}", url=member.url)
        failed = [member for member in self._left if member in self._failures]
        self._left = [member for member in self._left if member not in self._failures]
        if failed and (not self._left or self._on_failure == "stop"):
            why = "; ".join(f"{member.url}: {self._failures[member]}" for member in failed)
            what = "no server holds" if not self._left else "not every server holds"
            raise WeightSyncError(f"{what} version {self._source.version}: {why}") from self._failures[failed[0]]
        return self._left

    async def _attempt(self, action: Callable[[Member], Awaitable[None]], member: Member) -> None:
        try:
            with anyio.CancelScope() as member.control_wait:
                await action(member)
            if member.control_wait.cancelled_caught:
                raise ServerUnavailable(f"{member.url}: evicted during the update: {member.reason}", url=member.url)
        except (ServerError, WeightSyncError) as error:
            self._failures[member] = error
            # A server that answered, if only with an error, is alive and gets its weights later; another must first
            # show life.
            answered = isinstance(error, WeightSyncError) or error.status is not None or error.url is None
            self._members.evict(member, State.BEHIND if answered else State.DEAD, str(error))
        finally:
            member.control_wait = None

    async def _probe(self, probe: Probe) -> float:
        """Return the largest difference of any server's log-probs from the trainer's, nats."""
        largest: dict[Member, float] = {}
        wrong: dict[Member, str] = {}

        async def measure(member: Member) -> None:
            scores = await ask_member(member, lambda: member.server.score(probe.token_ids), retries=self._retries)
            differences = np.abs(scores - probe.logprobs)
            largest[member] = float(differences.max())
            if (excess := probe.tolerance.excess(differences)) is not None:
                wrong[member] = excess

        await self._each(measure)
        if wrong:
            worst = max(wrong, key=lambda member: largest[member])
            raise WeightSyncError(
                f"{worst.url}: with version {self._source.version}, log-probs of the probe differ from the trainer's by "
                f"{wrong[worst]}: the server does not compute what the trainer trains (other weights, another dtype, or "
                "another attention kernel?)"
            )
        return max(largest.values())


class Updater:
    """Changes the weights of a pool's servers, one update at a time."""

    def __init__(
        self,
        members: Members,
        *,
        mode: PauseMode,
        on_failure: Literal["evict", "stop"],
        patience_s: float,
        retries: int,
    ) -> None:
        self._members, self._retries = members, retries
        self._mode: PauseMode = mode
        self._on_failure: Literal["evict", "stop"] = on_failure
        self._patience_s = patience_s
        self._lock = anyio.Lock()  # `update` may have two callers
        self.running = False

    async def update(self, source: WeightSource, probe: Probe | None = None) -> UpdateReport:
        """Pause, load, compare and resume on every server. A second update waits for the first.

        Raises:
            WeightSyncError: no server, or by policy not every server, holds exactly the published weights; the log-probs of
                the probe differ from the trainer's by more than its tolerance; or the version is below the current one.

        Cancellation: continues paused servers within `CLEANUP_S`. Servers that have the new weights already serve, and the
            pool brings the others to the same version.
        """
        members = self._members
        async with self._lock:
            if source.version < members.version:
                raise WeightSyncError(f"version {source.version} is older than the servers' version {members.version}")
            failure: WeightSyncError | None = None
            until: float | None = None
            while True:
                chosen = await self._answering(source, failure, until)
                try:
                    report = await self._update(chosen, source, probe)
                except WeightSyncError as error:
                    lost = all(members.unreachable(member) for member in members.all)
                    if self._on_failure == "stop" or not lost or not (members.may_return() or await members.any_starting()):
                        raise
                    # The patience runs from the first loss; an update that is tried again does not extend it.
                    failure, until = error, until or anyio.current_time() + self._patience_s
                else:
                    break
        for member in members.all:
            if member.url in report.evicted:
                logger.warning("update to version %d continues without %s: %s", report.version, member.url, member.reason)
        return report

    async def _answering(self, source: WeightSource, failure: WeightSyncError | None, until: float | None) -> list[Member]:
        """Return the servers to update; while none answers, wait for one that starts again or returns by `until`."""
        members = self._members
        until = until or anyio.current_time() + self._patience_s
        while not (chosen := [member for member in members.all if not members.unreachable(member)]):
            try:
                await members.wait_for_change()
            except ServerUnavailable as error:
                waited = ""
                if self._on_failure == "evict" and members.may_return():
                    waited = f"; none answered again within inference.control_timeout_s = {self._patience_s:g}"
                    logger.warning("version %d waits for a server that answers: %s", source.version, members.reasons())
                    if await members.any_returned(until):
                        continue
                none = WeightSyncError(f"no server to give version {source.version}: {members.reasons()}")
                raise WeightSyncError(f"{failure or none}{waited}") from failure or error
        return chosen

    async def _update(self, chosen: list[Member], source: WeightSource, probe: Probe | None) -> UpdateReport:
        members = self._members
        self.running = True
        members.target = source.version
        try:
            await self._acquire_control(chosen)
            return await Update(members, source, self._mode, self._on_failure, chosen, retries=self._retries).run(probe)
        finally:
            self.running = False
            # The new version after a success, the former one after an error: tokens of a failed version are refused.
            members.target = members.version
            for member in chosen:
                member.control.release()
            for member in members.all:
                # No server is brought back while an update runs; those that came meanwhile get their turn now.
                if member.state is not State.SERVING:
                    member.wake.set()

    async def _acquire_control(self, chosen: list[Member]) -> None:
        held: list[Member] = []
        try:
            for member in chosen:
                # The update gives this server newer weights than its own catching up would.
                if member.catch_up is not None:
                    member.catch_up.cancel()
                await member.control.acquire()
                held.append(member)
        except BaseException:
            # The caller releases the locks of `chosen`: exactly those that this task holds.
            chosen[:] = held
            raise

    async def catch_up(self, member: Member) -> None:
        """Give an evicted server the current weights and let it serve; an update that starts meanwhile takes over.

        Cancellation: continues the server, which does not serve.
        """
        members = self._members
        async with member.control:
            while not self.running and member.state is not State.SERVING:
                target = members.source
                with anyio.CancelScope() as member.catch_up:
                    await self._bring_up(member, target)
                cancelled, member.catch_up = member.catch_up.cancelled_caught, None
                # Weights that were published during the load make the server late again; the loop then gives it those.
                if not cancelled and not self.running and members.source is target:
                    members.admit(member)

    async def _bring_up(self, member: Member, target: WeightSource | None) -> None:
        members = self._members
        # Before the first update there are no weights to give, so the server can only be compared.
        if target is None:
            version = await member.server.check()
            if version != members.version:
                raise WeightSyncError(
                    f"{member.url}: has version {version}, the other servers have {members.version}, and the pool has no "
                    "published weights to give it"
                )
            return

        async def each(action: Callable[[Member], Awaitable[None]]) -> Sequence[Member]:
            await action(member)
            return [member]

        try:
            swap = WeightSwap(members, target, self._mode, retries=self._retries)
            await swap.run([member], each, lambda: None, again=True)
        finally:
            await resume_paused([member])
