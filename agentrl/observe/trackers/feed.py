"""The way from a run to its trackers: a queue and a thread for each.

Invariant: a tracker never delays or ends the run. One that raises, or falls `max_pending` calls behind, is reported once and
left out; if it had started, it is finished as failed. `close` waits at most `finish_timeout_s` seconds.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

import anyio
import anyio.to_thread

from agentrl.episode.summary import MetricValue, Purpose
from agentrl.observe.timeline import Activity
from agentrl.observe.trackers.base import RunStatus, TrackedRun, Tracker
from agentrl.observe.trackers.sample import Chosen, Decode, choose_episodes
from agentrl.types import Trajectory

logger = logging.getLogger(__name__)

MAX_TRACKER_CALLS = 4096
"""Calls that may wait for a tracker."""
FINISH_TIMEOUT_S = 10.0
"""Seconds that the end of a run waits for its trackers."""


class _Lane:
    """One tracker, the calls that wait for it, and the thread that makes them."""

    def __init__(self, name: str, tracker: Tracker, max_pending: int) -> None:
        self.name, self.tracker = name, tracker
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(max_pending)
        self._left_out = threading.Event()
        self._has_started = self._has_finished = False
        self.thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)

    def put(self, call: Callable[[], None] | None) -> None:
        if self._left_out.is_set():
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._leave_out(f"it is {self._calls.maxsize} records behind")

    @property
    def is_late(self) -> bool:
        """Whether the thread still works for a tracker that was not left out."""
        return self.thread.is_alive() and not self._left_out.is_set()

    def start(self, run: TrackedRun) -> None:
        self.put(partial(self._start, run))
        self.thread.start()

    def finish(self, status: RunStatus) -> None:
        self.put(partial(self._finish, status))
        self.put(None)

    def _start(self, run: TrackedRun) -> None:
        self.tracker.start(run)
        self._has_started = True

    def _finish(self, status: RunStatus) -> None:
        self._has_finished = True
        self.tracker.finish(status)

    def _work(self) -> None:
        self._make_calls()
        if self._has_started and not self._has_finished:
            with suppress(BaseException):  # that the tracker fails is reported already
                self._finish("failed")

    def _make_calls(self) -> None:
        while not self._left_out.is_set():
            call = self._calls.get()
            if call is None:
                return
            try:
                call()
            except BaseException as error:  # noqa: BLE001 - foreign code must not end the run, nor this thread by sys.exit
                self._leave_out(f"{type(error).__name__}: {error}")

    def _leave_out(self, why: str) -> None:
        self._left_out.set()
        logger.warning("tracker %s: %s. The run continues without it; metrics.jsonl has everything", self.name, why)


class TrackerFeed:
    """Hands the records of a run to its trackers; every method but `close` returns at once."""

    def __init__(
        self,
        trackers: Mapping[str, Tracker],
        run: TrackedRun,
        *,
        samples: int,
        decode: Decode,
        max_pending: int = MAX_TRACKER_CALLS,
        finish_timeout_s: float = FINISH_TIMEOUT_S,
    ) -> None:
        """Take the trackers, which `start` starts; `samples` episodes of each step and evaluation go to them as text."""
        self._finish_timeout_s = finish_timeout_s
        self._lanes = [_Lane(name, tracker, max_pending) for name, tracker in trackers.items()]
        self._run, self._samples, self._decode = run, samples, decode

    def start(self) -> None:
        """Start each tracker in a thread of its own."""
        for lane in self._lanes:
            lane.start(self._run)

    def step(self, step: int, wall_s: float, line: Mapping[str, MetricValue], episodes: Sequence[Trajectory]) -> None:
        """Hand on the line of a training step, and some of its episodes."""
        for lane in self._lanes:
            lane.put(partial(lane.tracker.step, step, wall_s, _numbers(line)))
        self._hand_samples(step, "training", episodes)

    def evaluation(self, step: int, wall_s: float, line: Mapping[str, MetricValue], episodes: Sequence[Trajectory]) -> None:
        """Hand on the line of an evaluation, and some of its episodes."""
        for lane in self._lanes:
            lane.put(partial(lane.tracker.evaluation, step, wall_s, _numbers(line)))
        self._hand_samples(step, "evaluation", episodes)

    def activity(self, activity: Activity) -> None:
        for lane in self._lanes:
            if type(lane.tracker).activity is not Tracker.activity:  # most trackers leave these calls out
                lane.put(partial(lane.tracker.activity, activity))

    def episode(self, step: int, purpose: Purpose, episode: Trajectory) -> None:
        for lane in self._lanes:
            if type(lane.tracker).episode is not Tracker.episode:
                lane.put(partial(lane.tracker.episode, step, purpose, episode))

    async def close(self, status: RunStatus) -> None:
        """Finish the trackers that were started, within `finish_timeout_s`; one that takes longer is reported.

        Cancellation: shielded; takes `finish_timeout_s` at most.
        """
        started = [lane for lane in self._lanes if lane.thread.ident is not None]
        for lane in started:
            lane.finish(status)
        with anyio.move_on_after(self._finish_timeout_s, shield=True):
            for lane in started:
                await anyio.to_thread.run_sync(lane.thread.join, self._finish_timeout_s, abandon_on_cancel=True)
        for lane in started:
            if lane.is_late:
                logger.warning(
                    "tracker %s: it has not finished %g s after the run; its last records may be missing. metrics.jsonl has "
                    "everything",
                    lane.name,
                    self._finish_timeout_s,
                )

    def _hand_samples(self, step: int, purpose: Purpose, episodes: Sequence[Trajectory]) -> None:
        chosen = choose_episodes(episodes, self._samples, seed=f"{purpose} {step}")
        for lane in self._lanes if chosen else ():
            lane.put(partial(self._describe, lane.tracker, step, purpose, chosen))

    def _describe(self, tracker: Tracker, step: int, purpose: Purpose, chosen: Sequence[Chosen]) -> None:
        tracker.episodes(step, purpose, [one.described(self._decode) for one in chosen])


def _numbers(line: Mapping[str, MetricValue]) -> dict[str, float]:
    """Return the numbers of a line but for its step, which trackers get beside them."""
    return {
        key: value
        for key, value in line.items()
        if key != "step" and isinstance(value, (int, float)) and not isinstance(value, bool)
    }
