"""Environments whose turns complete, and are rewarded, in an order that the policy's own actions decide.

Each is played as a script of events: a request is sent, its turn completes, its reward is set. A long answer completes later
than a short one; that alone must not change what is learnt.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeAlias

from agentrl.types import BranchPath
from agentrl_testing.properties.trees import ACTIONS, Outcome, Step

Environment: TypeAlias = Callable[[], Iterator[Outcome]]


class Script:
    """Writes down one episode, event by event."""

    def __init__(self) -> None:
        self._clock = 0
        self._running: dict[str, Step] = {}
        self._complete: dict[str, Step] = {}

    def send(self, name: str, state: int, action: int, *, player: str = "", branch: BranchPath = ()) -> None:
        self._clock += 1
        self._running[name] = Step(
            state, action, None, None, len(self._complete), self._clock, None, player=player, branch=branch
        )

    def done(self, *names: str) -> None:
        for name in names:
            self._complete[name] = self._running.pop(name)

    def pay(self, name: str, reward: float) -> None:
        self._clock += 1
        self._complete[name] = replace(self._complete[name], reward=reward, rewarded_at=self._clock)

    def outcome(self, final: float = 0.0) -> Outcome:
        assert not self._running, "every request of these scripts is answered"
        return Outcome(1.0, tuple(self._complete.values()), final)


def race(first: BranchPath, second: BranchPath) -> Iterator[Outcome]:
    """Two independent agents: A makes two calls and is paid; B makes one call, which nobody pays, short or long.

    A short answer of B is complete before A's second call is sent, a long one after A is paid. The true gradient of B is 0.
    """
    for one, other, two in itertools.product(range(ACTIONS), repeat=3):
        script = Script()
        script.send("A1", 0, one, branch=first)
        script.send("B1", 1, other, branch=second)
        if other == 0:
            script.done("B1")
        script.done("A1")
        script.send("A2", 2, two, branch=first)
        script.done("A2")
        script.pay("A2", 1.0 + 0.5 * one - 0.8 * one * two)
        if other == 1:
            script.done("B1")
        yield script.outcome()


def racing() -> Iterator[Outcome]:
    """The race, with nothing declared."""
    return race((), ())


def racing_branches() -> Iterator[Outcome]:
    """The race in two declared branches."""
    return race((0,), (1,))


def teams() -> Iterator[Outcome]:
    """A planner opens two branches, and B continues only after a short answer; a joiner is paid for both.

    Each branch pays its own turns, the plan decides what they are worth, and a reward of the planner comes in hindsight.
    """
    for plan, left, right, join in itertools.product(range(ACTIONS), repeat=4):
        for more in range(ACTIONS) if right == 0 else (None,):
            script = Script()
            script.send("P", 0, plan)
            script.done("P")
            script.send("A", 1, left, branch=(0,))
            script.send("B", 2, right, branch=(1,))
            if right == 0:
                script.done("B")
                script.pay("B", 0.4 * plan)
                script.send("B2", 3, more or 0, branch=(1,))
            script.done("A")
            script.pay("A", 1.2 * left * plan - 0.5)
            script.done("B" if right else "B2")
            if more is not None:
                script.pay("B2", 0.9 * more - 0.3 * plan)
            script.send("J", 4, join)
            script.done("J")
            script.pay("J", 1.5 * join * (left - right))
            script.pay("P", 0.7 * (plan == join))
            yield script.outcome(0.6 * (plan == left))


def nested() -> Iterator[Outcome]:
    """Branch A opens two branches of its own while branch B runs; A's first turn is paid when both have ended."""
    for lead, one, two, other in itertools.product(range(ACTIONS), repeat=4):
        script = Script()
        script.send("B", 3, other, branch=(1,))
        script.send("A", 0, lead, branch=(0,))
        if other == 0:
            script.done("B")
            script.pay("B", 2.0)
        script.done("A")
        script.send("A.1", 1, one, branch=(0, 2))
        script.send("A.2", 2, two, branch=(0, 3))
        order = ("A.1", "A.2") if one == 0 else ("A.2", "A.1")
        for name in order:
            script.done(name)
            script.pay(name, (0.5 + lead) * (one if name == "A.1" else -two))
        if other == 1:
            script.done("B")
            script.pay("B", -1.0)
        script.pay("A", 0.8 * (one == two) - 0.2 * lead)
        yield script.outcome(0.3 * one * other)


def hindsight() -> Iterator[Outcome]:
    """A plan is judged when its execution has ended: the execution decides the plan's reward, and gets none itself."""
    for plan, act in itertools.product(range(ACTIONS), repeat=2):
        script = Script()
        script.send("plan", 0, plan)
        script.done("plan")
        script.send("act", 1 + plan, act)
        script.done("act")
        script.pay("plan", 1.0 * act - 0.6 * plan * act + 0.2)
        yield script.outcome()


def paid_late() -> Iterator[Outcome]:
    """Each turn is paid when the next one has ended, for both; the second one decides whether there is a third."""
    for first, second, third in itertools.product(range(ACTIONS), repeat=3):
        if second == 0 and third:
            continue
        script = Script()
        script.send("1", 0, first)
        script.done("1")
        script.send("2", 1 + first, second)
        script.done("2")
        script.pay("1", 0.5 * first + 0.7 * second)
        if second:
            script.send("3", 3, third)
            script.done("3")
            script.pay("3", -0.4 * third)
            script.pay("2", 1.1 * third * first - 0.3)
        yield script.outcome(0.5 * first * second)


def siblings() -> Iterator[Outcome]:
    """Two parallel turns act in one environment; the reward of A depends on what B did, and who is first on B's length."""
    for one, other in itertools.product(range(ACTIONS), repeat=2):
        script = Script()
        script.send("A", 0, one)
        script.send("B", 1, other)
        script.done(*(("A", "B") if other else ("B", "A")))
        script.pay("A", 1.3 * (one == other) - 0.4 * other)
        yield script.outcome()


def half_read() -> Iterator[Outcome]:
    """A stream is read half-way: the call that its first words cause is sent, answered and paid before it ends."""
    for word, act, last in itertools.product(range(ACTIONS), repeat=3):
        script = Script()
        script.send("stream", 0, word)
        script.send("tool", 1 + word, act)
        script.done("tool")
        script.pay("tool", 1.0 * act - 0.7 * word * act)
        script.done("stream")
        script.send("last", 3, last)
        script.done("last")
        script.pay("last", 0.5 * (last == word))
        yield script.outcome()


def first_of_two() -> Iterator[Outcome]:
    """A joiner answers as soon as one of two parallel turns is complete; the length of the left one decides which."""
    for plan, left, right, join in itertools.product(range(ACTIONS), repeat=4):
        script = Script()
        script.send("plan", 0, plan)
        script.done("plan")
        script.send("left", 1, left)
        script.send("right", 2, right)
        early, late = ("left", "right") if left == 0 else ("right", "left")
        script.done(early)
        script.send("join", 3 + left, join)
        script.done("join")
        script.pay("join", 0.8 * join * plan - 0.5 * join * right)
        script.done(late)
        script.pay(late, 1.0 * (join == right))
        yield script.outcome(0.4 * plan * right)


def forked_while_running() -> Iterator[Outcome]:
    """A conversation has two forks that run at once; the second fork is sent only while the first one is long."""
    for root, one, two in itertools.product(range(ACTIONS), repeat=3):
        if one == 0 and two:
            continue
        script = Script()
        script.send("root", 0, root)
        script.done("root")
        script.send("one", 1, one)
        if one:
            script.send("two", 2 + root, two)
            script.done("two")
            script.pay("two", 0.9 * two - 0.5 * root)
        script.done("one")
        script.pay("one", 0.6 * root + 0.3 * one)
        script.pay("root", -0.2 * root)
        yield script.outcome()


def players() -> Iterator[Outcome]:
    """Two players move at once, twice; the length of a move decides whose next one comes first, and pay comes at the end."""
    for a, b, c, d in itertools.product(range(ACTIONS), repeat=4):
        script = Script()
        script.send("a", 0, a, player="white")
        script.send("b", 1, b, player="black")
        early, late = ("b", "a") if b == 0 else ("a", "b")
        script.done(early)
        if early == "b":
            script.pay("b", 0.3 * a)
        follow = {"a": ("c", 2 + b, c, "white"), "b": ("d", 4, d, "black")}
        for name in (early, late):
            if name == late:
                script.done(late)
            key, state, action, player = follow[name]
            script.send(key, state, action, player=player)
        script.done("d", "c")
        won = 1.4 * a * c - 1.1 * b * d + 0.5 * (a ^ d)
        script.pay("c", won)
        script.pay("d", -won)
        script.pay("a", 0.6 * c * (1 - b))
        yield script.outcome(0.25)


TIMED: list[Environment] = [
    racing,
    racing_branches,
    teams,
    nested,
    hindsight,
    paid_late,
    siblings,
    half_read,
    first_of_two,
    forked_while_running,
    players,
]
