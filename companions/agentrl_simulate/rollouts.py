"""The rollout side of a simulated run: groups open, their episodes take slots and call servers, evaluations run beside them.

Invariant: as in the engine, groups start in order, an episode holds one slot from its start to its end, retries included,
and evaluations use at most a quarter of the slots. The groups are those of the engine's buffer (`agentrl.engine.staleness`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agentrl.engine.staleness import Admission, OutstandingGroups, StalenessPolicy
from agentrl.errors import InvariantError
from agentrl.rollout.config import LEAST_KEPT
from agentrl_simulate.costs import HostCost, RunShape
from agentrl_simulate.servers import SimulatedCall, SimulatedMachine
from agentrl_simulate.workload import EpisodeSource, PlayedEpisode

_EVALUATION_MEMBERS = 1 << 16
"""Distance between the numbers of evaluations, so that no two of their episodes draw alike."""
_HOPELESS = 256
"""Groups dropped in a row at which a simulation ends, as a run does."""


class SimulatedBuffer:
    """Every outstanding group, and the policy versions."""

    def __init__(self, admission: Admission, policy: StalenessPolicy) -> None:
        self._groups = OutstandingGroups(admission, policy)
        self.version = 0
        """Of the servers, from which admission counts."""
        self.trainer_version = 0
        """Of the trainer: `version`, or the next one while servers load it."""
        self.dropped = 0
        self.on_drop: Callable[[int], None] = lambda index: None
        """Called with each group that leaves for its age."""

    @property
    def outstanding(self) -> int:
        """Groups admitted and neither consumed nor dropped."""
        return len(self._groups)

    @property
    def may_admit(self) -> bool:
        return self._groups.may_admit(self.version)

    def admit(self) -> int:
        """Open the next group and return its number; its version is the present one."""
        return self._groups.admit(self.version)

    def version_of(self, index: int) -> int:
        """Return the version at the admission of an open group."""
        return self._groups.version_of(index)

    def complete(self, index: int, oldest: int) -> None:
        """Record that a group is complete, whose oldest token is of version `oldest`."""
        self._groups.complete(index, oldest)

    def drop(self, index: int) -> None:
        """Drop an open group; another may take its place."""
        self._groups.drop(index)
        self.dropped += 1

    def is_ready(self) -> bool:
        """Return whether `take` would give a batch; policy `drop` first drops the groups that are over age."""
        return self._groups.is_ready(self.trainer_version, self._drop_for_age)

    def take(self) -> tuple[int, ...]:
        """Remove and return the groups of the next batch, oldest first; empty where there is none."""
        return self._groups.take(self.trainer_version) if self.is_ready() else ()

    def stepped(self) -> None:
        """Record that the trainer has the next version."""
        self.trainer_version += 1

    def tick(self) -> None:
        """Record that the servers have the trainer's version."""
        self.version = self.trainer_version

    def counts(self) -> Counter[str]:
        """Return the numbers of groups that were admitted, consumed, dropped and are outstanding."""
        groups = self._groups
        return Counter(
            admitted=groups.num_admitted, consumed=groups.num_consumed, dropped=self.dropped, outstanding=len(groups)
        )

    def _drop_for_age(self, index: int) -> None:
        self.drop(index)
        self.on_drop(index)


@dataclass(slots=True, eq=False)
class SimulatedGroup:
    """A group from admission to training."""

    index: int
    started: int = 0
    """Members that have got their slots."""
    running: list[RunningEpisode] = field(default_factory=list["RunningEpisode"])
    finished: list[PlayedEpisode] = field(default_factory=list[PlayedEpisode])
    failed: int = 0
    """Members whose attempts have all failed."""
    tokens: Counter[int] = field(default_factory=Counter[int])
    """Sampled tokens of the finished members, by version."""
    is_dropped: bool = False

    @property
    def zero_variance(self) -> bool:
        """Whether the returns are known and all equal, so that the group teaches nothing."""
        returns = {episode.episode_return for episode in self.finished}
        return len(returns) == 1 and None not in returns


@dataclass(slots=True, eq=False)
class RunningEpisode:
    """One attempt in flight."""

    attempts: Sequence[PlayedEpisode]
    on_end: Callable[[RunningEpisode], None]
    server: int | None = None
    """None before its first call."""
    attempt: int = 0
    turn: int = 0
    history_tokens: int = 0
    history_version: int = 0
    """Version whose weights have read them."""
    call: SimulatedCall | None = None
    """None while no server works for it."""
    tokens: Counter[int] = field(default_factory=Counter[int])
    is_cancelled: bool = False

    @property
    def played(self) -> PlayedEpisode:
        return self.attempts[self.attempt]


class Rollouts:
    """Opens groups while slots and the bound allow it, and plays their episodes.

    `on_complete` is called when a group completes or is dropped.
    """

    def __init__(
        self,
        machine: SimulatedMachine,
        buffer: SimulatedBuffer,
        shape: RunShape,
        source: EpisodeSource,
        host: HostCost,
        on_complete: Callable[[], None],
    ) -> None:
        self._events, self._pool, self._driver = machine.events, machine.pool, machine.driver
        self._buffer, self._shape, self._source = buffer, shape, source
        self._turn_s, self._on_complete = host.turn_s, on_complete
        self._free = shape.slots
        self._queue: deque[Callable[[], None]] = deque()
        self._opening: SimulatedGroup | None = None
        self._queued = False
        self._waits_since: float | None = None
        self._changed_at = 0.0
        self.groups: dict[int, SimulatedGroup] = {}
        """Groups that are neither consumed nor dropped."""
        self.calls = 0
        self.evaluations = 0
        self._bound_s = self._slot_s = 0.0
        self._dropped_in_a_row = 0
        self._due: list[int] = []
        self._after_evaluation: Callable[[], None] | None = None
        self._evaluation_left = self._evaluation_next = self._evaluation_running = 0
        buffer.on_drop = lambda index: self.groups.pop(index, None) and None

    def waited_for_bound_s(self) -> float:
        """Return the seconds until now in which slots were free and the bound kept groups from opening."""
        waiting = 0.0 if self._waits_since is None else self._events.now - self._waits_since
        return self._bound_s + waiting

    def slot_seconds(self) -> float:
        """Return the slots in use, summed over the seconds until now."""
        return self._slot_s + (self._shape.slots - self._free) * (self._events.now - self._changed_at)

    def dispatch(self) -> None:
        """Open groups as far as slots and the bound allow; called at the start and whenever a group may open."""
        self._end_bound_wait()
        while not self._queued:
            if self._free == 0:
                self._wait_for_slot()
                return
            if self._opening is None:
                if not self._buffer.may_admit:
                    self._waits_since = self._events.now
                    return
                group = self._opening = SimulatedGroup(self._buffer.admit())
                self.groups[group.index] = group
            self._take_slot()
            self._start_member(self._opening)

    def request_evaluation(self, step: int) -> None:
        """Evaluate after `step`, unless two evaluations are unfinished."""
        if len(self._due) > 1:
            return
        self._due.append(step)
        if len(self._due) == 1:
            self._begin_evaluation()

    def when_evaluated(self, then: Callable[[], None]) -> None:
        """Call `then` when no evaluation is unfinished: now, or when the last one has ended."""
        if self._due:
            self._after_evaluation = then
        else:
            then()

    def _wait_for_slot(self) -> None:
        self._queued = True
        self._queue.append(self._slot_is_free)

    def _slot_is_free(self) -> None:
        self._queued = False
        self._give_slot()
        self.dispatch()

    def _end_bound_wait(self) -> None:
        if self._waits_since is not None:
            self._bound_s += self._events.now - self._waits_since
            self._waits_since = None

    def _take_slot(self) -> None:
        self._slot_s, self._changed_at = self.slot_seconds(), self._events.now
        self._free -= 1

    def _give_slot(self) -> None:
        """Free the slot that an episode, or a waiting dispatcher, has held."""
        self._slot_s, self._changed_at = self.slot_seconds(), self._events.now
        self._free += 1

    def _next_in_queue(self) -> None:
        while self._queue and self._free:
            self._take_slot()
            self._queue.popleft()()

    def _start_member(self, group: SimulatedGroup) -> None:
        member = group.started
        group.started += 1
        if group.started == self._shape.group_size:
            self._opening = None
        attempts = self._source.attempts(group.index, member)
        episode = RunningEpisode(attempts, lambda ended: self._member_ended(group, ended))
        group.running.append(episode)
        self._next_turn(episode)

    def _next_turn(self, episode: RunningEpisode) -> None:
        self._driver.run(self._turn_s, lambda: self._leave_driver(episode))

    def _leave_driver(self, episode: RunningEpisode) -> None:
        played = episode.played
        if episode.turn == len(played.turns):
            self._events.plan(played.after_s, lambda: self._attempt_ended(episode))
        else:
            self._events.plan(played.turns[episode.turn].outside_s, lambda: self._begin_call(episode))

    def _begin_call(self, episode: RunningEpisode) -> None:
        if episode.is_cancelled:
            return
        turn = episode.played.turns[episode.turn]
        episode.call = SimulatedCall(
            turn.context_tokens,
            turn.output_tokens,
            episode.history_tokens,
            episode.history_version,
            lambda: self._end_call(episode),
        )
        if episode.server is None:
            episode.server = self._pool.choose()
        self._pool.call(episode.server, episode.call)

    def _end_call(self, episode: RunningEpisode) -> None:
        call = episode.call
        assert call is not None
        self.calls += 1
        episode.call = None
        episode.tokens += call.tokens
        episode.history_tokens += call.context_tokens + call.output_tokens
        episode.history_version = call.version
        episode.turn += 1
        self._next_turn(episode)

    def _attempt_ended(self, episode: RunningEpisode) -> None:
        if episode.is_cancelled:
            return
        if episode.played.failed and episode.attempt + 1 < len(episode.attempts):
            episode.attempt, episode.turn, episode.history_tokens = episode.attempt + 1, 0, 0
            episode.tokens.clear()
            self._next_turn(episode)
            return
        self._release(episode)
        episode.on_end(episode)

    def _release(self, episode: RunningEpisode) -> None:
        if episode.server is not None:
            self._pool.release(episode.server)

    def _member_ended(self, group: SimulatedGroup, episode: RunningEpisode) -> None:
        group.running.remove(episode)
        self._give_slot()
        if episode.played.failed:
            group.failed += 1
            if not self._shape.keeps_incomplete:
                self._drop(group)
        else:
            group.finished.append(episode.played)
            group.tokens += episode.tokens
        if not group.is_dropped and len(group.finished) + group.failed == self._shape.group_size:
            if group.failed and len(group.finished) < LEAST_KEPT:
                self._drop(group)
            else:
                self._dropped_in_a_row = 0
                self._buffer.complete(group.index, min(group.tokens, default=self._buffer.version_of(group.index)))
                self._on_complete()
        self._next_in_queue()
        self.dispatch()

    def _drop(self, group: SimulatedGroup) -> None:
        group.is_dropped = True
        self._dropped_in_a_row += 1
        if self._dropped_in_a_row == _HOPELESS:
            raise InvariantError(f"{_HOPELESS} groups in a row are dropped for failed episodes: no batch forms")
        if self._opening is group:
            self._opening = None
        for episode in group.running:
            episode.is_cancelled = True
            if episode.call is not None and episode.server is not None:
                self._pool.abort(episode.server, episode.call)
            self._release(episode)
            self._give_slot()
        del self.groups[group.index]
        self._buffer.drop(group.index)
        self._on_complete()

    def _begin_evaluation(self) -> None:
        self._evaluation_next, self._evaluation_left = 0, self._shape.eval_episodes
        for _ in range(min(max(1, self._shape.slots // 4), self._shape.eval_episodes)):
            self._queue.append(self._start_evaluation)
        self._next_in_queue()

    def _start_evaluation(self) -> None:
        """Play the next episode of the evaluation with the slot that was taken for it."""
        number = self._evaluation_next
        self._evaluation_next += 1
        attempts = self._source.attempts(-(self._due[0] * _EVALUATION_MEMBERS + number) - 1, 0)[:1]
        self._next_turn(RunningEpisode(attempts, self._evaluation_ended))

    def _evaluation_ended(self, _episode: RunningEpisode) -> None:
        self._evaluation_left -= 1
        started = self._evaluation_next + sum(waiting == self._start_evaluation for waiting in self._queue)
        self._give_slot()
        if started < self._shape.eval_episodes:
            self._queue.append(self._start_evaluation)
        if not self._evaluation_left:
            self._due.pop(0)
            self.evaluations += 1
            if self._due:
                self._begin_evaluation()
            elif self._after_evaluation is not None:
                then, self._after_evaluation = self._after_evaluation, None
                then()
        self._next_in_queue()
        self.dispatch()
