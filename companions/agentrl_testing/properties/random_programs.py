"""Random environments: programs whose next event, speaker and reward depend on all actions so far.

Invariant: a program is a function of its number. What comes next depends on the whole history of actions and events and on
nothing else, so every outcome is enumerated once; every reward is a fraction. A state of the policy belongs to one player.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from agentrl_testing.properties.timed_trees import Environment, Script
from agentrl_testing.properties.trees import ACTIONS, STATES, Array, Outcome

LONGEST = 3
"""Turns of an episode at most, so that it has at most 8 outcomes."""
SPEAKERS = ("white", "black")
_SEND, _DONE, _PAY, _END = range(4)


def random_programs(count: int, first: int = 0) -> list[Environment]:
    """Return `count` programs, the first of the number `first`."""
    return [_random_program(number) for number in range(first, first + count)]


def _random_program(number: int) -> Environment:
    environment = partial(_play_all, number)
    environment.__name__ = f"random_programs({number})"  # type: ignore[attr-defined] - how checks name an environment
    return environment


def _play_all(number: int) -> Iterator[Outcome]:
    """Play the program with every sequence of actions that it asks for."""
    waiting: list[tuple[int, ...]] = [()]
    while waiting:
        actions = waiting.pop()
        played = _Play(number, actions).outcome()
        if played is None:
            waiting += [(*actions, action) for action in range(ACTIONS)]
        else:
            yield played


class _Play:
    """One episode of a program, as far as its actions are known."""

    def __init__(self, number: int, actions: tuple[int, ...]) -> None:
        traits = np.random.default_rng((number, 0))
        self._number, self._actions = number, actions
        self._is_game, self._pays_turns = not traits.integers(3), bool(traits.integers(4))
        self._script = Script()
        self._history: list[int] = []
        self._running: list[str] = []
        self._unpaid: list[str] = []
        self._sent = 0

    def outcome(self) -> Outcome | None:
        """Return the episode; None: it asks for one action more than there are."""
        while True:
            draw = np.random.default_rng((self._number, 1, *self._history))
            weights = self._weights()
            event = int(draw.choice(len(weights), p=weights / weights.sum()))
            self._history.append(event)
            if event == _END:
                return self._script.outcome(_fraction(draw))
            if event == _SEND and self._sent == len(self._actions):
                return None
            self._play(event, draw)

    def _weights(self) -> Array:
        """Return how often each event comes next, where it can."""
        send = (4 if not self._sent else 2) * (self._sent < LONGEST and len(self._running) < 2)
        end = self._sent > 0 and not self._running
        return np.array([send, 3 * bool(self._running), 2 * bool(self._unpaid and self._pays_turns), end], np.float64)

    def _play(self, event: int, draw: np.random.Generator) -> None:
        if event == _SEND:
            player = int(draw.integers(2)) if self._is_game else 0
            count = STATES // 2 if self._is_game else STATES
            state, action = int(draw.integers(count)) + player * count, self._actions[self._sent]
            name = str(self._sent)
            self._script.send(name, state, action, player=SPEAKERS[player] if self._is_game else "")
            self._running.append(name)
            self._history.append(action)
            self._sent += 1
        elif event == _DONE:
            name = self._running.pop(int(draw.integers(len(self._running))))
            self._script.done(name)
            self._unpaid.append(name)
        else:
            self._script.pay(self._unpaid.pop(int(draw.integers(len(self._unpaid)))), _fraction(draw))


def _fraction(draw: np.random.Generator) -> float:
    """Return a reward between -2 and 2 that is no whole number."""
    return float(np.round(draw.uniform(-2, 2), 2)) + 0.005
