"""The publications of a run, one after the other, each before the trainer's next step or beside it.

Invariant: the clock ticks once for each publication, when every serving server holds the trainer's weights of that version.
A publication begins after the one before has ended; at most one runs.

Beside the trainer (`engine.overlap_publication`) the trainer waits until its weights are copied. Then it trains the next
batch while the servers load them. An error of the servers reaches the trainer when its step has ended, or at once if it
waits for a batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import anyio
from anyio.abc import TaskGroup

from agentrl.engine.buffer import VersionClock
from agentrl.engine.journal import Journal
from agentrl.engine.publishing.publisher import HeldVersion, PublishReport, SyncCost, WeightPublisher
from agentrl.errors import AgentRLError
from agentrl.observe.stall import StallTimer, WaitBoard


class Publications:
    """Publishes the trainer's weights each time that they have changed."""

    def __init__(
        self,
        *,
        weights: WeightPublisher,
        clock: VersionClock,
        journal: Journal,
        board: WaitBoard,
        watchdog: StallTimer,
        on_failure: Callable[[], None],
    ) -> None:
        """Begin with none; the arguments are the parts that `Engine` makes.

        `on_failure` is called when a publication beside the trainer fails, so that nothing waits for the next batch.
        """
        self._weights, self._clock, self._on_failure = weights, clock, on_failure
        self._journal, self._board, self._watchdog = journal, board, watchdog
        self._ended: anyio.Event | None = None
        """Of the publication beside the trainer, until `finish` has been called; None: there is none."""
        self._error: AgentRLError | None = None
        self._report: PublishReport | None = None
        self._waited_s = 0.0

    async def first(self) -> None:
        """Put the weights with which the run begins on every server, as the version at which the clock stands.

        Raises:
            TrainError, WeightSyncError, ServerError: when the weights did not arrive.
            RunStopped: when the disk refuses the record of it.

        Cancellation: servers may have either version.
        """
        await self._send(await self._hold(self._clock.version), who="the trainer", beside=False)
        self.take_cost()

    async def begin(self, tasks: TaskGroup, *, beside: bool) -> None:
        """Publish the weights after a step as the next version, once the publication before has ended.

        Args:
            tasks: where the publication runs beside the trainer; it must be over before this group is.
            beside: return when the trainer may step, if it keeps a snapshot; otherwise when every server has the weights.

        Raises:
            TrainError, WeightSyncError, ServerError: when these weights, or those before, did not arrive.
            RunStopped: when the disk refuses the record of it.

        Cancellation: servers may have either version.
        """
        await self.finish()
        self._clock.stepped()
        begin = time.perf_counter()
        try:
            held = await self._hold(self._clock.trainer_version)
            if beside and held.stays:
                self._ended = anyio.Event()
                tasks.start_soon(self._send_beside, held, self._ended)
            else:
                await self._send(held, who="the trainer", beside=False)
                self._clock.tick(held.version)
        finally:
            self._waited_s += time.perf_counter() - begin

    async def finish(self) -> None:
        """Return when no publication runs.

        Raises:
            TrainError, WeightSyncError, ServerError, RunStopped: the one that ran failed.

        Cancellation: it continues.
        """
        if self._ended is None:
            return
        begin = time.perf_counter()
        waiting = self._board.waiting("the trainer", f"the publication of version {self._clock.trainer_version} to end")
        with waiting, self._journal.during("trainer", "wait_for_servers"):
            await self._ended.wait()
        self._waited_s += time.perf_counter() - begin
        self._ended = None
        if self._error is not None:
            raise self._error

    def take_cost(self) -> SyncCost:
        """Return the cost since the last call."""
        cost = SyncCost(self._report, self._waited_s)
        self._report, self._waited_s = None, 0.0
        return cost

    async def _hold(self, version: int) -> HeldVersion:
        self._journal.publishing(version)
        with self._board.waiting("the trainer", f"its worker to copy the weights of version {version}"):
            return await self._weights.hold(version)

    async def _send(self, held: HeldVersion, *, who: str, beside: bool) -> None:
        with self._board.waiting(who, f"the servers to take version {held.version}"):
            self._report = await self._weights.send(held, beside=beside)
        self._journal.published(time.perf_counter(), self._report)
        self._watchdog.progress()

    async def _send_beside(self, held: HeldVersion, ended: anyio.Event) -> None:
        try:
            await self._send(held, who="a publication", beside=True)
            self._clock.tick(held.version)
        except AgentRLError as error:
            self._error = error
            self._on_failure()
        finally:
            ended.set()
