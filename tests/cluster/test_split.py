"""The split of GPUs: the formula against brute force, memory limits, and the rule of two windows."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from agentrl.plan.splits import Split
from agentrl_simulate.split import (
    BusyShares,
    GpuSpeeds,
    StepDemand,
    advise_resize,
    resize_gain,
    server_rate,
    sorted_splits,
    trainer_rate,
)

DEMANDS = st.builds(
    StepDemand,
    episodes=st.integers(1, 4096),
    output_tokens=st.floats(1, 32_000),
    context_tokens=st.floats(0, 32_000),
    concurrent=st.integers(1, 8192),
)
SPEEDS = st.builds(
    GpuSpeeds,
    server_tokens_per_s=st.floats(100, 40_000),
    half_saturation=st.floats(0, 300),
    server_requests=st.none() | st.integers(1, 512),
    context_weight=st.floats(0, 0.5),
    trainer_tokens_per_s=st.floats(100, 40_000),
    doubling_efficiency=st.floats(0.8, 1),
    sync_s=st.floats(0, 10),
)


@given(st.integers(2, 40), DEMANDS, SPEEDS, st.sets(st.integers(1, 40), max_size=12), st.integers(1, 4))
def test_the_first_split_is_the_best_of_all_that_fit(
    total: int, demand: StepDemand, speeds: GpuSpeeds, train_sizes: set[int], server_gpus: int
) -> None:
    splits = sorted_splits(total, demand, speeds, train_sizes=sorted(train_sizes), server_gpus=server_gpus)
    times = [
        max(_rollout_s(demand, speeds, servers), _train_s(demand, speeds, train))
        for train in train_sizes
        if (servers := (total - train) // server_gpus) >= 1
    ]
    assert len(splits) == len(times)
    if times:
        assert math.isclose(splits[0].slower_s, min(times))


def _rollout_s(demand: StepDemand, speeds: GpuSpeeds, servers: int) -> float:
    requests = min(max(1.0, demand.concurrent / servers), speeds.server_requests or math.inf)
    rate = servers * speeds.server_tokens_per_s * requests / (requests + speeds.half_saturation)
    return demand.episodes * (demand.output_tokens + speeds.context_weight * demand.context_tokens) / rate


def _train_s(demand: StepDemand, speeds: GpuSpeeds, train: int) -> float:
    rate = train * speeds.trainer_tokens_per_s * speeds.doubling_efficiency ** math.log2(train)
    return demand.episodes * (demand.output_tokens + demand.context_tokens) / rate + speeds.sync_s


@given(st.integers(2, 64), DEMANDS, SPEEDS, st.sets(st.integers(1, 64), min_size=1), st.integers(1, 8))
def test_a_split_never_uses_more_gpus_than_there_are(
    total: int, demand: StepDemand, speeds: GpuSpeeds, train_sizes: set[int], server_gpus: int
) -> None:
    for one in sorted_splits(total, demand, speeds, train_sizes=sorted(train_sizes), server_gpus=server_gpus):
        assert one.split.total <= total
        assert one.split.train in train_sizes
        assert one.split.rollout % server_gpus == 0


@given(st.integers(2, 48), DEMANDS, SPEEDS)
def test_one_more_gpu_never_makes_the_best_split_slower(total: int, demand: StepDemand, speeds: GpuSpeeds) -> None:
    def best(gpus: int) -> float:
        return sorted_splits(gpus, demand, speeds, train_sizes=range(1, gpus), server_gpus=1)[0].slower_s

    assert best(total + 1) <= best(total) * (1 + 1e-9)


def test_only_the_sizes_that_fit_into_memory_are_used() -> None:
    splits = sorted_splits(16, _demand(), _speeds(), train_sizes=[8, 12], server_gpus=4)
    assert {one.split for one in splits} == {Split(train=8, rollout=8), Split(train=12, rollout=4)}
    assert sorted_splits(16, _demand(), _speeds(), train_sizes=[], server_gpus=4) == []
    assert sorted_splits(8, _demand(), _speeds(), train_sizes=[8], server_gpus=1) == []


def test_long_prompts_move_gpus_to_the_trainer() -> None:
    def best(context_tokens: float) -> int:
        demand = StepDemand(episodes=256, output_tokens=500, context_tokens=context_tokens, concurrent=256)
        return sorted_splits(32, demand, _speeds(), train_sizes=range(1, 32), server_gpus=1)[0].split.train

    assert best(8000) > best(0)


def test_the_rates_follow_their_formulas() -> None:
    speeds = _speeds()
    assert server_rate(speeds, 0) == 0
    assert server_rate(speeds, speeds.half_saturation) == speeds.server_tokens_per_s / 2
    assert trainer_rate(speeds, 1) == speeds.trainer_tokens_per_s
    assert math.isclose(trainer_rate(speeds, 8), 8 * speeds.trainer_tokens_per_s * speeds.doubling_efficiency**3)


SIZES = range(1, 16)


def test_two_windows_that_agree_move_gpus_to_where_both_sides_are_equally_busy() -> None:
    now, busy = Split(train=8, rollout=8), BusyShares(trainer=0.2, servers=0.95)
    move = advise_resize(now, [busy, busy], train_sizes=SIZES, server_gpus=1)
    assert move is not None
    balanced = 16 * 0.2 * 8 / (0.2 * 8 + 0.95 * 8)
    assert abs(move.better.train - balanced) <= 1
    assert move.gain > 0.10


def test_one_window_is_not_enough() -> None:
    now, busy = Split(train=8, rollout=8), BusyShares(trainer=0.2, servers=0.95)
    assert advise_resize(now, [busy], train_sizes=SIZES, server_gpus=1) is None


def test_two_windows_that_disagree_move_nothing() -> None:
    now = Split(train=8, rollout=8)
    windows = [BusyShares(trainer=0.2, servers=0.95), BusyShares(trainer=0.95, servers=0.2)]
    assert advise_resize(now, windows, train_sizes=SIZES, server_gpus=1) is None


def test_a_gain_of_ten_percent_or_less_moves_nothing() -> None:
    now, busy = Split(train=8, rollout=8), BusyShares(trainer=0.85, servers=0.95)
    assert advise_resize(now, [busy, busy], train_sizes=SIZES, server_gpus=1) is None


def test_only_the_last_two_windows_count_and_the_smaller_move_is_taken() -> None:
    now = Split(train=8, rollout=8)
    far, near = BusyShares(trainer=0.1, servers=0.95), BusyShares(trainer=0.4, servers=0.95)
    other = BusyShares(trainer=0.95, servers=0.1)
    move = advise_resize(now, [other, far, near], train_sizes=SIZES, server_gpus=1)
    assert move is not None
    nearer = advise_resize(now, [near, near], train_sizes=SIZES, server_gpus=1)
    assert nearer is not None
    assert move.better == nearer.better


@given(st.integers(1, 31), st.floats(0.01, 1), st.floats(0.01, 1))
def test_a_move_always_gains_in_both_windows(train: int, trainer: float, servers: float) -> None:
    now, busy = Split(train=train, rollout=32 - train), BusyShares(trainer=trainer, servers=servers)
    move = advise_resize(now, [busy, busy], train_sizes=range(1, 32), server_gpus=1)
    if move is not None:
        assert resize_gain(now, move.better, busy) > 0.10
        assert move.better.total == now.total


def _demand() -> StepDemand:
    return StepDemand(episodes=256, output_tokens=500, context_tokens=100, concurrent=256)


def _speeds() -> GpuSpeeds:
    return GpuSpeeds(
        server_tokens_per_s=4000,
        half_saturation=30,
        server_requests=128,
        context_weight=0.02,
        trainer_tokens_per_s=3000,
        doubling_efficiency=0.95,
        sync_s=2,
    )
