"""Turn budget, rewards and metrics of one episode, whoever samples its turns.

Invariant: a turn has at most one reward, finite; after `close` nothing changes any more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from agentrl.errors import EpisodeLimit, RewardError, WorkflowError
from agentrl.inference.backend import Generation
from agentrl.types import StopReason
from agentrl.validation import check_reward

_AMBIGUOUS = -1


class Place:
    """One running call's place in the turn budget: given back when it is closed, or when nobody holds it any more."""

    __slots__ = ("_ledger",)

    def __init__(self, ledger: Ledger) -> None:
        """Take a place."""
        ledger.in_flight += 1
        self._ledger: Ledger | None = ledger

    def close(self, *_: object) -> None:
        """Give the place back; once is enough."""
        if self._ledger is not None:
            self._ledger.in_flight -= 1
            self._ledger = None

    __del__ = close


class Ledger:
    """What a client keeps about its episode besides the turns themselves. Single-threaded: no method awaits.

    As a context, returned by `call`, it holds one running call's place; calls that run together each enter it.
    """

    def __init__(self, episode_id: str, max_turns: int | None) -> None:
        self.episode_id = episode_id
        self.metrics: dict[str, float] = {}
        self.limit: StopReason | None = None
        """The first budget a call was refused for."""
        self.rewards: dict[int, float] = {}
        """Reward by turn index."""
        self.in_flight = 0
        """Running calls."""
        self._max_turns = max_turns
        self._count = 0
        self._turns: dict[str, int] = {}
        self._objects: dict[int, tuple[object, int]] = {}
        self._closed = False

    def check_open(self) -> None:
        """Raise `WorkflowError` if the episode is over."""
        if self._closed:
            raise WorkflowError(
                f"episode {self.episode_id} is closed; the workflow must not use its client after it has returned"
            )

    def call(self) -> Ledger:
        """Check that the turn budget has a place for one more call, and return a context that holds one.

        Raises:
            WorkflowError: the episode is closed.
            EpisodeLimit: the turn budget is spent, running calls included.
        """
        self.check_open()
        taken = self._count + self.in_flight
        if self._max_turns is not None and taken >= self._max_turns:
            running = f", {self.in_flight} of them running (close a stream that is left early)" if self.in_flight else ""
            raise self.spent(StopReason.TURN_LIMIT, f"{taken} of {self._max_turns} turns are spent{running}")
        return self

    def __enter__(self) -> None:
        self.in_flight += 1

    def __exit__(self, *_: object) -> None:
        self.in_flight -= 1

    def spent(self, reason: StopReason, what: str) -> EpisodeLimit:
        """Return the error for a spent budget, and remember which was the first."""
        self.limit = self.limit or reason
        return EpisodeLimit(f"episode {self.episode_id}: {what}")

    def add_turn(self, identity: str, turn: int, given: object = None) -> None:
        """Count a completed call, and let `reward` find its turn.

        Args:
            identity: the id of its completion.
            turn: its index.
            given: the object the caller was given, where ids may be missing or the same for several calls.
        """
        self._count += 1
        self._turns[identity] = turn if identity not in self._turns else _AMBIGUOUS
        if given is not None:
            self._objects[id(given)] = (given, turn)

    def reward(self, target: object, value: object) -> int:
        """Set the reward of the turn that `target` (a completion, chunk, its id, or a generation) stands for; return it.

        Raises:
            RewardError: `value` is not a finite number, or the turn has a reward already.
            WorkflowError: `target` is no turn of this episode, or the episode is closed.
        """
        self.check_open()
        number = check_reward(value, f"client.reward, episode {self.episode_id}")
        turn = self._find(target)
        present = self.rewards.get(turn)
        if present is not None:
            raise RewardError(
                f"episode {self.episode_id}: turn {turn} already has the reward {present}, got {number}; "
                "set it once, with the total"
            )
        self.rewards[turn] = number
        return turn

    def record(self, metrics: Mapping[str, object]) -> None:
        """Keep numbers of the episode; the last value of a name counts."""
        self.check_open()
        numbers: dict[str, float] = {}
        for name, value in metrics.items():
            huge = isinstance(value, int) and abs(value) > 1e308  # an int may be too large for a float
            if huge or not isinstance(value, (int, float, np.floating, np.integer)) or not math.isfinite(value):
                raise WorkflowError(f"client.record: {name} must be a finite number, got {type(value).__name__} {value!r}")
            numbers[name] = float(value)
        self.metrics.update(numbers)

    def close(self, final_reward: object) -> float | None:
        """End the episode; return the final reward, checked."""
        self.check_open()
        reward = None if final_reward is None else check_reward(final_reward, f"episode {self.episode_id}")
        self._closed = True
        return reward

    def _find(self, target: object) -> int:
        entry = self._objects.get(id(target))
        if entry is not None:
            return entry[1]
        if isinstance(target, Generation):
            raise WorkflowError(f"episode {self.episode_id}: this generation is not of this episode's client.generate")
        identity = target if isinstance(target, str) else getattr(target, "id", None)
        if not isinstance(identity, str):
            raise WorkflowError(
                f"client.reward takes a completion, its id, or a generation, got {type(target).__name__} {target!r:.80}"
            )
        turn = self._turns.get(identity)
        if turn == _AMBIGUOUS:
            raise WorkflowError(
                f"episode {self.episode_id}: the endpoint gave several completions the id {identity!r}; "
                "reward the completion object, not its id or a chunk"
            )
        if turn is None:
            raise WorkflowError(
                f"episode {self.episode_id}: {identity!r} is no completed model call of this episode; "
                "reward a completion with the client that made it, and a stream after its last chunk"
            )
        return turn
