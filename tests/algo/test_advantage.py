"""Advantages against goldens worked out by hand and against slow references in plain Python."""

from __future__ import annotations

import math
import pkgutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import agentrl.algo
from agentrl.algo.advantages import GroupAdvantages
from agentrl.algo.advantages.turn_returns import returns_to_go
from agentrl.algo.batch_advantages import advantages, token_advantages
from agentrl.algo.config import AlgorithmConfig
from agentrl.errors import InvariantError
from agentrl.types import BranchPath, EpisodeFailure, Group, Trajectory, Turn
from tests.algo.build import EPISODE, TURN, changed, discount_of, episode, group, linear, turn

# Slow references.


def share_rewards(trajectory: Trajectory, one: int, other: int) -> bool:
    """Whether no declared branch holds the one turn and not the other."""
    first, second = trajectory.turns[one].branch, trajectory.turns[other].branch
    return all(a == b for a, b in zip(first, second, strict=False))


def depth_of(trajectory: Trajectory, index: int) -> int:
    """Return the turns of the longest chain before a turn, each complete when the next one was sent."""
    before = [i for i in range(trajectory.turns[index].sent_after) if share_rewards(trajectory, i, index)]
    return max((1 + depth_of(trajectory, i) for i in before), default=0)


def slow_returns_to_go(trajectory: Trajectory, discount: float) -> list[float]:
    turns = trajectory.turns
    result: list[float] = []
    for index, own in enumerate(turns):
        shared = [other for i, other in enumerate(turns) if share_rewards(trajectory, index, i)]
        later = [other.sent_at for other in shared if other.sent_at > own.sent_at]
        total = discount ** len(later) * (trajectory.final_reward or 0.0)
        for other in shared:
            if other.reward is not None and other.rewarded_at is not None and other.rewarded_at > own.sent_at:
                total += discount ** sum(moment < other.rewarded_at for moment in later) * other.reward
        result.append(total)
    return result


def slow_advantages(many: Group, config: AlgorithmConfig) -> list[list[float]]:
    episodes = many.episodes
    if config.advantage_name == "episode":
        returns = [sum(t.reward or 0.0 for t in e.turns) + (e.final_reward or 0.0) for e in episodes]
        mean, n, whole = sum(returns) / len(returns), len(returns), max(config.group_size, len(returns))
        scale = n / (n - 1) * (whole - 1) / whole
        return [[(value - mean) * scale] * len(e.turns) for value, e in zip(returns, episodes, strict=True)]

    def value_at(trajectory: Trajectory, depth: int, branch: BranchPath) -> float:
        to_go = slow_returns_to_go(trajectory, discount_of(config))
        known = [(depth_of(trajectory, at), g, trajectory.turns[at].branch == branch) for at, g in enumerate(to_go)]
        if not known:
            return trajectory.final_reward or 0.0
        known = [each for each in known if each[2]] or known
        nearest = max((d for d, _, _ in known if d <= depth), default=min(d for d, _, _ in known))
        here = [g for d, g, _ in known if d == nearest]
        return sum(here) / len(here)

    result: list[list[float]] = []
    for own in range(len(episodes)):
        to_go = slow_returns_to_go(episodes[own], discount_of(config))
        row: list[float] = []
        for index, value in enumerate(to_go):
            depth = depth_of(episodes[own], index)
            branch = episodes[own].turns[index].branch
            others = [value_at(e, depth, branch) for j, e in enumerate(episodes) if j != own]
            row.append(value - sum(others) / len(others))
        result.append(row)
    return result


# Random groups of random episodes.

rewards = st.floats(-10, 10, allow_nan=False).map(lambda value: round(value, 3))


@st.composite
def trajectories(draw: st.DrawFn, max_turns: int = 6) -> Trajectory:
    count = draw(st.integers(0, max_turns))
    sent_after = [draw(st.integers(0, i)) for i in range(count)]
    parents = [draw(st.one_of(st.none(), st.integers(0, n - 1))) if n else None for n in sent_after]
    turns = [draw(timed_turns(p, n)) for p, n in zip(parents, sent_after, strict=True)]
    return episode(turns, draw(rewards))


@st.composite
def timed_turns(draw: st.DrawFn, parent: int | None, sent_after: int) -> Turn:
    reward, sent_at = draw(st.none() | rewards), draw(st.integers(0, 12))
    return turn(
        reward,
        parent,
        sent_after=sent_after,
        sent_at=sent_at,
        rewarded_at=None if reward is None else sent_at + draw(st.integers(1, 12)),
        branch=draw(st.sampled_from([(), (0,), (1,), (0, 2)])),
    )


groups = st.lists(trajectories(), min_size=2, max_size=5).map(group)
discounts = st.sampled_from([1.0, 0.9, 0.5])


@given(trajectories(max_turns=10), discounts)
def test_returns_to_go_match_a_sum_over_the_turns_that_follow(trajectory: Trajectory, discount: float) -> None:
    np.testing.assert_allclose(
        returns_to_go(trajectory, discount), slow_returns_to_go(trajectory, discount), rtol=1e-12, atol=1e-12
    )


@given(groups, discounts, st.sampled_from(["episode", "turn"]))
def test_advantages_match_the_slow_reference(many: Group, discount: float, name: str) -> None:
    config = AlgorithmConfig.model_validate({"advantage": name} | ({"discount": discount} if name == "turn" else {}))
    result = advantages(many, config)
    for fast, slow in zip(result.per_turn, slow_advantages(many, config), strict=True):
        np.testing.assert_allclose(fast, slow, rtol=1e-9, atol=1e-7)


def test_the_episode_advantage_is_the_return_minus_the_group_mean_at_every_turn() -> None:
    result = advantages(group([linear([-0.5, None], 1.5), linear([None], 0.0), linear([None] * 3, 2.0)]), EPISODE)
    assert [values.tolist() for values in result.per_turn] == [[0.0, 0.0], [-1.0], [1.0, 1.0, 1.0]]
    assert not result.zero_variance


def test_the_episode_advantage_of_a_group_that_lost_members_is_scaled_as_that_of_a_whole_one() -> None:
    short = group([linear([None], 3.0), linear([None], 0.0), linear([None], 0.0)])
    result = advantages(short, changed(EPISODE, {"group_size": 4}))
    # R minus the mean is 2, -1, -1; leave-one-out is 3/2 of that, and a whole group of 4 has 3/4 of leave-one-out.
    assert [values.item() for values in result.per_turn] == [2.25, -1.125, -1.125]
    normalized = changed(EPISODE, {"group_size": 4, "normalize_std": True})
    whole = changed(EPISODE, {"normalize_std": True})
    for one, other in zip(advantages(short, normalized).per_turn, advantages(short, whole).per_turn, strict=True):
        assert one.item() == pytest.approx(other.item(), rel=1e-12)


def test_the_turn_advantage_of_a_linear_group_worked_out_by_hand() -> None:
    config = changed(TURN, {"discount": 0.5})
    result = advantages(group([linear([1.0, 2.0, None], 4.0), linear([8.0], 2.0)]), config)
    # G of the first: turn 2: 4; turn 1: 2 + 0.5 * 4 = 4; turn 0: 1 + 0.5 * 4 = 3. Of the second: 10, carried on.
    assert [values.tolist() for values in result.per_turn] == [[3 - 10, 4 - 10, 4 - 10], [10 - 3]]


def test_parallel_turns_share_what_was_set_after_both_were_sent() -> None:
    # Turns 1 (reward 1) and 2 (reward 5) run at the same time; turn 3 (reward 2) is sent when both are complete.
    tree = [turn(), turn(1.0, 0), turn(5.0, 0), turn(2.0, 2)]
    assert returns_to_go(episode(tree, 16.0), 0.5).tolist() == [0.5**2 * 6 + 0.5**3 * 18, 6 + 0.5 * 18, 6 + 0.5 * 18, 18.0]


def test_turns_of_two_declared_branches_share_the_final_reward_only() -> None:
    tree = [turn(), turn(1.0, 0, branch=(0,)), turn(5.0, 0, branch=(1,)), turn(2.0, 2)]
    assert returns_to_go(episode(tree, 16.0), 0.5).tolist() == [0.5**2 * 6 + 0.5**3 * 18, 1 + 9, 5 + 9, 18.0]


def test_a_turn_gets_no_reward_that_was_set_before_it_was_sent_and_any_that_was_set_later() -> None:
    turns = [turn(1.0, sent_at=0, rewarded_at=5), turn(4.0, 0, sent_at=2, rewarded_at=3), turn(sent_after=2, sent_at=4)]
    assert returns_to_go(episode(turns), 1.0).tolist() == [5.0, 5.0, 1.0]


def test_turn_rewards_reach_the_turns_before_a_fork_and_before_a_new_context() -> None:
    turns = [turn(sent_after=0), turn(sent_after=1), turn(1.0, sent_after=2)]
    assert returns_to_go(episode(turns), 1.0).tolist() == [1.0, 1.0, 1.0]


def test_with_only_a_final_reward_the_turn_advantage_is_reinforce_leave_one_out() -> None:
    result = advantages(group([linear([None] * n, r) for n, r in ((1, 1.0), (4, 0.0), (2, 0.5))]), TURN)
    expected = [1.0 - 0.25, 0.0 - 0.75, 0.5 - 0.5]
    for values, value in zip(result.per_turn, expected, strict=True):
        np.testing.assert_allclose(values, value, atol=1e-15)


@given(groups, st.lists(rewards, min_size=1, max_size=8), rewards)
def test_a_turn_baseline_does_not_move_when_the_own_episode_acts_or_stops_otherwise(
    many: Group, own: list[float], final: float
) -> None:
    """At equal depth, G - A of episode 0 is the same whatever episode 0 did."""
    known: dict[int, float] = {}
    for first in (linear(own, final), linear([-reward for reward in own], 1 - final), linear(own[:1], -final)):
        result = advantages(group([first, *many.episodes[1:]]), TURN)
        baseline = returns_to_go(first, 1.0) - result.per_turn[0]
        for depth, value in enumerate(baseline.tolist() if not result.zero_variance else []):
            assert value == pytest.approx(known.setdefault(depth, value), abs=1e-9)


@pytest.mark.parametrize("config", [EPISODE, TURN])
@pytest.mark.parametrize("normalize", [False, True])
def test_a_group_of_equal_returns_gets_exactly_zero_and_says_so(config: AlgorithmConfig, normalize: bool) -> None:
    config = changed(config, {"normalize_std": normalize})
    result = advantages(group([linear([0.1, 0.2], 0.0), linear([0.1, 0.1, 0.1], None)][:1] * 3), config)
    assert result.zero_variance
    assert [values.tolist() for values in result.per_turn] == [[0.0, 0.0]] * 3


def test_returns_equal_up_to_rounding_are_zero_variance() -> None:
    normalized = changed(EPISODE, {"normalize_std": True})
    result = advantages(group([linear([0.1, 0.2]), linear([0.3])]), normalized)
    assert 0.1 + 0.2 != 0.3
    assert result.zero_variance
    assert [values.tolist() for values in result.per_turn] == [[0.0, 0.0], [0.0]]


@pytest.mark.parametrize("config", [EPISODE, TURN])
def test_a_group_of_one_has_nothing_to_compare_with(config: AlgorithmConfig) -> None:
    result = advantages(group([linear([1.0], 5.0)]), config)
    assert result.zero_variance
    assert result.per_turn[0].tolist() == [0.0]


def test_turns_that_differ_within_equal_episodes_are_not_zero_variance() -> None:
    """The means by depth are equal across episodes, the turns are not: zeroing them would bias the estimate."""
    # Turn 0 is paid after turn 1 is sent and before turn 2 is, which runs at the same time.
    tree = episode([turn(1.0, sent_at=1, rewarded_at=4), turn(None, 0, sent_at=3), turn(None, 0, sent_at=5)], 0.0)
    result = advantages(group([tree, tree]), TURN)
    assert not result.zero_variance
    assert [values.tolist() for values in result.per_turn] == [[0.0, 0.5, -0.5]] * 2


def test_episodes_without_turns_still_count_in_the_baseline() -> None:
    for config in (EPISODE, TURN):
        result = advantages(group([episode([], 0.0), linear([None], 1.0)]), config)
        assert result.per_turn[0].tolist() == []
        assert result.per_turn[1].tolist() == [0.5 if config is EPISODE else 1.0]


def test_normalized_episode_advantages_have_the_population_standard_deviation_one() -> None:
    normalized = changed(EPISODE, {"normalize_std": True})
    result = advantages(group([linear([None] * n, r) for n, r in ((3, 1.0), (1, 0.0), (2, 0.0))]), normalized)
    values = np.array([row[0] for row in result.per_turn])
    assert values.std() == pytest.approx(1.0)
    np.testing.assert_allclose(values, np.array([2.0, -1.0, -1.0]) / math.sqrt(2.0))


@pytest.mark.parametrize("scale", [5e-324, 1e-200, 1e-30, 1.0, 1e20, 1e29])
@pytest.mark.parametrize("config", [EPISODE, TURN])
@pytest.mark.parametrize("normalize", [False, True])
def test_no_reward_however_small_or_large_gives_nan_or_infinity(
    scale: float, config: AlgorithmConfig, normalize: bool
) -> None:
    config = changed(config, {"normalize_std": normalize})
    many = group([linear([scale, None, -scale], 2 * scale), linear([None], -3 * scale), linear([scale] * 4, 0.0)])
    result = advantages(many, config)
    for trajectory, per_turn in zip(many.episodes, result.per_turn, strict=True):
        [sample] = trajectory.branches()
        tokens = token_advantages(sample, per_turn)
        assert np.isfinite(tokens).all()
        if normalize:
            assert np.abs(tokens).max() <= 3


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e31])
def test_a_reward_that_is_not_finite_is_refused(bad: float) -> None:
    with pytest.raises(InvariantError, match="finite rewards"):
        advantages(group([linear([bad]), linear([1.0])]), EPISODE)
    with pytest.raises(InvariantError, match="finite rewards"):
        advantages(group([linear([None], bad), linear([1.0])]), TURN)


def test_a_reward_without_a_time_or_with_an_earlier_one_than_its_turn_is_refused() -> None:
    for wrong in (turn(1.0, sent_at=4, rewarded_at=3), turn(1.0, sent_at=4, rewarded_at=4), turn(sent_at=4, rewarded_at=5)):
        with pytest.raises(InvariantError, match="turn 0: "):
            advantages(group([episode([wrong], 1.0), linear([1.0])]), TURN)


def test_given_advantages_are_those_of_all_turns_whatever_the_settings_are() -> None:
    many = [replace(linear([1.0, 2.0], 3.0), advantage=0.25), replace(linear([None], 0.0), advantage=-4.0)]
    for config in (EPISODE, changed(TURN, {"discount": 0.5})):
        config = changed(config, {"group_size": 8, "normalize_std": True})
        result = advantages(group(many), config)
        assert [values.tolist() for values in result.per_turn] == [[0.25, 0.25], [-4.0]]
        assert not result.zero_variance
    alone = advantages(group(many[:1]), EPISODE)
    assert (alone.per_turn[0].tolist(), alone.zero_variance) == ([0.25, 0.25], False)
    assert advantages(group([replace(one, advantage=0.0) for one in many]), TURN).zero_variance


@pytest.mark.parametrize("bad", [None, math.nan, math.inf, 1e31])
def test_advantages_that_not_all_members_have_or_that_are_not_finite_are_refused(bad: float | None) -> None:
    many = [replace(linear([1.0]), advantage=0.25), replace(linear([1.0]), advantage=bad)]
    with pytest.raises(InvariantError, match="to all members or to none"):
        advantages(group(many), EPISODE)


def test_a_failed_episode_is_refused() -> None:
    failed = episode([turn()], failure=EpisodeFailure(kind="WorkflowError", message="boom", traceback=""))
    with pytest.raises(InvariantError, match=r"failed episode \(WorkflowError"):
        advantages(group([failed, linear([1.0])]), EPISODE)


def test_an_episode_without_any_reward_is_refused() -> None:
    with pytest.raises(InvariantError, match="no turn has a reward"):
        advantages(group([linear([None, None]), linear([1.0])]), EPISODE)


def test_an_empty_group_is_refused() -> None:
    with pytest.raises(InvariantError, match="at least one episode"):
        advantages(group([]), EPISODE)


def test_a_child_before_its_parent_is_refused() -> None:
    with pytest.raises(InvariantError, match="parent 1"):
        advantages(group([episode([turn(parent=1, sent_after=0), turn()], 1.0), linear([1.0])]), TURN)


def test_a_turn_sent_after_turns_that_were_not_complete_is_refused() -> None:
    with pytest.raises(InvariantError, match="sent after 2 turns; expected 0 to 1"):
        advantages(group([episode([turn(), turn(sent_after=2)], 1.0), linear([1.0])]), TURN)


@given(st.lists(trajectories().filter(lambda e: len(e.turns) > 0), min_size=2, max_size=4).map(group))
def test_token_advantages_are_the_turn_s_where_trained_and_zero_elsewhere(many: Group) -> None:
    result = advantages(many, TURN)
    for trajectory, per_turn in zip(many.episodes, result.per_turn, strict=True):
        trained = np.zeros(len(trajectory.turns))
        for sample in trajectory.branches():
            tokens = token_advantages(sample, per_turn)
            assert tokens.dtype == np.float32
            assert tokens.shape == sample.loss_mask.shape
            assert not tokens[~sample.loss_mask].any()
            for at in np.flatnonzero(sample.loss_mask):
                assert tokens[at] == np.float32(per_turn[sample.turn_index[at]])
                trained[sample.turn_index[at]] += 1
        assert (trained == 1).all()


def test_advantages_of_another_episode_are_refused() -> None:
    [sample] = linear([1.0, 2.0]).branches()
    for per_turn in (np.zeros(1), np.zeros(0)):
        with pytest.raises(InvariantError, match="another episode"):
            token_advantages(sample, per_turn)


def test_group_advantages_are_immutable() -> None:
    result = GroupAdvantages(per_turn=(), zero_variance=True)
    with pytest.raises(AttributeError):
        result.zero_variance = False  # pyright: ignore[reportAttributeAccessIssue]  # the point of the test


@pytest.mark.starts
def test_only_the_objective_and_the_figures_of_a_loss_import_torch() -> None:
    names = [module.name for module in pkgutil.walk_packages(agentrl.algo.__path__, "agentrl.algo.")]
    light = [name for name in names if name not in ("agentrl.algo.objective", "agentrl.algo.loss_metrics")]
    assert {"agentrl.algo.config", "agentrl.algo.losses", "agentrl.algo.advantages.gae"} <= {*light}
    code = f"import sys, {', '.join(light)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=300).returncode == 0
