"""Shared cores: threads run at one speed, no job ends before its work is done, and the cores never do more than they can."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_simulate.costs import CostModel, Fleet, HostCost, RunShape, ServerCost, TrainerCost, UpdateCost
from agentrl_simulate.events import EventQueue, SharedCores, SimulatedDriver
from agentrl_simulate.play import play_run
from agentrl_simulate.predict import describe_bottleneck
from agentrl_simulate.workload import LognormalSource

SHAPE = RunShape(steps=6, group_size=2, groups_per_step=4, max_staleness=1, slots=64)
EPISODES = LognormalSource(mean_tokens=100, spread=0.5, max_tokens=1000, context_tokens=10, turns=2)
HOST = HostCost(cores=2, turn_s=0.05, batch_s_per_token=0.0001)
COSTS = CostModel(
    server=ServerCost(tokens_per_s=200, half_saturation=4),
    trainer=TrainerCost(fixed_s=1, gpu_s_per_token=0.002),
    update=UpdateCost(spot_check_s=0.1, publish_s=0.1, update_s=0.2, pause_s=0.1, between_s=0.1),
    host=HOST,
    origin="a test",
)
ONE = Fleet(servers=1, trainer_gpus=1)


def note(events: EventQueue, ended: dict[str, float], name: str) -> None:
    """Record when a job ended."""
    ended[name] = events.now


def test_three_threads_on_two_cores_take_half_as_long_again() -> None:
    events, ended = EventQueue(), list[float]()
    cores = SharedCores(events, 2)
    for _ in range(3):
        cores.run(1.0, 1, lambda: ended.append(events.now))
    while events.run_next():
        pass
    assert ended == pytest.approx([1.5, 1.5, 1.5])


def test_a_job_speeds_up_when_another_ends() -> None:
    events, ended = EventQueue(), dict[str, float]()
    cores = SharedCores(events, 1)
    for name, work_s in (("short", 1.0), ("long", 3.0)):
        cores.run(work_s, 1, partial(note, events, ended, name))
    while events.run_next():
        pass
    assert ended == pytest.approx({"short": 2.0, "long": 4.0})


def test_a_busy_server_slows_a_job_and_hears_of_its_own_speed() -> None:
    events, speeds = EventQueue(), list[float]()
    cores = SharedCores(events, 1)
    cores.on_speed = lambda: speeds.append(cores.speed)
    cores.set_serving(1)
    cores.run(1.0, 1, lambda: cores.set_serving(0))
    while events.run_next():
        pass
    assert events.now == pytest.approx(2.0)
    assert speeds == [0.5, 1.0]


def test_the_driver_does_one_thing_after_another() -> None:
    events, ended = EventQueue(), dict[str, float]()
    driver = SimulatedDriver(SharedCores(events, 2))
    for name, work_s in (("first", 1.0), ("second", 0.5), ("hop", 0.0)):
        driver.run(work_s, partial(note, events, ended, name))
    while events.run_next():
        pass
    assert list(ended.items()) == [("first", 1.0), ("second", 1.5), ("hop", 1.5)]


JOBS = st.lists(st.tuples(st.floats(0, 3), st.floats(0.01, 2), st.integers(1, 3)), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(st.one_of(st.none(), st.integers(1, 4)), JOBS)
def test_no_work_is_lost_and_no_core_does_two_things_at_once(
    cores: int | None, jobs: list[tuple[float, float, int]]
) -> None:
    events, ended = EventQueue(), dict[str, float]()
    shared = SharedCores(events, cores)
    for number, (begins_at, work_s, threads) in enumerate(jobs):
        events.plan(begins_at, partial(shared.run, work_s, threads, partial(note, events, ended, str(number))))
    while events.run_next():
        pass
    assert len(ended) == len(jobs)
    for number, (begins_at, work_s, _) in enumerate(jobs):
        assert ended[str(number)] >= begins_at + work_s - 1e-6
        if cores is None:
            assert ended[str(number)] == pytest.approx(begins_at + work_s)
    if cores is not None:
        first, last = min(begins_at for begins_at, _, _ in jobs), max(ended.values())
        assert sum(work_s * threads for _, work_s, threads in jobs) <= cores * (last - first) * (1 + 1e-6) + 1e-6


def test_a_second_server_on_the_same_cores_does_not_double_the_speed() -> None:
    slow = replace(COSTS, server=replace(COSTS.server, tokens_per_s=40))
    alone = replace(slow, host=HostCost())
    two = replace(ONE, servers=2)
    gain_shared = play_run(SHAPE, ONE, slow, EPISODES).step_s / play_run(SHAPE, two, slow, EPISODES).step_s
    gain_apart = play_run(SHAPE, ONE, alone, EPISODES).step_s / play_run(SHAPE, two, alone, EPISODES).step_s
    assert gain_apart > 1.3
    assert gain_shared < gain_apart - 0.1


def test_a_trainer_beside_a_server_and_a_driver_takes_longer_than_alone() -> None:
    one_core = replace(COSTS, host=replace(HOST, cores=1))
    many = replace(COSTS, host=replace(HOST, cores=8))
    crowded, roomy = play_run(SHAPE, ONE, one_core, EPISODES), play_run(SHAPE, ONE, many, EPISODES)
    assert crowded.measured[-1].train_s > roomy.measured[-1].train_s * 1.2
    assert crowded.step_s > roomy.step_s


SHAPES = st.builds(
    RunShape,
    steps=st.integers(3, 6),
    group_size=st.integers(2, 4),
    groups_per_step=st.integers(1, 4),
    max_staleness=st.integers(0, 3),
    slots=st.integers(1, 16),
)


@settings(max_examples=15, deadline=None)
@given(SHAPES, st.integers(1, 4), st.integers(1, 3))
def test_a_run_on_shared_cores_takes_at_least_its_work(shape: RunShape, cores: int, servers: int) -> None:
    costs = replace(COSTS, host=replace(HOST, cores=cores))
    run = play_run(shape, replace(ONE, servers=servers), costs, EPISODES, warm_up=0)
    trained_s = shape.steps * COSTS.trainer.fixed_s
    driver_s = run.calls * HOST.turn_s
    sampled_s = run.server_share * run.seconds * servers
    assert trained_s + driver_s + sampled_s <= cores * run.seconds * (1 + 1e-6)
    assert 0 < run.cores_share <= 1 + 1e-6


def test_busy_cores_are_named_as_the_bottleneck() -> None:
    crowded = play_run(SHAPE, ONE, replace(COSTS, host=replace(HOST, cores=1)), EPISODES)
    assert crowded.cores_share > 0.9
    assert describe_bottleneck(crowded, SHAPE).startswith("The cores are the bottleneck")
    assert play_run(SHAPE, ONE, replace(COSTS, host=HostCost()), EPISODES).cores_share == 0
