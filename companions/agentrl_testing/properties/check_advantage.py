"""Checks of an advantage by exact enumeration: what it does to the expected policy gradient.

Invariant: the environments are finite, so an expectation is a sum over all groups of episodes. Their turns complete, and are
rewarded, in an order that the policy's own actions decide.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeVar, cast

import numpy as np
from pydantic import BaseModel

from agentrl.algo.advantages import TurnTokens
from agentrl.algo.advantages.gae import ValueEstimate
from agentrl.algo.advantages.parts import Float64Array
from agentrl.algo.batch_advantages import advantages_by, valued_advantages
from agentrl.algo.slots import Loaded, as_loaded
from agentrl.types import Float32Array, Group, Task, Trajectory
from agentrl_testing.properties import timed_trees, trees
from agentrl_testing.properties.exact_gradients import exact_by_turn, expected_estimate
from agentrl_testing.properties.random_programs import random_programs
from agentrl_testing.properties.refusals import refused_as_failure
from agentrl_testing.properties.timed_trees import Environment
from agentrl_testing.properties.trees import STATES, Array, Outcome

Options = TypeVar("Options", bound=BaseModel)
CHECKED: Final[tuple[Environment, ...]] = (
    trees.forked,
    trees.chain,
    timed_trees.racing,
    timed_trees.racing_branches,
    timed_trees.hindsight,
    timed_trees.paid_late,
    timed_trees.siblings,
    timed_trees.half_read,
    timed_trees.forked_while_running,
    timed_trees.players,
)
"""Small enough for all groups of 2; those of at most 6 outcomes for all groups of 3."""
RANDOM_PROGRAMS: Final = 16
"""Random programs beside them."""
VALUES: Final = np.random.default_rng(7).normal(size=STATES).astype(np.float32)
"""What the critic of the checks expects in each state."""
WHOLE_GROUP = 3
TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageReport:
    """The result of `check_advantage`."""

    factors: dict[int, float]
    """By number of episodes in the group: the estimate over the gradient; under `direction` their cosine, at its lowest."""


@refused_as_failure()
def check_advantage(
    function: Callable[[Group], Sequence[Float64Array]]
    | Callable[[Group, Options], Sequence[Float64Array]]
    | Callable[[Group, Options, Sequence[Sequence[Float32Array]]], Sequence[Float64Array | ValueEstimate]],
    options: Options | None = None,
    *,
    bias: Literal["none", "scale", "direction"] = "scale",
    lost_members: bool = True,
    programs: int | None = None,
) -> AdvantageReport:
    """Fail where `function` gives a gradient that it should not give.

    `options` are its second argument, if it has one; None: the defaults of the model that annotates it.

    `bias` says how much may be lost: `none`, the expected estimate is the policy gradient; `scale`, it is the gradient times
    one positive number, the same in every environment; `direction`, it climbs. With `lost_members` that number must not
    depend on how many episodes of a group are left. An option `group_size` is set to the size of a whole group.

    A third parameter is a critic's `values`, here a fixed number for each state, or `logprobs`, here those that were sampled
    with. `programs` is the number of random environments beside the bundled ones; None: 16, and under `direction` none, as
    what climbs another objective need not climb the return everywhere.

    Raises:
        AssertionError: says which environment, what was expected and what came.
    """
    loaded = as_loaded("check_advantage", function, options, Sequence)
    name = loaded.slot.name
    if "group_size" in type(loaded.options).model_fields:
        loaded = replace(loaded, options=loaded.options.model_copy(update={"group_size": WHOLE_GROUP}))

    estimate = _of_episodes(loaded, _third_parameter(function, name))
    more = programs if programs is not None else 0 if bias == "direction" else RANDOM_PROGRAMS
    found: dict[int, list[float]] = {2: [], 3: []}
    for environment in (*CHECKED, *random_programs(more)):
        outcomes = list(environment())
        where = f"{name}, environment {environment.__name__}"
        _check_order(outcomes, estimate, where)
        exact = exact_by_turn(outcomes, 1.0)
        for size in (2, 3) if len(outcomes) <= 6 else (2,):
            got = expected_estimate(outcomes, size, estimate)
            found[size].append(_compare(got, exact, bias, f"{where}, groups of {size}"))
    if bias != "direction":
        _check_one_factor(found, lost_members, name)
    return AdvantageReport(factors={size: min(values) for size, values in found.items()})


def _of_episodes(
    loaded: Loaded[Sequence[Float64Array | ValueEstimate]], third: str
) -> Callable[[Sequence[Trajectory]], Sequence[Float64Array]]:
    """Return the function of episodes alone; `third` names what else the function gets, if it does."""
    name = loaded.slot.name

    def estimate(episodes: Sequence[Trajectory]) -> Sequence[Float64Array]:
        group = Group(index=0, task=Task(id="t", data={}), episodes=tuple(episodes), admitted_version=0)
        if third == "values":
            values = [[VALUES[turn.context_ids] for turn in one.turns] for one in episodes]
            found = valued_advantages(group, cast("Loaded[Sequence[ValueEstimate]]", loaded), values, name)
            per_token = cast("TurnTokens", found.per_token)
            return [np.array([turn[0] for turn in turns], np.float64) for turns in per_token]
        own = cast("Loaded[Sequence[Float64Array]]", loaded)
        if third == "logprobs":
            logprobs = [[turn.output_logprobs for turn in one.turns] for one in episodes]
            return advantages_by(group, lambda played: own(played, logprobs), name=name).per_turn
        return advantages_by(group, own, name=name).per_turn

    return estimate


def _third_parameter(function: Callable[..., object], name: str) -> str:
    """Return `values`, `logprobs`, or nothing: what a function asks for beside the group and its options."""
    every = list(inspect.signature(function).parameters.values())
    positional = [each.name for each in every if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    asked = "".join(positional[2:3])
    if asked not in ("", "values", "logprobs"):
        raise AssertionError(f"{name}: the third parameter is called {asked!r}; expected values or logprobs")
    return asked


def _compare(got: Array, exact: Array, bias: str, where: str) -> float:
    inner, square = float((got * exact).sum()), float((exact * exact).sum())
    if bias == "direction":
        cosine = inner / max(float(np.linalg.norm(got) * np.linalg.norm(exact)), 1e-300)
        if inner <= 0:
            raise AssertionError(
                f"{where}: the expected estimate does not climb the return; cosine {cosine:.3f}, expected > 0"
            )
        return cosine
    factor = 1.0 if bias == "none" else inner / square
    worst = float(np.abs(got - factor * exact).max())
    if worst > TOLERANCE or factor <= 0:
        turn = np.unravel_index(int(np.abs(got - factor * exact).argmax()), got.shape)
        raise AssertionError(
            f"{where}: the expected estimate is not the policy gradient{'' if bias == 'none' else ' times one number'}: at "
            f"state {int(turn[0])}, action {int(turn[1])} it is {got[turn]:+.4f}, expected {factor * exact[turn]:+.4f}; a "
            "baseline must depend neither on the turn's own action nor on what follows from it, and a turn must be credited "
            "with every reward that was set after it was sent"
        )
    return factor


def _check_one_factor(found: dict[int, list[float]], lost_members: bool, name: str) -> None:
    for size, factors in found.items():
        if max(factors) - min(factors) > TOLERANCE:
            raise AssertionError(
                f"{name}: in groups of {size} the estimate is {min(factors):.4f} to {max(factors):.4f} times the "
                "gradient, by environment; expected one number for all, or bias='direction' where a spread divides"
            )
    if lost_members and abs(found[2][0] - found[3][0]) > TOLERANCE:
        raise AssertionError(
            f"{name}: a group of 3 that lost a member has {found[2][0]:.4f} times the gradient, a whole one "
            f"{found[3][0]:.4f}; scale by the option group_size, or pass lost_members=False"
        )


def _check_order(
    outcomes: Sequence[Outcome], estimate: Callable[[Sequence[Trajectory]], Sequence[Float64Array]], where: str
) -> None:
    episodes = [outcomes[at % len(outcomes)].trajectory() for at in (0, len(outcomes) - 1, 1)]
    first, turned = estimate(episodes), estimate([*episodes[1:], episodes[0]])
    for one, other in zip(first, [turned[-1], *turned[:-1]], strict=True):
        if not np.allclose(one, other, rtol=1e-12, atol=1e-12):
            raise AssertionError(
                f"{where}: the order of the episodes shows: {one.tolist()} and, with the first one last, {other.tolist()}"
            )
