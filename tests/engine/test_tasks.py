"""A run draws its tasks in their order, from a source without an end, and by a curriculum."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from agentrl.data.curriculum import MiddleFirst
from agentrl.data.load import OpenSource, TrainingTasks
from agentrl.data.stream import IteratedStream
from agentrl.engine.parts import RunState
from agentrl.errors import ConfigError, RunStopped
from agentrl.tokens.renderer import Renderer
from agentrl.trainer.scripted import ScriptedTrainer
from agentrl.types import Task
from tests.engine.harness import TASKS, episodes, lines, make_engine, run


def endless(words: str = "Say good.", *, until: int = 1_000_000) -> TrainingTasks:
    def task(number: int) -> Task:
        if number >= until:
            raise OSError("the well is dry")
        return Task(id=f"e{number}", data={"question": f"{words} {number}", "answer": "good"})

    return TrainingTasks((OpenSource("the well", IteratedStream("the well", lambda: map(task, itertools.count()))),))


def opened(run_dir: Path) -> list[str]:
    """Return the tasks of the groups of a run, in the order of the groups' numbers."""
    groups = {record["group"]: record["task_id"] for record in episodes(run_dir)}
    return [groups[number] for number in sorted(groups)]


def saved_state(trainer: ScriptedTrainer) -> RunState:
    return RunState.from_note(trainer.notes[-1], where="the checkpoint")


async def test_a_run_that_does_not_shuffle_opens_its_groups_in_the_order_of_the_tasks(
    tmp_path: Path, renderer: Renderer
) -> None:
    await run(make_engine(tmp_path, renderer, shuffle_tasks=False))
    names = opened(tmp_path)
    assert names == [task.id for task in TASKS[: len(names)]]


async def test_a_run_draws_from_a_source_without_an_end_and_a_resumed_one_continues_there(
    tmp_path: Path, renderer: Renderer
) -> None:
    trainer = ScriptedTrainer()
    await run(make_engine(tmp_path / "first", renderer, trainer=trainer, tasks=endless(), steps=2))
    names = opened(tmp_path / "first")
    assert names == [f"e{number}" for number in range(len(names))]
    state = saved_state(trainer)
    assert state.tasks is not None
    assert state.tasks.streams[0].drawn == state.groups_admitted
    state.check_tasks(endless(), (), where="it")
    with pytest.raises(ConfigError, match="the training tasks are not those of it: endless source 1 gives other tasks"):
        state.check_tasks(endless("Say bad."), (), where="it")
    resumed = make_engine(tmp_path / "second", renderer, trainer=ScriptedTrainer(), tasks=endless(), steps=4, resume=state)
    await run(resumed)
    numbers = sorted({*state.groups_open, state.groups_admitted})
    assert opened(tmp_path / "second")[: len(numbers)] == [f"e{number}" for number in numbers]


async def test_a_source_that_fails_in_a_run_ends_it_and_is_named(tmp_path: Path, renderer: Renderer) -> None:
    with pytest.raises(RunStopped, match=r"the well\.task\(3\) raised OSError: the well is dry"):
        await run(make_engine(tmp_path, renderer, tasks=endless(until=3)))


async def test_a_curriculum_gets_the_results_of_finished_groups_and_the_checkpoint_keeps_them(
    tmp_path: Path, renderer: Renderer
) -> None:
    trainer = ScriptedTrainer()
    tasks = TrainingTasks((OpenSource("tasks", tuple(TASKS)),), MiddleFirst())
    await run(make_engine(tmp_path, renderer, trainer=trainer, tasks=tasks, steps=4))
    state = saved_state(trainer)
    assert state.draw is not None
    results = [result for some in state.draw.results.values() for result in some]
    assert len(results) == state.groups_admitted - len(state.groups_open)
    assert set(state.draw.places) <= set(state.groups_open)
    assert {result.success for result in results} <= {0.0, 1 / 3, 2 / 3, 1.0}


async def test_tasks_that_teach_nothing_sit_out_in_a_run_which_says_so_and_keeps_it_in_the_checkpoint(
    tmp_path: Path, renderer: Renderer
) -> None:
    trainer = ScriptedTrainer()
    tasks = TrainingTasks((OpenSource("tasks", tuple(TASKS)),), None, skip_passes=2)
    await run(make_engine(tmp_path, renderer, trainer=trainer, tasks=tasks, steps=4))
    state = saved_state(trainer)
    assert state.draw is not None
    assert (state.draw.by, set(state.draw.skipped)) == ("passes", {0})
    assert set(state.draw.places) <= set(state.groups_open)
    last = lines(tmp_path / "metrics.jsonl", "step")[-1]
    assert {"skipped_draws", "resting_tasks.right", "resting_tasks.wrong"} <= set(last)
    resting = sum(last[f"resting_tasks.{outcome}"] for outcome in ("right", "wrong"))
    assert 0 <= resting <= len(TASKS)
    assert last["skipped_draws"] <= state.draw.skipped[0]
