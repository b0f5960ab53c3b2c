"""Small episodes of a tabular policy, with all their outcomes: trees of turns that complete in one fixed order.

The policy is softmax(theta[state]) at each state. Each environment yields every episode that it can become, with its chance.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from agentrl.types import BranchPath, Trajectory, Turn
from agentrl_testing.properties.plain_episodes import plain_episode, plain_turn

Array = NDArray[np.float64]
STATES, ACTIONS = 6, 2
THETA = np.random.default_rng(5).normal(size=(STATES, ACTIONS))


@dataclass(frozen=True)
class Step:
    """One turn: the state it was taken in, the action, the reward, and how it stands in the episode."""

    state: int
    action: int
    reward: float | None
    parent: int | None
    sent_after: int | None = None
    sent_at: int | None = None
    rewarded_at: int | None = None
    player: str = ""
    branch: BranchPath = ()

    def turn(self) -> Turn:
        """Return the turn; its context is the state, by which a critic tells turns apart."""
        turn = plain_turn(
            self.reward,
            self.parent,
            sent_after=self.sent_after,
            sent_at=self.sent_at,
            rewarded_at=self.rewarded_at,
            player=self.player,
            branch=self.branch,
        )
        return replace(turn, context_ids=np.array([self.state], np.int32))


@dataclass(frozen=True)
class Outcome:
    """One possible episode. `chance` is the environment's part of its probability, which theta does not change."""

    chance: float
    steps: tuple[Step, ...]
    final: float

    def probability(self, theta: Array) -> float:
        return self.chance * float(np.prod([action_chances(theta, s.state)[s.action] for s in self.steps]))

    def scores(self, theta: Array) -> Array:
        """Gradient of the log-probability of each turn's action, [turns, STATES, ACTIONS]."""
        result = np.zeros((len(self.steps), STATES, ACTIONS))
        for row, step in zip(result, self.steps, strict=True):
            row[step.state] -= action_chances(theta, step.state)
            row[step.state, step.action] += 1.0
        return result

    def trajectory(self) -> Trajectory:
        return plain_episode([step.turn() for step in self.steps], self.final)


def action_chances(theta: Array, state: int) -> Array:
    """Return the chance of each action in `state`, [ACTIONS]."""
    weights = np.exp(theta[state] - theta[state].max())
    return weights / weights.sum()


# Environments, each a generator of all its outcomes.


def stopping() -> Iterator[Outcome]:
    """Action 0 stops, action 1 costs 0.3 and goes on to a random state; the policy decides the length, 1 to 3 turns."""

    def play(steps: tuple[Step, ...], state: int, chance: float) -> Iterator[Outcome]:
        parent = len(steps) - 1 if steps else None
        yield Outcome(chance, (*steps, Step(state, 0, None, parent)), [0.2, 1.0, -0.5, 2.0, 0.0, 1.5][state])
        gone_on = (*steps, Step(state, 1, -0.3, parent))
        if len(gone_on) == 3:
            yield Outcome(chance, gone_on, 3.0)
        else:
            depth = len(gone_on)
            yield from play(gone_on, 2 * depth - 1, chance * 0.35)
            yield from play(gone_on, 2 * depth, chance * 0.65)

    yield from play((), 0, 1.0)


def branching() -> Iterator[Outcome]:
    """Action 0 answers at once; action 1 opens two parallel branches, of which the first may go on one turn deeper.

    The branches are independent given the root: each one's turn rewards depend on its own actions only. The final reward
    depends on all actions together.
    """
    yield Outcome(1.0, (Step(0, 0, 0.4, None),), 0.1)
    root = Step(0, 1, -0.2, None)
    for left_state, left_chance in ((1, 0.3), (2, 0.7)):
        for left in range(ACTIONS):
            for right in range(ACTIONS):
                steps = (
                    root,
                    Step(left_state, left, 1.0 + left_state if left else None, 0),
                    Step(3, right, -2.0 * right, 0),
                )
                final = 1.5 * (left == right) - 0.5 * left_state * right
                if left == 0:
                    yield Outcome(left_chance, steps, final)
                    continue
                for last in range(ACTIONS):
                    deeper = (*steps, Step(4, last, 0.7 * last, 1))
                    yield Outcome(left_chance, deeper, final - 2.0 * last * right)


def two_roots() -> Iterator[Outcome]:
    """Two conversations in one episode, without a common turn, one of 1 to 2 turns; only their turns are rewarded."""
    for first in range(ACTIONS):
        for second in range(ACTIONS):
            steps = (Step(0, first, 1.0 - 3.0 * first, None), Step(1, second, 2.0 * second, None))
            if first:
                yield from (Outcome(1.0, (*steps, Step(2, third, 5.0 * third, 0)), 0.0) for third in range(ACTIONS))
            else:
                yield Outcome(1.0, steps, 0.0)


def chain() -> Iterator[Outcome]:
    """Three turns, each rewarded for its own action alone: the turns before it are noise to it."""
    for actions in itertools.product(range(ACTIONS), repeat=3):
        steps = [Step(t, a, 3.0 * a, t - 1 if t else None) for t, a in enumerate(actions)]
        yield Outcome(1.0, tuple(steps), 0.0)


def forked() -> Iterator[Outcome]:
    """The template strips the reasoning of turn 0, so that turn 1 is a root; turn 0 decides the reward of turn 1."""
    for first, second in itertools.product(range(ACTIONS), repeat=2):
        steps = (Step(0, first, None, None, 0), Step(1 + first, second, 1.0 * first * (1 + second), None, 1))
        yield Outcome(1.0, steps, 0.0)


def compacted() -> Iterator[Outcome]:
    """Two turns, then the workflow summarises them into a new context; what they did decides the reward of the third."""
    for first, second, third in itertools.product(range(ACTIONS), repeat=3):
        steps = (
            Step(0, first, None, None, 0),
            Step(1, second, -0.5 * second, 0, 1),
            Step(2 + first, third, (2.0 * second - first) * (third + 0.5), None, 2),
        )
        yield Outcome(1.0, steps, 0.0)


def planned_and_joined() -> Iterator[Outcome]:
    """A planner starts two sub-agents that run in parallel; a joiner sees both results and is rewarded for all of it."""
    for plan, left, right, last in itertools.product(range(ACTIONS), repeat=4):
        steps = (
            Step(0, plan, None, None, 0),
            Step(1, left, 0.7 * left * plan, None, 1),
            Step(2, right, -1.1 * right + 0.4 * plan, None, 1),
            Step(3 + (left == right), last, 3.0 * plan * left * last - 2.0 * right * last, None, 3),
        )
        yield Outcome(1.0, steps, 0.0)


def roles() -> Iterator[Outcome]:
    """Two roles with contexts of their own take turns; each is rewarded for what the other did before."""
    for first, second, third, fourth in itertools.product(range(ACTIONS), repeat=4):
        steps = (
            Step(0, first, None, None, 0),
            Step(1, second, 1.5 * first * second, None, 1),
            Step(2 + second, third, -2.0 * second * third, 0, 2),
            Step(4, fourth, 0.5 * third * (fourth + first), 1, 3),
        )
        yield Outcome(1.0, steps, 0.0)


CAUSES = [forked, compacted, planned_and_joined, roles]
"""Environments where a turn decides rewards of turns that do not continue its tokens."""
ENVIRONMENTS = [stopping, branching, two_roots, chain, *CAUSES]
