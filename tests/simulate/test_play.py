"""Simulated runs: closed forms, the staleness bound, and where every group and token goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import ConfigError, InvariantError
from agentrl_simulate.costs import CostModel, Fleet, RunShape, ServerCost, TrainerCost, UpdateCost
from agentrl_simulate.play import play_run
from agentrl_simulate.servers import SimulatedCall, SimulatedServer
from agentrl_simulate.workload import LognormalSource, PlayedEpisode, PlayedTurn, RecordedSource

FLEET = Fleet(servers=2, trainer_gpus=2)
SHAPE = RunShape(steps=6, group_size=2, groups_per_step=4, max_staleness=0, slots=64)
EVEN = LognormalSource(mean_tokens=100, spread=0, max_tokens=1000, context_tokens=10)
UNEVEN = LognormalSource(mean_tokens=100, spread=1, max_tokens=1000, context_tokens=10, turns=2, outside_s=0.1)
COSTS = CostModel(
    server=ServerCost(tokens_per_s=100, half_saturation=4),
    trainer=TrainerCost(fixed_s=1, gpu_s_per_token=0.01, gpus_per_sample=2),
    update=UpdateCost(spot_check_s=0.25, publish_s=0.5, update_s=1, pause_s=0.5, between_s=0.125),
    origin="a test",
)


def test_synchronous_steps_of_equal_episodes_take_rollout_plus_training_plus_update() -> None:
    run = play_run(SHAPE, FLEET, COSTS, EVEN)
    rollout_s = 100 * (4 + 4) / 100  # eight episodes on two servers: four requests each
    train_s = 1 + 8 * 110 * 0.01 / 2
    around_s = 0.25 + 0.5 + 1
    assert run.step_s == pytest.approx(rollout_s + train_s + around_s)
    assert run.measured[0].wait_s == pytest.approx(rollout_s - 0.125)
    assert run.measured[0].train_s == pytest.approx(train_s)
    assert run.trainer_share == pytest.approx((train_s + around_s) / run.step_s)
    assert run.staleness == {0: 4 * 8 * 100}
    assert run.server_share == pytest.approx(8 * 100 / (2 * 100 * run.step_s))


def test_asynchronous_steps_of_a_slow_trainer_take_its_time_alone() -> None:
    slow = replace(COSTS, trainer=replace(COSTS.trainer, fixed_s=60))
    run = play_run(replace(SHAPE, max_staleness=2), FLEET, slow, EVEN)
    assert run.step_s == pytest.approx(60 + 4.4 + 0.25 + 0.5 + 1 + 0.125)
    assert run.mean_staleness == 2
    assert run.bound_share > 0.5


def test_asynchronous_steps_of_slow_servers_take_the_time_to_sample_a_batch() -> None:
    costs = replace(COSTS, trainer=TrainerCost(fixed_s=0, gpu_s_per_token=0), update=UpdateCost())
    run = play_run(replace(SHAPE, steps=40, max_staleness=4, slots=8), FLEET, costs, EVEN)
    assert run.step_s == pytest.approx(8 * 100 / (2 * 100 * 4 / 8))


def test_a_pause_stops_the_servers() -> None:
    paused = replace(COSTS, update=UpdateCost(update_s=4, pause_s=4))
    faster = replace(COSTS, update=UpdateCost(update_s=4))
    shape = replace(SHAPE, max_staleness=4, slots=4)
    assert play_run(shape, FLEET, paused, EVEN).step_s > play_run(shape, FLEET, faster, EVEN).step_s + 3


def test_a_publication_beside_the_next_step_costs_the_trainer_no_time_that_it_needs() -> None:
    slow = replace(COSTS, trainer=TrainerCost(fixed_s=20, gpu_s_per_token=0), update=UpdateCost(update_s=5, pause_s=1))
    shape = replace(SHAPE, max_staleness=4, steps=12)
    after = play_run(shape, FLEET, slow, EVEN)
    beside = play_run(replace(shape, overlaps_publication=True), FLEET, slow, EVEN, warm_up=6)
    assert after.step_s == pytest.approx(25)
    assert beside.step_s == pytest.approx((5 * 20 + 25) / 6, rel=0.05)  # the last publication is waited for


def test_a_server_reads_contexts_before_it_samples_and_again_after_an_update() -> None:
    reading = replace(COSTS, server=replace(COSTS.server, context_weight=1.0))
    rollout_s = play_run(SHAPE, FLEET, reading, EVEN).step_s - play_run(SHAPE, FLEET, COSTS, EVEN).step_s
    assert rollout_s == pytest.approx(10 * (4 + 4) / 100)
    shape = replace(SHAPE, max_staleness=1, steps=12)
    kept = replace(shape, rereads_context=False)
    assert play_run(shape, FLEET, reading, UNEVEN).step_s > play_run(kept, FLEET, reading, UNEVEN).step_s


def test_requests_over_the_limit_of_a_server_wait() -> None:
    limited = replace(COSTS, server=replace(COSTS.server, requests=2))
    run = play_run(SHAPE, FLEET, limited, EVEN)
    waited = play_run(SHAPE, FLEET, COSTS, EVEN).step_s - 100 * 8 / 100 + 2 * 100 * (2 + 4) / 100
    assert run.step_s == pytest.approx(waited)


def test_evaluations_share_slots_and_do_not_change_the_number_of_groups() -> None:
    with_evaluations = replace(SHAPE, eval_every=2, eval_episodes=10, slots=8)
    run = play_run(with_evaluations, FLEET, COSTS, UNEVEN)
    assert run.evaluations >= 2
    assert run.step_s > play_run(replace(SHAPE, slots=8), FLEET, COSTS, UNEVEN).step_s
    assert run.groups["consumed"] == 24


def test_a_frozen_evaluation_that_outlasts_the_next_batch_holds_its_publication() -> None:
    rare = replace(SHAPE, max_staleness=4, eval_every=2, eval_episodes=200)
    live, frozen = (play_run(replace(rare, freezes_evaluation=freezes), FLEET, COSTS, EVEN) for freezes in (False, True))
    assert frozen.evaluations == 2  # after steps 2 and 4, before the steps after them count; the last one has not ended
    assert frozen.step_s > live.step_s > 0


def test_a_checkpoint_delays_the_next_step() -> None:
    costs = replace(COSTS, update=replace(COSTS.update, checkpoint_s=10))
    without = play_run(SHAPE, FLEET, COSTS, EVEN).seconds
    assert play_run(replace(SHAPE, checkpoint_every=3), FLEET, costs, EVEN).seconds == pytest.approx(without + 10.125 - 8)


def test_a_group_of_equal_returns_is_published_without_training() -> None:
    turns = (PlayedTurn(0.0, 10, 100),)
    equal = RecordedSource({0: [PlayedEpisode(turns, episode_return=1.0)] * 2}, retries=0, seed=0)
    mixed = RecordedSource(
        {0: [PlayedEpisode(turns, episode_return=1.0), PlayedEpisode(turns, episode_return=0.0)]}, retries=0, seed=0
    )
    assert [step.train_s for step in play_run(SHAPE, FLEET, COSTS, equal).steps] == [0.0] * 6
    assert [step.train_s for step in play_run(SHAPE, FLEET, COSTS, mixed).steps] == pytest.approx(
        [1 + 8 * 110 * 0.01 / 2] * 6
    )


def test_a_failed_member_runs_again_and_then_drops_its_group() -> None:
    source = _Failing(failing_groups={1})
    run = play_run(replace(SHAPE, max_staleness=1), FLEET, COSTS, source)
    assert run.groups["dropped"] == 1
    assert _balance(run.groups) == 0
    assert source.asked >= {(0, 0), (1, 0), (1, 1)}
    kept = play_run(replace(SHAPE, group_size=3, keeps_incomplete=True), FLEET, COSTS, source)
    assert kept.groups["dropped"] == 0
    assert min(step.episodes for step in kept.steps) == 11


def test_a_run_whose_episodes_all_fail_names_the_failure() -> None:
    with pytest.raises(InvariantError, match="no batch forms"):
        play_run(SHAPE, FLEET, COSTS, _Stuck())


@pytest.mark.parametrize("fleet", [Fleet(servers=0, trainer_gpus=1), Fleet(servers=1, trainer_gpus=0)])
def test_a_fleet_without_servers_or_trainer_is_refused(fleet: Fleet) -> None:
    with pytest.raises(ConfigError, match="expected at least 1"):
        play_run(SHAPE, fleet, COSTS, EVEN)


SHAPES = st.builds(
    RunShape,
    steps=st.integers(3, 8),
    group_size=st.integers(2, 5),
    groups_per_step=st.integers(1, 6),
    max_staleness=st.integers(0, 4),
    policy=st.sampled_from(("wait", "mask", "drop")),
    slots=st.integers(1, 24),
    overlaps_publication=st.booleans(),
    eval_every=st.sampled_from((0, 1, 2)),
    eval_episodes=st.just(3),
    freezes_evaluation=st.booleans(),
    checkpoint_every=st.sampled_from((0, 2)),
)
SOURCES = st.builds(
    LognormalSource,
    mean_tokens=st.floats(5, 200),
    spread=st.floats(0, 2),
    max_tokens=st.just(500),
    context_tokens=st.integers(0, 50),
    turns=st.integers(1, 3),
    outside_s=st.sampled_from((0.0, 0.3)),
    seed=st.integers(0, 99),
)
FLEETS = st.builds(Fleet, servers=st.integers(1, 4), trainer_gpus=st.integers(1, 4))


@settings(max_examples=30, deadline=None)
@given(SHAPES, SOURCES, FLEETS)
def test_no_token_is_over_the_bound_and_no_group_is_lost(shape: RunShape, source: LognormalSource, fleet: Fleet) -> None:
    run = play_run(shape, fleet, COSTS, source, warm_up=0)
    assert run.max_staleness <= shape.max_staleness
    assert _balance(run.groups) == 0
    assert run.groups["consumed"] == shape.steps * shape.groups_per_step
    assert sum(run.staleness.values()) == sum(step.trained_tokens for step in run.steps)
    assert run.masked_tokens == 0 or shape.policy == "mask"
    assert 0 <= run.trainer_share <= 1 + 1e-9
    assert 0 <= run.server_share <= 1 + 1e-9
    assert 0 <= run.slots_share <= 1 + 1e-9
    if shape.max_staleness == 0 and shape.policy == "wait":
        assert run.staleness.keys() <= {0}


@settings(max_examples=15, deadline=None)
@given(SHAPES, SOURCES, FLEETS)
def test_virtual_time_is_the_same_each_time(shape: RunShape, source: LognormalSource, fleet: Fleet) -> None:
    assert play_run(shape, fleet, COSTS, source) == play_run(shape, fleet, COSTS, source)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 9), st.integers(1, 3), st.integers(1, 3))
def test_more_gpus_never_make_synchronous_steps_slower(seed: int, servers: int, trainer_gpus: int) -> None:
    source = replace(UNEVEN, seed=seed, turns=1)
    small, large = (
        Fleet(servers=servers, trainer_gpus=trainer_gpus),
        Fleet(servers=2 * servers, trainer_gpus=2 * trainer_gpus),
    )
    assert play_run(SHAPE, large, COSTS, source).step_s <= play_run(SHAPE, small, COSTS, source).step_s * (1 + 1e-9)


def test_other_groups_of_a_source_are_others_and_the_same_group_is_the_same() -> None:
    lengths = [UNEVEN.attempts(group, member)[0].output_tokens for group in range(20) for member in range(2)]
    assert lengths == [UNEVEN.attempts(group, member)[0].output_tokens for group in range(20) for member in range(2)]
    assert len(set(lengths)) > 30
    assert sum(turn.output_tokens for turn in UNEVEN.attempts(0, 0)[0].turns) == lengths[0]


def _balance(groups: dict[str, int] | object) -> int:
    assert isinstance(groups, dict)
    return groups["admitted"] - groups["consumed"] - groups["dropped"] - groups["outstanding"]


@dataclass
class _Failing:
    """Episodes of one turn; the first member of some groups fails each time."""

    failing_groups: set[int]
    asked: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])

    def attempts(self, group: int, member: int) -> Sequence[PlayedEpisode]:
        self.asked.add((group, member))
        episode = PlayedEpisode((PlayedTurn(0.0, 10, 100 + member),))
        failed = replace(episode, failed=True)
        return [failed, failed] if group in self.failing_groups and member == 0 else [failed, episode]


class _Stuck:
    """Episodes of which every second one of a group fails, without a second attempt."""

    def attempts(self, group: int, member: int) -> Sequence[PlayedEpisode]:
        return [PlayedEpisode((PlayedTurn(0.0, 1, 1),), failed=member == 1)]


def test_a_server_reads_the_history_again_that_it_read_before_an_update() -> None:
    begun: dict[int, float | None] = {}
    for version in (0, 1):
        server = SimulatedServer(ServerCost(tokens_per_s=10, half_saturation=0, context_weight=0.5))
        server.take_version(1, rereads=True)
        server.add(SimulatedCall(4, 10, history_tokens=20, history_version=version, on_end=lambda: None))
        begun[version] = server.next_end()
    assert begun == {0: pytest.approx((0.5 * 24 + 10) / 10), 1: pytest.approx((0.5 * 4 + 10) / 10)}


def test_a_pinned_call_ends_with_its_version_unless_that_is_too_old() -> None:
    cost = ServerCost(tokens_per_s=10, half_saturation=0, context_weight=0.5)
    found: dict[int | None, tuple[dict[int, int], float]] = {}
    for keeps in (0, 1, None):
        server = SimulatedServer(cost)
        call = SimulatedCall(4, 10, history_tokens=0, history_version=0, on_end=lambda: None)
        server.add(call)
        server.advance(0.65)
        server.take_version(1, rereads=True, keeps=keeps)
        ends_s = server.next_end()
        assert ends_s is not None
        server.advance(ends_s)
        found[keeps] = dict(server.end_first().tokens), ends_s
    assert found[0] == ({0: 10}, pytest.approx(1.2))
    assert found[1] == found[None] == ({0: 4, 1: 6}, pytest.approx(1.2 + 0.5 * 8.5 / 10))
