"""Publications beside the trainer: `engine.overlap_publication`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import anyio
import pytest
from safetensors.numpy import load_file

from agentrl.client import Client
from agentrl.errors import NothingLearned, TrainerDied, TrainError, WeightSyncError
from agentrl.inference.config import InferenceConfig
from agentrl.inference.pool.pool import ServerPool
from agentrl.tokens.renderer import Renderer
from agentrl.trainer.base import StepReport, TrainBatch
from agentrl.trainer.scripted import ScriptedTrainer
from agentrl.types import Task
from agentrl.weights.disk import WEIGHTS_FILE
from agentrl.weights.types import Publication
from tests.engine.harness import balance, coin, lines, make_engine, run
from tests.rollout.harness import PATIENCE_S, ask, make_server, workflow_of

OVERLAP = {"overlap_publication": True}
BOUND = {"max_staleness": 2}


class Slow(ScriptedTrainer):
    """Publishes a version once `until` returns true, which it asks after each beginning of a step."""

    def __init__(
        self, until: Callable[[int, int], bool], *, snapshot: bool = True, skip_steps: Collection[int] = ()
    ) -> None:
        super().__init__(steps_while_sending=snapshot, skip_steps=skip_steps)
        self.until = until
        self.begun = anyio.Event()
        self.beside: list[tuple[int, int]] = []
        """Version that was being published, and the number of the batch, of each step that began meanwhile."""
        self._publishing: int | None = None

    async def step(self, batch: TrainBatch) -> StepReport:
        if self._publishing is not None:
            self.beside.append((self._publishing, len(self.batches)))
        self.begun.set()
        self.begun = anyio.Event()
        return await super().step(batch)

    async def publish(self, version: int, directory: str) -> Publication:
        self._publishing = version
        try:
            while not self.until(version, len(self.batches)):
                await self.begun.wait()
                await anyio.lowlevel.checkpoint()
            return await super().publish(version, directory)
        finally:
            self._publishing = None


def in_the_next_step(version: int, batches: int) -> bool:
    """Version v has the weights of v - 1 batches: let it go when batch v has begun, except the last and the first."""
    return version in (1, 6) or batches >= version


def at_once(version: int, batches: int) -> bool:
    return True


async def test_the_trainer_trains_the_next_batch_while_servers_load_and_they_get_the_weights_before_it(
    tmp_path: Path, renderer: Renderer
) -> None:
    trainer = Slow(in_the_next_step)
    report = await run(make_engine(tmp_path, renderer, trainer=trainer, steps=5, algorithm=BOUND, engine=OVERLAP))
    assert trainer.beside == [(version, version - 1) for version in (2, 3, 4, 5)]
    assert (report.train_steps, report.policy_version) == (5, 6)
    assert report.max_trained_staleness <= 2
    assert balance(report) == 0
    for publication in trainer.publications[-2:]:
        [applied] = load_file(Path(publication.path) / WEIGHTS_FILE).values()
        assert applied.tolist() == [publication.version - 1]
    assert [batch.policy_version for batch in trainer.batches] == [1, 2, 3, 4, 5]


async def test_the_time_of_a_publication_beside_a_step_is_in_the_line_of_that_step(
    tmp_path: Path, renderer: Renderer
) -> None:
    await run(make_engine(tmp_path, renderer, trainer=Slow(in_the_next_step), steps=5, algorithm=BOUND, engine=OVERLAP))
    steps = lines(tmp_path / "metrics.jsonl", "step")
    assert "update_s" not in steps[0]
    for line in steps[1:]:
        assert line["update_s"] >= line["pause_s"] >= 0
        assert line["sync_wait_s"] > 0 < line["publish_s"]
        assert 0 < line["sync_share"] < 1


async def test_a_trainer_without_a_snapshot_waits_for_the_servers(tmp_path: Path, renderer: Renderer) -> None:
    trainer = Slow(at_once, snapshot=False)
    report = await run(make_engine(tmp_path, renderer, trainer=trainer, steps=4, algorithm=BOUND, engine=OVERLAP))
    assert trainer.beside == []
    assert report.policy_version == 5
    assert all("update_s" in line for line in lines(tmp_path / "metrics.jsonl", "step"))


async def test_with_a_bound_of_zero_training_stays_synchronous(tmp_path: Path, renderer: Renderer) -> None:
    trainer = Slow(at_once)
    await run(make_engine(tmp_path, renderer, trainer=trainer, algorithm={"max_staleness": 0}, engine=OVERLAP))
    for version, batch in enumerate(trainer.batches, start=1):
        assert {int(v) for item in batch.samples for v in item.sample.token_versions if v >= 0} == {version}


async def test_servers_are_checked_after_at_most_four_batches_without_a_check(tmp_path: Path, renderer: Renderer) -> None:
    trainer = Slow(lambda version, batches: version in (1, 6, 11) or batches >= version)
    # A pool asks a server for a call where none has ended since the publication.
    async with ServerPool([make_server(renderer, coin)], InferenceConfig(health_interval_s=60)) as pool:
        await run(
            make_engine(tmp_path, renderer, trainer=trainer, inference=pool, steps=10, algorithm=BOUND, engine=OVERLAP)
        )
    steps = lines(tmp_path / "metrics.jsonl", "step")
    assert [line["trainer.unchecked_servers"] for line in steps] == [0, 1, 1, 1, 1, 0, 1, 1, 1, 1]
    assert [line["step"] for line in steps if line.get("trainer.spot_check_tokens", 0) > 0] == [1, 6]


async def test_weights_that_are_evaluated_reach_the_servers_before_the_next_step(tmp_path: Path, renderer: Renderer) -> None:
    class Patient(Slow):
        """Leaves a step the time to begin beside the publication of weights that are evaluated."""

        async def publish(self, version: int, directory: str) -> Publication:
            if version in (3, 5):
                self._publishing = version
                with anyio.move_on_after(0.5):
                    await self.begun.wait()
            return await super().publish(version, directory)

    trainer = Patient(lambda version, batches: version in (1, 3, 5) or batches >= version)
    engine = make_engine(
        tmp_path,
        renderer,
        trainer=trainer,
        algorithm=BOUND,
        eval_tasks=[Task(id="held", data={"question": "Say good.", "answer": "good"})],
        engine={**OVERLAP, "eval_every": 2, "eval_episodes": 2},
    )
    report = await run(engine)
    assert [version for version, _ in trainer.beside] == [2, 4]
    assert [int(str(line["min_version"])) > int(str(line["step"])) for line in report.evaluations] == [True, True]


async def test_servers_that_refuse_weights_during_a_step_end_the_run_with_that_step_saved(
    tmp_path: Path, renderer: Renderer
) -> None:
    class Unreachable(Slow):
        async def publish(self, version: int, directory: str) -> Publication:
            publication = await super().publish(version, directory)
            if version == 3:
                raise WeightSyncError("no server is left")
            return publication

    trainer = Unreachable(in_the_next_step)
    with pytest.raises(WeightSyncError, match="no server is left"):
        await run(make_engine(tmp_path, renderer, trainer=trainer, algorithm=BOUND, engine=OVERLAP))
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl", "step")] == [1, 2, 3]
    assert [Path(path).name for path in trainer.saved] == ["step-000003"]


async def test_a_publication_that_fails_while_the_trainer_waits_for_a_batch_ends_the_run_with_its_error(
    tmp_path: Path, renderer: Renderer
) -> None:
    begun = anyio.Event()

    async def never_after_the_first_batches(task: Task, client: Client) -> float:
        if client.episode.id.split(".")[0] not in ("0", "1"):
            await begun.wait()
            await anyio.sleep_forever()
        return float(await ask(client, "once") == "good")

    class Dying(ScriptedTrainer):
        async def publish(self, version: int, directory: str) -> Publication:
            if version == 2:
                begun.set()
                await anyio.wait_all_tasks_blocked()
                raise TrainerDied("the trainer worker died")
            return await super().publish(version, directory)

    trainer = Dying(steps_while_sending=True)
    workflow = workflow_of(never_after_the_first_batches)
    with pytest.raises(TrainerDied, match="the trainer worker died"):
        await run(make_engine(tmp_path, renderer, workflow=workflow, trainer=trainer, algorithm=BOUND, engine=OVERLAP))
    assert len(trainer.batches) == 1


async def test_a_run_that_learns_nothing_saves_its_weights_after_the_publication_beside_it(
    tmp_path: Path, renderer: Renderer
) -> None:
    class Cancelled(Slow):
        """Cannot be used after a cancelled call, as a trainer worker."""

        broken = False

        async def publish(self, version: int, directory: str) -> Publication:
            try:
                return await super().publish(version, directory)
            except anyio.get_cancelled_exc_class():
                self.broken = True
                raise

        async def save(self, directory: str, note: str = "") -> None:
            if self.broken:
                raise TrainError("the trainer worker cannot be used again")
            await super().save(directory, note)

    trainer = Cancelled(at_once, skip_steps=range(9))
    engine = {**OVERLAP, "stop_after_skipped": 2}
    with pytest.raises(NothingLearned):
        await run(make_engine(tmp_path, renderer, trainer=trainer, algorithm=BOUND, engine=engine, steps=9))
    assert [Path(path).name for path in trainer.saved] == ["step-000002"]


async def test_a_run_that_is_interrupted_during_a_publication_finishes_it_and_saves(
    tmp_path: Path, renderer: Renderer
) -> None:
    trainer = Slow(in_the_next_step)
    engine = make_engine(
        tmp_path, renderer, trainer=trainer, steps=50, algorithm=BOUND, engine=OVERLAP, interrupt_s=PATIENCE_S
    )
    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.run)
            await trainer.begun.wait()
            await trainer.begun.wait()
            trainer.until = at_once
            tasks.cancel_scope.cancel()
    step = engine.report().train_steps
    assert [Path(path).name for path in trainer.saved] == [f"step-{step:06d}"]
    assert engine.report().policy_version == step + 1
