"""A run records who worked and who waited."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from agentrl.errors import TrainError
from agentrl.observe.timeline import MIN_WAIT_S, read_timeline
from agentrl.tokens.renderer import Renderer
from agentrl.trainer.scripted import ScriptedTrainer
from tests.engine.harness import TASKS, lines, make_engine, run


async def test_every_step_has_its_work_in_the_timeline(tmp_path: Path, renderer: Renderer) -> None:
    engine = {"eval_every": 2, "eval_episodes": 2, "checkpoint_every": 2}
    await run(make_engine(tmp_path, renderer, steps=4, eval_tasks=TASKS[:2], engine=engine))
    found = list(read_timeline(tmp_path))
    for work in ("train", "publish", "update", "pause", "spot_check"):
        assert {entry.step for entry in found if entry.activity == work} >= {1, 2, 3, 4}, work
    assert [entry.step for entry in found if entry.activity == "checkpoint"] == [2, 4]
    assert [entry.step for entry in found if entry.activity == "evaluate"] == [2, 4]
    end_s = lines(tmp_path / "metrics.jsonl", "end")[0]["wall_s"]
    assert all(0 <= entry.start_s <= entry.end_s <= end_s + 0.001 for entry in found)


async def test_the_trainer_does_one_thing_at_a_time(tmp_path: Path, renderer: Renderer) -> None:
    await run(make_engine(tmp_path, renderer, steps=3))
    trainer = sorted((e.start_s, e.end_s) for e in read_timeline(tmp_path) if e.actor == "trainer")
    assert all(end <= start + 0.001 for (_, end), (start, _) in pairwise(trainer))


async def test_the_pause_of_the_servers_lies_within_the_update(tmp_path: Path, renderer: Renderer) -> None:
    await run(make_engine(tmp_path, renderer, steps=2))
    found = list(read_timeline(tmp_path))
    updates = [entry for entry in found if entry.activity == "update"]
    pauses = [entry for entry in found if entry.activity == "pause"]
    assert len(updates) == len(pauses) == 3, "one before the first step, and one after each"
    for update, pause in zip(updates, pauses, strict=True):
        assert update.start_s <= pause.start_s <= pause.end_s <= update.end_s + 0.001


async def test_a_step_that_fails_leaves_no_line_of_its_training(tmp_path: Path, renderer: Renderer) -> None:
    with pytest.raises(TrainError, match="step 2 "):  # the third: the script counts from 0
        await run(make_engine(tmp_path, renderer, trainer=ScriptedTrainer(fail_steps={2})))
    assert [entry.step for entry in read_timeline(tmp_path) if entry.activity == "train"] == [1, 2]


async def test_a_wait_that_ends_at_once_has_no_line(tmp_path: Path, renderer: Renderer) -> None:
    await run(make_engine(tmp_path, renderer, steps=3))
    waits = [e.end_s - e.start_s for e in read_timeline(tmp_path) if e.activity.startswith("wait_")]
    assert all(seconds >= MIN_WAIT_S - 2e-4 for seconds in waits)
