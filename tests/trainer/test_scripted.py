"""The trainer without a model."""

from __future__ import annotations

from pathlib import Path

import anyio
import numpy as np
import pytest

from agentrl.errors import TrainError, UpdatePending
from agentrl.trainer.base import Trainer
from agentrl.trainer.scripted import ScriptedTrainer
from agentrl.weights.disk import verify_directory
from agentrl.weights.types import scripted_logprobs
from tests.trainer.helpers import random_batch


async def test_it_records_batches_and_reports_what_its_script_says() -> None:
    trainer = ScriptedTrainer(skip_steps={1}, fail_steps={2})
    batches = [random_batch(version=version) for version in range(1, 4)]

    reports = [await trainer.step(batch) for batch in batches[:2]]

    assert [report.skipped for report in reports] == [None, "scripted"]
    with pytest.raises(TrainError, match="step 2 of the scripted trainer"):
        await trainer.step(batches[2])
    assert trainer.batches == batches


async def test_it_publishes_real_directories_whose_content_follows_the_steps(tmp_path: Path, checkpoint: Path) -> None:
    trainer: Trainer = ScriptedTrainer(source=checkpoint)

    first = await trainer.publish(0, str(tmp_path))
    await trainer.step(random_batch())
    second = await trainer.publish(1, str(tmp_path))

    assert first.checksum != second.checksum
    assert verify_directory(Path(second.path)) == second
    assert (Path(second.path) / "tokenizer.json").is_file()


async def test_a_step_and_a_publication_wait_for_their_events(tmp_path: Path) -> None:
    step_held, publish_held = anyio.Event(), anyio.Event()
    trainer = ScriptedTrainer(hold_steps={0: step_held}, hold_publish={1: publish_held})
    done: list[str] = []

    async def train() -> None:
        await trainer.step(random_batch())
        done.append("step")
        await trainer.publish(1, str(tmp_path))
        done.append("publish")

    with anyio.fail_after(300):
        async with anyio.create_task_group() as group:
            group.start_soon(train)
            await trainer.started.wait()
            assert done == []
            step_held.set()
            await anyio.wait_all_tasks_blocked()
            assert done == ["step"]
            publish_held.set()
    assert done == ["step", "publish"]


async def test_a_held_step_can_be_cancelled() -> None:
    trainer = ScriptedTrainer(hold_steps={0: anyio.Event()})

    async with anyio.create_task_group() as group:
        group.start_soon(trainer.step, random_batch())
        await trainer.started.wait()
        group.cancel_scope.cancel()

    assert len(trainer.batches) == 1


async def test_logprobs_have_one_value_fewer_than_tokens() -> None:
    values = await ScriptedTrainer().logprobs([np.arange(4, dtype=np.int32), np.arange(0, dtype=np.int32)])

    assert [len(part) for part in values] == [3, 0]
    np.testing.assert_array_equal(values[0], scripted_logprobs(np.arange(4, dtype=np.int32), version=0))


async def test_a_checkpoint_appears_whole(tmp_path: Path) -> None:
    trainer = ScriptedTrainer()
    await trainer.step(random_batch())

    await trainer.save(str(tmp_path / "step-1"))
    await trainer.finish_save(wait=True)

    assert trainer.saved == [str(tmp_path / "step-1")]
    verify_directory(tmp_path / "step-1")


async def test_a_version_that_it_holds_outlives_a_step_only_where_it_keeps_a_copy(tmp_path: Path) -> None:
    for keeps in (True, False):
        trainer = ScriptedTrainer(steps_while_sending=keeps)
        unchanged = await trainer.publish(0, str(tmp_path / f"{keeps}"))
        await trainer.hold(1, dtype=None)
        await trainer.hold(1, dtype="float32")
        await trainer.step(random_batch())

        if keeps:
            async with trainer.channel.sending(1, [], dtype="float32", again=False) as sending:
                assert sending.manifest.version == 1
            held = await trainer.publish(1, str(tmp_path / f"{keeps}"))
            assert held.tensor_checksums == unchanged.tensor_checksums
        else:
            with pytest.raises(UpdatePending, match="past version 1"):
                async with trainer.channel.sending(1, [], dtype="float32", again=False):
                    raise AssertionError("unreachable: the weights have changed")
            with pytest.raises(UpdatePending, match="stepped since it held version 1"):
                await trainer.publish(1, str(tmp_path / f"{keeps}"))
