"""The garbage collector of a run's driver: tuned while it runs, and afterwards as it was."""

from __future__ import annotations

import gc
from collections.abc import Generator
from functools import partial
from typing import NamedTuple

import anyio
import pytest

from agentrl.client import Client
from agentrl.commands.evaluate import Target, evaluate_target
from agentrl.config import parse_config
from agentrl.processes.watchdog.delays import THRESHOLDS, tuned_garbage_collector
from agentrl.types import Task


class Settings(NamedTuple):
    thresholds: tuple[int, int, int]
    frozen: int


def settings() -> Settings:
    return Settings(gc.get_threshold(), gc.get_freeze_count())


@pytest.fixture(autouse=True)
def restored() -> Generator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


def make_tasks() -> list[Task]:
    return [Task(id="t", data={})]


async def sees_the_settings(task: Task, client: Client) -> float:
    return float(gc.get_threshold() == THRESHOLDS and gc.get_freeze_count() > 0)


@pytest.mark.parametrize("fails", [False, True])
def test_thresholds_and_frozen_objects_come_back(fails: bool) -> None:
    before = settings()
    assert before.frozen < 1_000
    try:
        with tuned_garbage_collector():
            assert gc.get_threshold() == THRESHOLDS
            assert gc.get_freeze_count() > 10_000
            if fails:
                raise LookupError
    except LookupError:
        pass
    assert gc.get_threshold() == before.thresholds
    assert gc.get_freeze_count() <= before.frozen


def test_a_process_keeps_what_it_has_frozen_and_higher_thresholds_of_its_own() -> None:
    gc.freeze()
    gc.set_threshold(1_000_000, 3, 100)
    before = settings()
    assert before.frozen > 10_000
    with tuned_garbage_collector():
        assert gc.get_threshold() == (1_000_000, THRESHOLDS[1], 100)
        assert 0.9 * before.frozen < gc.get_freeze_count() <= before.frozen  # another thread may free some of them
    assert gc.get_threshold() == before.thresholds
    assert 0.9 * before.frozen < gc.get_freeze_count() <= before.frozen


def test_an_evaluation_runs_with_them_and_leaves_none() -> None:
    tasks = {"factory": f"{__name__}:make_tasks", "eval": {"factory_args": {}}}
    run = parse_config({"workflow": f"{__name__}:sees_the_settings", "tasks": tasks, "model": {"path": "model"}})
    target = Target(endpoint="http://127.0.0.1:9/v1", model="m")  # nothing listens there; the workflow makes no call
    before = settings()
    report = anyio.run(partial(evaluate_target, run, target, episodes=2))
    assert report.metrics()["success_rate"] == 1.0
    assert gc.get_threshold() == before.thresholds
    assert gc.get_freeze_count() <= before.frozen
