"""Each bundled advantage: its properties by enumeration, its golden values, and what it climbs if that is no mean return."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import pytest

from agentrl.algo.advantages import ADVANTAGES
from agentrl.algo.advantages.episodes import (
    EpisodeOptions,
    GrpoOptions,
    OffPolicyOptions,
    PassAtKOptions,
    best_of_k,
    grpo,
    max_rl,
    off_policy_baseline,
)
from agentrl.algo.advantages.episodes import episode as by_episode
from agentrl.algo.advantages.gae import GaeOptions, ValueEstimate, gae, token_gae, turn_gae
from agentrl.algo.advantages.parts import Float64Array
from agentrl.algo.advantages.turn_returns import OptimalBaselineOptions, optimal_baseline, returns_to_go
from agentrl.algo.batch_advantages import whiten
from agentrl.algo.slots import NoOptions
from agentrl.errors import InvariantError
from agentrl.types import Float32Array, Group, Trajectory
from agentrl_testing import check_advantage
from agentrl_testing.properties.random_programs import random_programs
from agentrl_testing.properties.timed_trees import Environment, forked_while_running, hindsight, paid_late, racing_branches
from tests.algo.build import episode, group, linear, turn


def load(name: str) -> Callable[..., Sequence[Float64Array]]:
    return cast("Callable[..., Sequence[Float64Array]]", ADVANTAGES[name].function)


@pytest.mark.parametrize("name", ["turn", "rloo", "optimal_baseline", "reinforce_plus_plus"])
def test_its_expected_estimate_is_the_policy_gradient(name: str) -> None:
    check_advantage(load(name), ADVANTAGES[name].options(), bias="none")


@pytest.mark.parametrize("name", ["turn_gae", "token_gae"])
def test_with_a_trace_of_1_a_critic_gives_the_policy_gradient_in_every_random_program(name: str) -> None:
    report = check_advantage(load(name), GaeOptions(trace=1.0), bias="none", programs=48)
    assert report.factors == {2: 1.0, 3: 1.0}
    with pytest.raises(AssertionError, match="not the policy gradient"):
        check_advantage(load(name), GaeOptions(trace=0.5))


def without_fractions(
    group: Group, options: GaeOptions, values: Sequence[Sequence[Float32Array]]
) -> Sequence[ValueEstimate]:
    """Credit the final reward without its fraction."""
    whole = replace(group, episodes=tuple(replace(one, final_reward=int(one.final_reward or 0)) for one in group.episodes))
    return turn_gae(whole, options, values)


def test_an_advantage_that_drops_the_fraction_of_a_reward_is_refused() -> None:
    with pytest.raises(AssertionError, match="not the policy gradient"):
        check_advantage(without_fractions, GaeOptions(trace=1.0), bias="none")


def test_random_programs_have_fractional_rewards_players_and_an_order_that_actions_decide() -> None:
    outcomes = [outcome.trajectory() for program in random_programs(48) for outcome in program()]
    rewards = [turn.reward for one in outcomes for turn in one.turns if turn.reward is not None]
    assert all(value % 1 for value in [*rewards, *(one.final_reward or 0.0 for one in outcomes)])
    assert {turn.player for one in outcomes for turn in one.turns} == {"", "white", "black"}
    assert any(not any(turn.reward for turn in one.turns) for one in outcomes), "some pay at the end alone"
    orders = [{tuple(turn.sent_after for turn in o.trajectory().turns) for o in each()} for each in random_programs(48)]
    assert sum(len(order) > 1 for order in orders) > 20


def test_a_third_parameter_that_no_run_gives_is_refused() -> None:
    def strange(group: Group, options: NoOptions, weights: object) -> Sequence[Float64Array]:
        return []

    with pytest.raises(AssertionError, match="expected values or logprobs"):
        check_advantage(strange, NoOptions())


def test_the_group_mean_loses_the_same_share_of_the_gradient_in_whole_and_short_groups() -> None:
    report = check_advantage(by_episode, EpisodeOptions())
    assert report.factors == pytest.approx({2: 2 / 3, 3: 2 / 3})


def test_dr_grpo_loses_more_of_the_gradient_in_short_groups() -> None:
    options = ADVANTAGES["dr_grpo"].options()
    assert check_advantage(load("dr_grpo"), options, lost_members=False).factors == pytest.approx({2: 1 / 2, 3: 2 / 3})
    with pytest.raises(AssertionError, match="lost a member"):
        check_advantage(load("dr_grpo"), options)


@pytest.mark.parametrize("name", ["grpo", "max_rl", "pass_at_k"])
def test_one_that_changes_the_objective_still_climbs_the_return(name: str) -> None:
    options = ADVANTAGES[name].options()
    check_advantage(load(name), options, bias="direction")
    with pytest.raises(AssertionError, match="not the policy gradient"):
        check_advantage(load(name), options)


def credited_by_completion(group: Group, options: NoOptions) -> Sequence[Float64Array]:
    """Pay a turn what was earned by the turns that were sent when it was complete."""
    return [
        np.array(
            [
                (own.reward or 0.0)
                + (one.final_reward or 0.0)
                + sum(other.reward or 0.0 for other in one.turns if other.sent_after > at and other.player == own.player)
                for at, own in enumerate(one.turns)
            ]
        )
        for one in group.episodes
    ]


def less_the_best(group: Group, options: NoOptions) -> Sequence[Float64Array]:
    """Subtract the best return of the group, the own one included."""
    returns = [one.episode_return for one in group.episodes]
    return [np.full(len(one.turns), own - max(returns)) for one, own in zip(group.episodes, returns, strict=True)]


@pytest.mark.parametrize("function", [credited_by_completion, less_the_best])
def test_an_advantage_with_a_hidden_bias_is_refused(
    function: Callable[[Group, NoOptions], Sequence[Float64Array]],
) -> None:
    with pytest.raises(AssertionError, match="not the policy gradient"):
        check_advantage(function, NoOptions(), lost_members=False)


def first_is_the_baseline(group: Group, options: NoOptions) -> Sequence[Float64Array]:
    return [np.full(len(one.turns), one.episode_return - group.episodes[0].episode_return) for one in group.episodes]


def test_an_advantage_that_depends_on_the_order_of_the_episodes_is_refused() -> None:
    with pytest.raises(AssertionError, match="order of the episodes shows"):
        check_advantage(first_is_the_baseline, NoOptions())


RETURNS = (1.0, 0.0, 0.0, 3.0)
GOLDEN: Mapping[str, Sequence[float]] = {
    "episode": [0.0, -1.0, -1.0, 2.0],
    "turn": [0.0, -4 / 3, -4 / 3, 8 / 3],
    "grpo": [0.0, -1 / math.sqrt(2), -1 / math.sqrt(2), math.sqrt(2)],
    "dr_grpo": [0.0, -1.0, -1.0, 2.0],
    "rloo": [0.0, -4 / 3, -4 / 3, 8 / 3],
    "reinforce_plus_plus": [1.0, 0.0, 0.0, 3.0],
    "max_rl": [0.0, -1.0, -1.0, 2.0],
    # k = 2: sets {1,0}, {1,0}, {1,3} give the first (1 - 0) + (1 - 0) + (3 - 3), times 4 / 6, and so on.
    "pass_at_k": [4 / 3, 0.0, 0.0, 16 / 3],
    "optimal_baseline": [0.0, -4 / 3, -4 / 3, 8 / 3],
}


def test_the_optimal_baseline_weighs_a_return_by_the_energy_of_all_tokens_up_to_the_end_of_its_turn() -> None:
    def of(first: float, second: float, final: float) -> Trajectory:
        pair = [
            replace(turn(None, parent), output_logprobs=np.log(np.array([p], np.float32)))
            for parent, p in ((None, first), (0, second))
        ]
        return episode(pair, final)

    found = optimal_baseline(group([of(0.5, 0.5, 0.0), of(0.5, 0.5, 1.0), of(0.2, 0.5, 3.0)]), OptimalBaselineOptions())
    first, second = 0.25 + 3 * 0.64, 0.5 + 3 * 0.89  # energies (1 - p)^2 are 0.25 and 0.64, and add up along the episode
    assert found[0].tolist() == pytest.approx([-first / (0.25 + 0.64), -second / (0.5 + 0.89)])
    assert found[1].tolist() == pytest.approx([1 - 3 * 0.64 / 0.89, 1 - 3 * 0.89 / 1.39])


def recorded(group: Group) -> list[list[Float32Array]]:
    """Return the log-probs of a trainer with the weights that sampled."""
    return [[turn.output_logprobs for turn in one.turns] for one in group.episodes]


def test_the_off_policy_baseline_of_the_others_gives_the_policy_gradient_and_with_the_own_episode_it_climbs() -> None:
    check_advantage(off_policy_baseline, OffPolicyOptions(leave_one_out=True), bias="none")
    check_advantage(off_policy_baseline, OffPolicyOptions(), bias="direction")


def moved(group: Group, logs: Sequence[float]) -> list[list[Float32Array]]:
    """Return the log-probs of a trainer whose log-prob of the first token of each episode differs by `logs`."""
    found = recorded(group)
    for own, by in zip(found, logs, strict=True):
        own[0] = own[0] + np.eye(1, len(own[0]), dtype=np.float32)[0] * np.float32(by)
    return found


def test_the_off_policy_baseline_weighs_returns_by_squared_weights_and_energy() -> None:
    played, logs = group([linear([value]) for value in RETURNS]), [-0.5, 0.25, 0.0, -1.0]
    current = moved(played, logs)
    masses = [
        math.exp(2 * by) * sum((1 - math.exp(value)) ** 2 for value in own[0].tolist())
        for by, own in zip(logs, current, strict=True)
    ]
    baseline = sum(mass * value for mass, value in zip(masses, RETURNS, strict=True)) / sum(masses)
    expected = [value - baseline for value in RETURNS]
    got = off_policy_baseline(played, OffPolicyOptions(), current)
    assert [float(values[0]) for values in got] == pytest.approx(expected, rel=1e-6)
    normalized = off_policy_baseline(played, OffPolicyOptions(normalize_std=True), current)
    spread = math.sqrt(sum((value - 1) ** 2 for value in RETURNS) / 4)
    assert [float(values[0]) for values in normalized] == pytest.approx([value / spread for value in expected], rel=1e-6)


def test_an_episode_that_outweighs_the_others_is_its_own_baseline_and_equal_returns_teach_nothing() -> None:
    played = group([linear([value]) for value in RETURNS])
    far = off_policy_baseline(played, OffPolicyOptions(), moved(played, [200.0, 0.0, 0.0, 0.0]))
    assert [float(values[0]) for values in far] == pytest.approx([0.0, -1.0, -1.0, 2.0])
    alike = group([linear([0.1])] * 3)
    same = off_policy_baseline(alike, OffPolicyOptions(normalize_std=True), moved(alike, [3.0, 0.0, -3.0]))
    assert [values.tolist() for values in same] == [[0.0]] * 3


def test_off_policy_the_others_baseline_keeps_the_gradient_and_the_whole_one_has_less_variance() -> None:
    """A coin that wins by chance q is weighed to chance p: the gradient by the log-odds is p (1 - p)."""
    p, q, members = 0.7, 0.4, 3
    moments = {leave: [0.0, 0.0] for leave in (True, False)}
    for wins in itertools.product((0.0, 1.0), repeat=members):
        chance = math.prod(q if win else 1 - q for win in wins)
        weights = [p / q if win else (1 - p) / (1 - q) for win in wins]
        played = group(
            [
                episode([replace(turn(win, None), output_logprobs=np.log([q if win else 1 - q]).astype(np.float32))])
                for win in wins
            ]
        )
        current = [[np.log([p if win else 1 - p]).astype(np.float32)] for win in wins]
        for leave, sums in moments.items():
            values = off_policy_baseline(played, OffPolicyOptions(leave_one_out=leave), current)
            parts = [w * float(v[0]) * (win - p) for w, v, win in zip(weights, values, wins, strict=True)]
            estimate = sum(parts) / members
            sums[0] += chance * estimate
            sums[1] += chance * estimate**2
    assert moments[True][0] == pytest.approx(p * (1 - p), rel=1e-5)
    variances = {leave: second - first**2 for leave, (first, second) in moments.items()}
    assert variances[False] < variances[True]


@pytest.mark.parametrize("name", GOLDEN)
def test_the_golden_values_stay(name: str) -> None:
    played = group([linear([value]) for value in RETURNS])
    got = [float(values[0]) for values in load(name)(played, ADVANTAGES[name].options())]
    assert got == pytest.approx(GOLDEN[name], abs=1e-5)


@pytest.mark.parametrize("name", sorted(GOLDEN.keys() - {"reinforce_plus_plus"}))
def test_equal_returns_teach_exactly_nothing(name: str) -> None:
    for value in (0.1, 0.0, -3e29):
        played = group([linear([value, None], value)] * 3)
        assert [values.tolist() for values in load(name)(played, ADVANTAGES[name].options())] == [[0.0, 0.0]] * 3


def coin(function: Callable[[Group], Sequence[Float64Array]], members: int, p: float) -> float:
    """Return the expected estimate of the derivative by the log-odds of an action that succeeds with chance `p`."""
    total = 0.0
    for wins in itertools.product((0.0, 1.0), repeat=members):
        chance = math.prod(p if win else 1 - p for win in wins)
        values = function(group([linear([win]) for win in wins]))
        total += chance / members * sum(float(v[0]) * (win - p) for v, win in zip(values, wins, strict=True))
    return total


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
@pytest.mark.parametrize("members", [2, 3, 5])
def test_max_rl_climbs_a_truncated_log_likelihood(p: float, members: int) -> None:
    """The derivative of -sum over k below n of (1 - p)^k / k by p, times that of p by the log-odds."""
    exact = sum((1 - p) ** k for k in range(members - 1)) * p * (1 - p)
    assert coin(lambda one: max_rl(one, NoOptions()), members, p) == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
@pytest.mark.parametrize(("members", "k"), [(2, 2), (3, 2), (5, 2), (5, 4)])
def test_pass_at_k_climbs_the_chance_that_one_of_k_succeeds(p: float, members: int, k: int) -> None:
    exact = k * (1 - p) ** (k - 1) * p * (1 - p)
    assert coin(lambda one: best_of_k(one, PassAtKOptions(k=k)), members, p) == pytest.approx(exact, rel=1e-9)


def test_a_group_with_fewer_than_k_episodes_learns_nothing() -> None:
    played = group([linear([1.0]), linear([0.0])])
    assert [v.tolist() for v in best_of_k(played, PassAtKOptions(k=3))] == [[0.0], [0.0]]


def test_whitening_gives_the_tokens_of_a_batch_mean_0_and_deviation_1() -> None:
    values = [[np.array([1.0, 2.0]), np.array([3.0])], [np.array([-5.0])]]
    tokens = [[np.array([3.0, 1.0]), np.array([2.0])], [np.array([4.0])]]
    result = np.concatenate([one for per_group in whiten(values, tokens) for one in per_group])
    weights = np.concatenate([one for per_group in tokens for one in per_group])
    assert (weights * result).sum() == pytest.approx(0.0, abs=1e-12)
    assert (weights * result**2).sum() / weights.sum() == pytest.approx(1.0)
    assert whiten([[np.array([7.0]), np.array([7.0])]], [[np.ones(1), np.ones(1)]])[0][0].tolist() == [0.0]
    assert whiten([], []) == []


# A critic's advantages.


@pytest.mark.parametrize(("discount", "trace"), [(1.0, 1.0), (0.9, 0.95), (0.5, 0.0)])
def test_gae_is_the_sum_of_the_discounted_errors(discount: float, trace: float) -> None:
    rng = np.random.default_rng(1)
    rewards, values = rng.normal(size=7), rng.normal(size=7)
    following = np.append(values[1:], 0.0)
    errors = rewards + discount * following - values
    exact = [sum((discount * trace) ** (j - i) * errors[j] for j in range(i, 7)) for i in range(7)]
    assert gae(rewards.tolist(), values.tolist(), discount, trace) == pytest.approx(exact)


@pytest.mark.parametrize("environment", [hindsight, paid_late, racing_branches, forked_while_running])
@pytest.mark.parametrize("discount", [1.0, 0.5])
def test_with_a_trace_of_1_a_turn_gets_its_return_to_go_less_its_value(environment: Environment, discount: float) -> None:
    options = GaeOptions(discount=discount, trace=1.0)
    for number, outcome in enumerate(environment()):
        one = outcome.trajectory()
        values = [np.full(1, 0.1 * number + at, np.float32) for at in range(len(one.turns))]
        [estimate] = turn_gae(group([one]), options, [values])
        expected = returns_to_go(one, discount) - np.concatenate(values)
        assert np.concatenate(estimate.advantages) == pytest.approx(expected)
        assert np.concatenate(estimate.targets) == pytest.approx(returns_to_go(one, discount))


def test_token_gae_runs_over_the_tokens_of_all_turns_and_pays_a_turn_at_its_last_one() -> None:
    one = episode([turn(1.0, tokens=2), turn(None, 0, tokens=3)], 5.0)
    values = [np.array([0.5, 0.25], np.float32), np.array([0.0, 1.0, 2.0], np.float32)]
    [estimate] = token_gae(group([one]), GaeOptions(discount=0.9, trace=0.8), [values])
    flat = gae([0.0, 1.0, 0.0, 0.0, 5.0], [0.5, 0.25, 0.0, 1.0, 2.0], 0.9, 0.8)
    assert [values.tolist() for values in estimate.advantages] == [pytest.approx(flat[:2]), pytest.approx(flat[2:])]
    assert np.concatenate(estimate.targets) == pytest.approx(np.array(flat) + np.concatenate(values))


def test_independent_branches_share_no_step_of_a_token_gae() -> None:
    turns = [turn(1.0, branch=(0,), tokens=2), turn(7.0, sent_after=1, branch=(1,), tokens=1)]
    values = [np.zeros(2, np.float32), np.zeros(1, np.float32)]
    [estimate] = token_gae(group([episode(turns)]), GaeOptions(discount=1.0, trace=1.0), [values])
    assert [one.tolist() for one in estimate.advantages] == [[1.0, 1.0], [7.0]]


def test_a_branch_takes_its_own_steps_alone_though_the_turn_before_it_was_recorded_later() -> None:
    turns = [turn(branch=(0,), sent_at=3), turn(sent_at=1), turn(branch=(1,), sent_at=5)]
    values = [np.array([value], np.float32) for value in (2.0, 1.0, 4.0)]
    for estimate_of in (token_gae, turn_gae):
        [estimate] = estimate_of(group([episode(turns, 8.0)]), GaeOptions(discount=1.0, trace=0.5), [values])
        # The second turn's steps are 0 + 2 - 1, 0 + 4 - 2 and 8 - 4, of weights 1, 1/2 and 1/4.
        assert [own.tolist() for own in estimate.advantages] == [[8 - 2], [1 + 2 / 2 + 4 / 4], [8 - 4]]


def test_values_that_do_not_fit_the_tokens_are_refused() -> None:
    one = episode([turn(1.0, tokens=2)])
    for wrong in ([np.zeros(3, np.float32)], [np.array([0.0, np.nan], np.float32)], []):
        with pytest.raises(InvariantError, match="finite value for each of"):
            turn_gae(group([one]), GaeOptions(), [wrong])


def test_the_off_policy_baseline_of_a_player_weighs_its_own_trained_turns() -> None:
    def played(white: float, black: float) -> Trajectory:
        return episode([turn(white, player="white"), turn(black, player="black", sent_after=1), turn(0.0, sent_after=2)])

    whole = group([played(1.0, 0.0), played(0.0, 1.0)])
    out = [
        replace(one, turns=(*one.turns[:2], replace(one.turns[2], player="white", left_out=True))) for one in whole.episodes
    ]
    games = replace(whole, episodes=tuple(out))
    logs = [[0.5, -0.7, 2.0], [0.0, 0.0, 0.0]]
    current = [
        [own.output_logprobs + np.float32(by) for own, by in zip(one.turns, shifts, strict=True)]
        for one, shifts in zip(games.episodes, logs, strict=True)
    ]
    got = off_policy_baseline(games, OffPolicyOptions(), current)
    for at, won in ((0, 0), (1, 1)):  # white wins the first game, black the second
        masses = [math.exp(2 * shifts[at]) * (1 - math.exp(-0.5 + shifts[at])) ** 2 for shifts in logs]
        baseline = masses[won] / sum(masses)
        assert [float(values[at]) for values in got] == pytest.approx(
            [(game == won) - baseline for game in (0, 1)], rel=1e-5
        )


def test_grpo_adds_epsilon_to_the_spread() -> None:
    first, second = grpo(group([linear([1.0]), linear([0.0])]), GrpoOptions(epsilon=1.0))
    assert (float(first[0]), float(second[0])) == pytest.approx((0.5 / (math.sqrt(0.5) + 1), -0.5 / (math.sqrt(0.5) + 1)))


def test_max_rl_teaches_nothing_where_the_mean_is_not_above_0() -> None:
    assert [values.tolist() for values in max_rl(group([linear([-1.0]), linear([0.5])]), NoOptions())] == [[0.0], [0.0]]


def test_a_turn_s_value_is_that_before_its_first_token() -> None:
    one = episode([turn(1.0, tokens=3)])
    [found] = turn_gae(group([one]), GaeOptions(trace=1.0), [[np.array([0.25, 5.0, 9.0], np.float32)]])
    assert [own.tolist() for own in found.advantages] == [[0.75] * 3]
    assert [own.tolist() for own in found.targets] == [[1.0] * 3]
