"""An episode as its clients share it: the turns, the budgets, rewards and metrics.

Invariant: a model call becomes at most one turn: none if it is refused, fails or samples nothing, or if the end of the
episode cuts it; one that the agent gives up is a turn of what was sampled. A turn has at most one reward, finite; after
`close` nothing changes any more. A budget is checked before the call that it forbids. A failed call stays unresolved until a
call that started after the failure completes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final, Self, TypeVar

import anyio
import numpy as np

from agentrl.client.offline import call_timeout, left_running
from agentrl.episode.checks import check_reward_parts
from agentrl.errors import AgentRLError, EpisodeLimit, RequestRejected, RewardError, ServerTimeout, TokenError, WorkflowError
from agentrl.inference.backend import Generation
from agentrl.support.concurrency import EndOfEpisode, ending_quietly, loop_time
from agentrl.types import BranchPath, EpisodeFailure, StopReason, Trajectory, Turn

Result = TypeVar("Result")
_AMBIGUOUS = -1
REPORTED_NAMES: Final = ("prompt_tokens", "completion_tokens")
"""The counts of an endpoint for an episode; metrics of the trajectory."""
MISSES_METRIC: Final = "unsupported_misses"
"""Answers that miss what their call demanded, where prompts ask for it (`sampling.unsupported: prompt`)."""
UNREPORTED_METRIC: Final = "unreported_calls"
"""Calls that the agent gave up, and whose output the server did not report."""
_REFUSALS: Final = (WorkflowError, TokenError, RequestRejected)
"""Errors of a call whose contents are the reason."""
BUSY_SHARE: Final = 0.5
"""Share of an episode's deadline; calls of less time in all are not the reason why the episode missed it."""
LONG_CALL_SHARE: Final = 0.1
"""Share of an episode's deadline; a longer call means slow servers, a longer wait for the next call a slow workflow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSettings:
    """The name and the budgets of one episode."""

    episode_id: str
    """Unique within the run."""
    task_id: str
    max_turns: int | None = None
    """Turns allowed, those that the agent gave up included; a running call counts as one."""
    max_episode_tokens: int | None = None
    """Sampled tokens allowed. A call's output is clipped to what is left when it starts, so only parallel calls can pass it,
    each by its own `max_tokens` at most."""
    on_turn: Callable[[Turn], None] | None = None
    """Called with each turn as it is recorded."""


class Episode:
    """The record of an episode, whichever model answers. Single-threaded: no method awaits."""

    def __init__(self, settings: EpisodeSettings) -> None:
        self.id = settings.episode_id
        self.turns: list[Turn] = []
        """The recorded turns, in order of completion; the backend appends to them."""
        self.calls = EpisodeCalls(self.id, max_turns=settings.max_turns, max_tokens=settings.max_episode_tokens)
        self.clock = itertools.count()
        """Numbers the events: each request that is sent, each turn reward that is set."""
        self.end = EndOfEpisode()
        """Comes when the engine ends the episode; from then on no call that is cut becomes a turn."""
        self.is_settled = False
        """Whether the workflow has returned, so that no call begins."""
        self.metrics: dict[str, float] = {}
        """The metrics that the workflow recorded."""
        self.final_reward: float | None = None
        """The reward set by `client.reward_final`."""
        self.reward_parts: dict[str, float] = {}
        self.turn_reward_parts: dict[str, float] = {}
        """The sums of rewards that were given in parts, by the name of the part."""
        self.answer: str | None = None
        """The answer named by `client.final_answer`."""
        self.reported_tokens: dict[str, float] = {}
        """Tokens by an endpoint's own count; empty where the turns hold the tokens."""
        self.needs_call = False
        """Whether a program was to play it: without a call of the policy it is a failure."""
        self._task_id = settings.task_id
        self._on_turn = settings.on_turn
        self._turn_by_id: dict[str, int] = {}
        self._turn_by_own_id: dict[str, int] = {}
        self._turn_by_object: dict[int, tuple[object, int]] = {}
        self._closed = False
        self._num_branches = 0

    def open_branch(self, inside: BranchPath) -> BranchPath:
        """Return a new declared branch inside another one."""
        self._num_branches += 1
        return (*inside, self._num_branches - 1)

    def check_open(self) -> None:
        """Raise `WorkflowError` if the episode is closed."""
        if self._closed:
            raise self._is_over()

    def _is_over(self) -> WorkflowError:
        return WorkflowError(f"episode {self.id} is closed; the workflow must not use its client after it has returned")

    @property
    def is_open(self) -> bool:
        """Whether the episode was not closed yet."""
        return not self._closed

    def start_call(self) -> RunningCall:
        """Count one more running call."""
        if self._closed or self.is_settled:
            raise self._is_over()
        return self.calls.start_call()

    @contextmanager
    def refusals(self) -> Generator[None]:
        """Record an error of the block as a refused call, so that a workflow cannot hide it."""
        try:
            yield
        except AgentRLError as error:
            self.calls.fail(error)
            raise

    def reward(self, target: object, value: object, branch: BranchPath) -> None:
        """Set the reward of the turn that `target` (a completion, chunk, its id, or a generation) stands for."""
        self.check_open()
        self.reward_turn(self._find_turn(target), value, branch)

    def reward_turn(self, turn: int, value: object, branch: BranchPath) -> None:
        """Set the reward of the turn with this index; `branch` is that of the client that sets it.

        Raises:
            RewardError: `value` is not a finite number, or the turn has a reward already.
            WorkflowError: the turn is of a declared branch that `branch` is not in, or the episode is closed.
        """
        self.check_open()
        number, parts = check_reward_parts(value, f"client.reward, episode {self.id}")
        own = self.turns[turn].branch
        if branch[: len(own)] != own:
            raise WorkflowError(
                f"episode {self.id}: turn {turn} is of branch {list(own)}, and a client of branch {list(branch)} rewards "
                "it; client.branch() declares that its rewards depend on nothing outside: reward it with the client that "
                "client.branch() returned, or reward the episode (client.reward_final)"
            )
        present = self.turns[turn].reward
        if present is not None:
            raise RewardError(
                f"episode {self.id}: turn {turn} already has the reward {present}, got {number}; set it once, with the total"
            )
        self.turns[turn] = replace(self.turns[turn], reward=number, rewarded_at=next(self.clock))
        _add_parts(self.reward_parts, parts)
        _add_parts(self.turn_reward_parts, parts)

    def reward_final(self, value: object) -> None:
        """Set the final reward of the episode.

        Raises:
            RewardError: `value` is not a finite number, or there is a final reward already.
        """
        self.check_open()
        number, parts = check_reward_parts(value, f"client.reward_final, episode {self.id}")
        if self.final_reward is not None:
            raise RewardError(
                f"episode {self.id}: the final reward is already {self.final_reward}, got {number}; set it once: by "
                "client.reward_final, or by what run returns"
            )
        self.final_reward = number
        _add_parts(self.reward_parts, parts)

    def name_answer(self, answer: object) -> None:
        """Keep the answer of the episode; a later one replaces an earlier one.

        Raises:
            WorkflowError: it is neither text nor a number nor None, or the episode is closed.
        """
        self.check_open()
        if answer is not None and not isinstance(answer, (str, int, float, np.floating, np.integer)):
            raise WorkflowError(
                f"client.final_answer, episode {self.id}: expected text or a number, or None for no answer, got "
                f"{type(answer).__name__} {repr(answer)[:40]}; write it as text"
            )
        self.answer = None if answer is None else str(answer)

    def record_metrics(self, metrics: Mapping[str, object]) -> None:
        """Keep numbers of the episode; a later value replaces an earlier one of the same name.

        Raises:
            WorkflowError: a value is not a finite number, or the episode is closed.
        """
        self.check_open()
        numbers: dict[str, float] = {}
        for name, value in metrics.items():
            huge = isinstance(value, int) and abs(value) > 1e308  # an int may be too large for a float
            if huge or not isinstance(value, (int, float, np.floating, np.integer)) or not math.isfinite(value):
                raise WorkflowError(f"client.record: {name} must be a finite number, got {type(value).__name__} {value!r}")
            numbers[name] = float(value)
        self.metrics.update(numbers)

    def count_unreported(self) -> None:
        """Count a call that was given up and whose output is not known."""
        self.metrics[UNREPORTED_METRIC] = self.metrics.get(UNREPORTED_METRIC, 0.0) + 1.0

    def close(self, stop_reason: StopReason, final_reward: object, failure: EpisodeFailure | None) -> Trajectory:
        """End the episode, and return its trajectory; without `final_reward`, the one of `reward_final` holds."""
        self.check_open()
        if final_reward is not None:
            self.reward_final(final_reward)
        reward = None if failure is not None else self.final_reward
        self._closed = True
        return Trajectory(
            episode_id=self.id,
            task_id=self._task_id,
            turns=tuple(self.turns),
            stop_reason=stop_reason,
            final_reward=reward,
            failure=failure,
            metrics={**self.reported_tokens, **self.metrics},
            reward_parts=dict(self.reward_parts),
            turn_reward_parts=dict(self.turn_reward_parts),
            answer=self.answer,
        )

    def announce(self, completion_id: str, num_tokens: int, given: object = None, own_id: str | None = None) -> None:
        """Count the turn that was recorded last, let `reward` find it, and pass it on.

        `given` is the object that the caller gets, where ids may be missing or the same for several calls; `own_id` is
        unique, and what `turn_of` knows the turn by.
        """
        turn = len(self.turns) - 1
        self.calls.add_turn(num_tokens)
        self._turn_by_own_id[own_id or completion_id] = turn
        self._turn_by_id[completion_id] = _AMBIGUOUS if completion_id in self._turn_by_id else turn
        if given is not None:
            self._turn_by_object[id(given)] = (given, turn)
        if self._on_turn is not None:
            self._on_turn(self.turns[turn])

    def turn_of(self, own_id: str) -> int | None:
        """Return the index of the turn of a completed call (`Answer.id`); None if there is none with the id."""
        return self._turn_by_own_id.get(own_id)

    def _find_turn(self, target: object) -> int:
        entry = self._turn_by_object.get(id(target))
        if entry is not None:
            return entry[1]
        if isinstance(target, Generation):
            raise WorkflowError(f"episode {self.id}: this generation is not of this episode's client.generate")
        identity = target if isinstance(target, str) else getattr(target, "id", None)
        if not isinstance(identity, str):
            raise WorkflowError(
                f"client.reward takes a completion, its id, or a generation, got {type(target).__name__} {target!r:.80}"
            )
        turn = self._turn_by_id.get(identity)
        if turn == _AMBIGUOUS:
            raise WorkflowError(
                f"episode {self.id}: the endpoint gave several completions the id {identity!r}; "
                "reward the completion object, not its id or a chunk"
            )
        if turn is None:
            raise WorkflowError(
                f"episode {self.id}: {identity!r} is no completed model call of this episode; "
                "reward a completion with the client that made it, and a stream after its last chunk"
            )
        return turn


class RunningCall:
    """A call that runs, a context manager. It ends once: when it is closed, or when its last reference goes."""

    __slots__ = ("_began", "_calls", "_failures_before", "_open")

    def __init__(self, calls: EpisodeCalls) -> None:
        self._calls = calls
        self._failures_before = calls.num_failures
        self._began = calls.begin_call()
        self._open = True

    @property
    def is_open(self) -> bool:
        """Whether the call has not ended."""
        return self._open

    def complete(self) -> None:
        """Resolve the failures before this call: its turn is recorded."""
        self._calls.resolve(self._failures_before)

    def close(self) -> None:
        """End the call; a second time does nothing."""
        if self._open:
            self._open = False
            self._calls.end_call(self._began)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close()
        if isinstance(error, AgentRLError):
            self._calls.fail(error)

    __del__ = close


class EpisodeCalls:
    """The calls of one episode. Single-threaded: no method awaits."""

    def __init__(self, episode_id: str, *, max_turns: int | None, max_tokens: int | None) -> None:
        self.max_tokens = max_tokens
        """Sampled tokens of all calls."""
        self.in_flight = 0
        """Running calls."""
        self._episode_id = episode_id
        self._max_turns = max_turns
        self._turns = 0
        self._tokens = 0
        self._failures: list[AgentRLError] = []
        self._resolved = 0
        self._settles_refusals = False
        self._limit: StopReason | None = None
        self._longest_s = 0.0
        self._busy_s = 0.0
        self._busy_since = -math.inf
        self._last_end = -math.inf

    @property
    def num_failures(self) -> int:
        """Calls that failed or were refused so far."""
        return len(self._failures)

    @property
    def unresolved(self) -> AgentRLError | None:
        """The last failure, unless a call that started after it has completed."""
        open_failures = self._failures[self._resolved :]
        if self._settles_refusals:
            open_failures = [each for each in open_failures if not isinstance(each, _REFUSALS)]
        return open_failures[-1] if open_failures else None

    @property
    def limit_reached(self) -> StopReason | None:
        """The limit that the unresolved failure is about; None if there is none, or it is about something else."""
        return self._limit if isinstance(self.unresolved, EpisodeLimit) else None

    def start_call(self) -> RunningCall:
        """Count one more running call.

        Raises:
            EpisodeLimit: the tokens are spent, or the turns, of which each running call takes one.
        """
        if self.max_tokens is not None and self._tokens >= self.max_tokens:
            spent = f"{self._tokens} of {self.max_tokens} sampled tokens are spent"
            raise self.exceeded(StopReason.TOKEN_LIMIT, spent)
        taken = self._turns + self.in_flight
        if self._max_turns is not None and taken >= self._max_turns:
            running = f", {self.in_flight} of them running (close a stream that is left early)" if self.in_flight else ""
            raise self.exceeded(StopReason.TURN_LIMIT, f"{taken} of {self._max_turns} turns are spent{running}")
        return RunningCall(self)

    def begin_call(self) -> float:
        """Count one more running call, and return when it began, a moment of `anyio.current_time`."""
        now = loop_time()
        if not self.in_flight:
            self._busy_since = now
        self.in_flight += 1
        return now

    def end_call(self, began: float) -> None:
        """Count one running call less, which began at the moment `began`."""
        now = self._last_end = loop_time()
        self._longest_s = max(self._longest_s, now - began)
        self.in_flight -= 1
        if not self.in_flight:
            self._busy_s += max(0.0, now - self._busy_since)

    def filled_time(self, deadline: float, timeout_s: float) -> bool:
        """Return whether the calls are the reason why the episode had not ended at a past `deadline`, after `timeout_s`.

        That is so where they took at least half of the time, none of them over a tenth, and the last of them ended, or was
        cut off, in the last tenth. Calls at the same time take their time once.
        """
        long_s = LONG_CALL_SHARE * timeout_s
        is_quick = not self.in_flight and self._longest_s <= long_s
        return is_quick and self._busy_s >= BUSY_SHARE * timeout_s and self._last_end >= deadline - long_s

    def exceeded(self, reason: StopReason, what: str) -> EpisodeLimit:
        """Return the error for a limit that a call has reached, and record it as that call's failure."""
        self._limit = reason
        error = EpisodeLimit(f"episode {self._episode_id}: {what}")
        self.fail(error)
        return error

    def fail(self, error: AgentRLError) -> None:
        """Record a failed or refused call, once. One that the agent gave up has not failed if its output is a turn."""
        if isinstance(error, ServerTimeout) and error.is_recorded:
            return
        if not self._failures or self._failures[-1] is not error:
            self._failures.append(error)

    def resolve(self, count: int) -> None:
        """Count the first `count` failures as resolved."""
        self._resolved = max(self._resolved, count)

    def settle_refusals(self) -> int:
        """Count calls that are refused for what they ask as resolved, now and later; return how many there were so far."""
        self._settles_refusals = True
        return sum(isinstance(each, _REFUSALS) for each in self._failures)

    def clip(self, max_tokens: int) -> int:
        """Return the output limit of a call, lowered to the tokens that are left."""
        return max_tokens if self.max_tokens is None else min(max_tokens, self.max_tokens - self._tokens)

    def add_turn(self, num_tokens: int) -> None:
        """Count a completed call and the tokens it sampled."""
        self._turns += 1
        self._tokens += num_tokens


class CallWaits:
    """The waits of calls for the policy; each ends with an answer, at its timeout, or when the workflow returns.

    Whether a call had ended when the workflow returned is a decision of the policy, too, as after a race.
    """

    def __init__(self, episode_id: str) -> None:
        self._episode_id = episode_id
        self._running: dict[anyio.CancelScope, anyio.Event] = {}
        self._was_cut = False

    async def bounded(
        self, call: Callable[[], Awaitable[Result]], timeout_s: float | None, remaining_s: float | None
    ) -> Result:
        """Return what `call` returns, within what remains of its timeout.

        Raises:
            CallTimeout: the timeout has passed.

        Cancellation: a wait that is cut ends as if it were cancelled.
        """
        ended = anyio.Event()
        with anyio.move_on_after(remaining_s) as wait:
            self._running[wait] = ended
            try:
                return await call()
            finally:
                del self._running[wait]
                ended.set()
        if self._was_cut:
            raise ending_quietly(left_running(self._episode_id))
        raise call_timeout(self._episode_id, timeout_s or 0.0)

    async def cut(self) -> None:
        """End all waits, and wait until what the calls had sampled is recorded."""
        self._was_cut = True
        running = dict(self._running)
        for wait in running:
            wait.cancel()
        for ended in running.values():
            await ended.wait()


def _add_parts(sums: dict[str, float], parts: Mapping[str, float]) -> None:
    for name, value in parts.items():
        sums[name] = sums.get(name, 0.0) + value
