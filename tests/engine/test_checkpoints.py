"""What a run leaves for the process that continues it: checkpoints, due evaluations, tasks, and whole records."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import anyio
import numpy as np
import pytest

from agentrl.client import Client
from agentrl.data.digest import TaskDigest
from agentrl.engine.config import CHECKPOINT_AGE_S
from agentrl.engine.parts import RunState
from agentrl.errors import ConfigError, TrainerDied, TrainError, WeightSyncError
from agentrl.observe.runs.reading import read_index, read_metrics
from agentrl.tokens.renderer import Renderer
from agentrl.trainer.base import SaveReport, StepReport, TrainBatch
from agentrl.trainer.scripted import ScriptedTrainer
from agentrl.types import Task
from agentrl.weights.types import Publication
from tests.engine.harness import TASKS, episodes, lines, make_engine, run
from tests.rollout.harness import PATIENCE_S, ask, workflow_of

HELD_OUT = [Task(id=f"h{i}", data={"question": "Say good.", "answer": "good"}) for i in range(4)]


def state_of(trainer: ScriptedTrainer) -> RunState:
    """Return the state in the newest checkpoint."""
    return RunState.from_note(trainer.notes[-1], where="here")


def saved_steps(trainer: ScriptedTrainer) -> list[int]:
    return [int(Path(path).name.removeprefix("step-")) for path in trainer.saved]


@pytest.mark.parametrize(("seconds", "expected"), [(CHECKPOINT_AGE_S, [3]), (0, [1, 2, 3])])
async def test_checkpoints_are_saved_by_time_and_at_the_end(
    tmp_path: Path, renderer: Renderer, monkeypatch: pytest.MonkeyPatch, seconds: float, expected: list[int]
) -> None:
    monkeypatch.setattr("agentrl.engine.checkpoints.CHECKPOINT_AGE_S", seconds)
    trainer = ScriptedTrainer()
    await run(make_engine(tmp_path, renderer, trainer=trainer, steps=3))
    assert saved_steps(trainer) == expected


def test_a_run_saves_checkpoints_by_time_without_being_asked() -> None:
    assert 0 < CHECKPOINT_AGE_S <= 600


async def test_a_cancelled_run_finishes_its_step_and_saves_it(tmp_path: Path, renderer: Renderer) -> None:
    hold = anyio.Event()
    trainer = ScriptedTrainer(hold_steps={0: hold})
    engine = make_engine(tmp_path, renderer, trainer=trainer, interrupt_s=PATIENCE_S)
    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.run)
            await trainer.started.wait()
            tasks.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await anyio.wait_all_tasks_blocked()
                assert not trainer.saved
                hold.set()
    state = state_of(trainer)
    assert (state.step, state.policy_version) == (1, 2)
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl", "step")] == [1]
    [end] = lines(tmp_path / "metrics.jsonl", "end")
    assert end["checkpoint"] == trainer.saved[-1]
    resumed = ScriptedTrainer()
    report = await run(make_engine(tmp_path, renderer, trainer=resumed, resume=state))
    assert report.train_steps == 4
    trained = [group for event in read_metrics(tmp_path) if event["event"] == "step" for group in event["trained_groups"]]
    assert sorted(trained) == list(range(8))


async def test_a_run_that_is_cancelled_while_it_waits_for_groups_saves_its_last_step(
    tmp_path: Path, renderer: Renderer
) -> None:
    reached = anyio.Event()
    answered: list[str] = []

    async def solve(task: Task, client: Client) -> float:
        if len(answered) == 6:  # the first step's groups
            reached.set()
            await anyio.sleep_forever()
        reply = await ask(client, task["question"])
        answered.append(reply)
        return float(reply == "good")

    trainer = ScriptedTrainer()
    engine = make_engine(
        tmp_path,
        renderer,
        workflow=workflow_of(solve),
        trainer=trainer,
        algorithm={"max_staleness": 0},
        interrupt_s=PATIENCE_S,
    )
    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.run)
            await reached.wait()
            tasks.cancel_scope.cancel()
    state = state_of(trainer)
    assert (saved_steps(trainer), state.policy_version) == ([1], 2)
    assert state.groups_open == tuple(range(2, state.groups_admitted))


async def test_a_step_that_does_not_end_does_not_keep_a_cancelled_run(tmp_path: Path, renderer: Renderer) -> None:
    trainer = ScriptedTrainer(hold_steps={1: anyio.Event()})
    engine = make_engine(tmp_path, renderer, trainer=trainer, interrupt_s=0.05)
    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.run)
            while len(trainer.batches) < 2:
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
    assert not trainer.saved, "the weights are between two steps"
    assert len(lines(tmp_path / "metrics.jsonl", "end")) == 1


async def test_weights_that_did_not_reach_the_servers_are_saved(tmp_path: Path, renderer: Renderer) -> None:
    class Unreachable(ScriptedTrainer):
        async def publish(self, version: int, directory: str) -> Publication:
            if version == 3:
                raise WeightSyncError("no server is left")
            return await super().publish(version, directory)

    trainer = Unreachable()
    with pytest.raises(WeightSyncError, match="no server is left"):
        await run(make_engine(tmp_path, renderer, trainer=trainer))
    assert (saved_steps(trainer), state_of(trainer).policy_version) == ([2], 3)


async def test_an_evaluation_without_a_result_is_due_in_the_state_and_done_by_the_next_process(
    tmp_path: Path, renderer: Renderer
) -> None:
    trainer = ScriptedTrainer()
    evaluating = {"eval_every": 2, "eval_episodes": 4, "checkpoint_every": 1}
    await run(make_engine(tmp_path, renderer, trainer=trainer, steps=4, eval_tasks=HELD_OUT, engine=evaluating))
    states = [RunState.from_note(note, where="here") for note in trainer.notes]
    assert 2 in states[1].evaluations_due
    assert 4 in states[-1].evaluations_due
    again = tmp_path / "again"
    report = await run(make_engine(again, renderer, steps=4, eval_tasks=HELD_OUT, engine=evaluating, resume=states[-1]))
    assert [line["step"] for line in report.evaluations] == list(states[-1].evaluations_due)
    assert (report.train_steps, report.groups) == (4, 0)
    assert {episode["episode_id"] for episode in episodes(again)} >= {f"eval.4.{number}" for number in range(4)}


async def test_readers_get_each_episode_and_step_once_however_often_a_run_went_back(
    tmp_path: Path, renderer: Renderer
) -> None:
    trainer = ScriptedTrainer()
    engine = {"checkpoint_every": 1, "eval_every": 2, "eval_episodes": 3}
    await run(make_engine(tmp_path, renderer, trainer=trainer, steps=4, eval_tasks=HELD_OUT, engine=engine))
    states = [RunState.from_note(note, where="here") for note in trainer.notes]
    for state in (states[2], states[0], states[1]):
        await run(make_engine(tmp_path, renderer, steps=4, eval_tasks=HELD_OUT, engine=engine, resume=state))
    events = list(read_metrics(tmp_path))
    assert [event["step"] for event in events if event["event"] == "step"] == [1, 2, 3, 4]
    evaluated = [event["step"] for event in events if event["event"] in ("evaluation", "evaluation_skipped")]
    assert sorted(evaluated) == [2, 4]
    trained = [group for event in events if event["event"] == "step" for group in event["trained_groups"]]
    assert sorted(trained) == list(range(8))
    ids = Counter(summary.episode_id for summary in read_index(tmp_path))
    assert set(ids.values()) == {1}
    assert {int(identity.split(".")[0]) for identity in ids if not identity.startswith("eval")} == set(range(8))
    assert sorted(record["episode_id"] for record in episodes(tmp_path)) == sorted(ids)
    raw = [line for line in lines(tmp_path / "episodes" / "index.jsonl") if "episode_id" in line]
    assert len(raw) > len(ids)


async def test_an_episode_of_a_trained_group_is_on_disk_before_the_checkpoint(tmp_path: Path, renderer: Renderer) -> None:
    seen: list[int] = []

    class Looking(ScriptedTrainer):
        async def save(self, directory: str, note: str = "") -> None:
            state = RunState.from_note(note, where="here")
            groups = {line["group"] for line in episodes(tmp_path)}
            assert groups >= set(range(state.groups_admitted)) - set(state.groups_open)
            seen.append(state.step)
            await super().save(directory, note)

    await run(make_engine(tmp_path, renderer, trainer=Looking(), steps=4, engine={"checkpoint_every": 1}))
    assert seen == [1, 2, 3, 4]


async def test_a_resumed_run_names_how_its_tasks_have_changed(tmp_path: Path, renderer: Renderer) -> None:
    trainer = ScriptedTrainer()
    evaluating = {"eval_every": 1, "eval_episodes": 2}
    await run(make_engine(tmp_path, renderer, trainer=trainer, steps=1, eval_tasks=HELD_OUT, engine=evaluating))
    state = state_of(trainer)
    state.check_tasks(TASKS, HELD_OUT, where="it")
    other = [*TASKS[:-1], Task(id=TASKS[-1].id, data={"question": "Say good.", "answer": "bad"})]
    for tasks, held_out, expected in (
        (TASKS[::-1], HELD_OUT, "training tasks are not those of it: the same tasks in another order"),
        (TASKS[:5], HELD_OUT, "5 tasks instead of 8"),
        (other, HELD_OUT, "ids or data of some tasks have changed"),
        (TASKS, HELD_OUT[:1], "evaluation tasks are not those of it: 1 tasks instead of 4"),
    ):
        with pytest.raises(ConfigError, match=expected):
            state.check_tasks(tasks, held_out, where="it")


def test_the_digest_of_tasks_takes_any_data() -> None:
    class Opaque:
        pass

    data = {"n": 10**40, "array": np.arange(3), "mixed": {1: "a", "b": Opaque()}, "set": {1, 2}, "text": "\ud800"}
    first, again = ([Task(id="1", data={**data, "object": Opaque()})] for _ in range(2))
    assert TaskDigest.of(first) == TaskDigest.of(again)
    assert TaskDigest.of(first) != TaskDigest.of([Task(id="1", data={"n": 1})])


async def test_training_continues_while_a_checkpoint_is_written_and_its_event_follows(
    tmp_path: Path, renderer: Renderer
) -> None:
    durable = anyio.Event()

    class Releasing(ScriptedTrainer):
        async def step(self, batch: TrainBatch) -> StepReport:
            if len(self.batches) == 3:  # the checkpoint of step 2 was begun before step 3
                assert not self.saved
                assert not lines(tmp_path / "metrics.jsonl", "checkpoint")
                durable.set()
            return await super().step(batch)

    trainer = Releasing(hold_saves={0: durable})
    await run(make_engine(tmp_path, renderer, trainer=trainer, steps=4, engine={"checkpoint_every": 2}))
    assert saved_steps(trainer) == [2, 4]
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl", "checkpoint")] == [2, 4]


async def test_a_checkpoint_that_cannot_be_written_ends_the_run_by_name(tmp_path: Path, renderer: Renderer) -> None:
    trainer = ScriptedTrainer(fail_saves={1})
    with pytest.raises(TrainError, match=r"cannot write .*step-000002"):
        await run(make_engine(tmp_path, renderer, trainer=trainer, steps=4, engine={"checkpoint_every": 1}))
    assert saved_steps(trainer) == [1]
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl", "checkpoint")] == [1]


async def test_the_death_of_the_trainer_is_told_once_and_nothing_is_asked_of_a_dead_one(
    tmp_path: Path, renderer: Renderer, caplog: pytest.LogCaptureFixture
) -> None:
    class Dying(ScriptedTrainer):
        dead = False

        async def step(self, batch: TrainBatch) -> StepReport:
            if len(self.batches) == 1:
                self.dead = True
                raise TrainerDied("the worker died while training")
            return await super().step(batch)

        async def finish_save(self, *, wait: bool) -> SaveReport | None:
            if self.dead:
                raise TrainerDied("the worker cannot be used again")
            return await super().finish_save(wait=wait)

    trainer = Dying(hold_saves={0: anyio.Event()})
    with pytest.raises(TrainerDied, match="the worker died while training"):
        await run(make_engine(tmp_path, renderer, trainer=trainer, steps=3, engine={"checkpoint_every": 1}))
    assert "could not be saved" not in caplog.text
