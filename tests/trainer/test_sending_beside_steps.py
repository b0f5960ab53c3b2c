"""Real trainer processes that step while a version leaves them: what leaves are the weights of the version."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from agentrl.algo.config import AlgorithmConfig
from agentrl.errors import InvariantError, UpdatePending
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.worker.client import RemoteTrainer, launch_trainer
from agentrl.weights.config import SyncConfig
from agentrl.weights.types import GroupRequest
from tests.support.tiny import build_tokenizer
from tests.trainer.helpers import random_batch
from tests.weights.receivers import Receiver

pytestmark = pytest.mark.starts


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 10 MB, more than the two buckets of a megabyte that are copied before a sending starts."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("models") / "model"
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=build_tokenizer(folder),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        tie_word_embeddings=True,
        eos_token_id=2,
        bos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@asynccontextmanager
async def started(model: Path, folder: Path, dp: int, **settings: object) -> AsyncGenerator[RemoteTrainer]:
    async with launch_trainer(
        TrainerConfig.model_validate({"lr": 1e-2, "parallel": {"dp": dp}, **settings}),
        AlgorithmConfig(),
        model_path=model,
        total_steps=10,
        seed=0,
        log_path=folder / "trainer.log",
        sync=SyncConfig(bucket_mb=1, timeout_s=30),
    ) as trainer:
        yield trainer


async def receiver_of(trainer: RemoteTrainer, name: str) -> Receiver:
    [address] = await trainer.channel.open([GroupRequest(name, ranks=1, nccl=False, flat=True)], ())
    return await anyio.to_thread.run_sync(lambda: Receiver(address).joined())


async def taken(trainer: RemoteTrainer, receiver: Receiver, name: str, version: int, *, again: bool) -> dict[str, Tensor]:
    """Return what a server takes."""
    async with trainer.channel.sending(version, [name], dtype="bfloat16", again=again) as sending:
        receiver.take(sending.manifest)
        await sending.start([name])
        assert await sending.finish(()) == {}
    await anyio.to_thread.run_sync(receiver.wait)
    return receiver.tensors


def is_bfloat16_of(tensors: dict[str, Tensor], model: Path) -> bool:
    wanted = load_file(model / "model.safetensors")
    assert tensors.keys() == wanted.keys()
    return all(torch.equal(tensors[name], wanted[name].bfloat16()) for name in wanted)


@pytest.mark.parametrize(
    ("dp", "snapshot"),
    [
        (1, "host"),
        pytest.param(2, "host", marks=pytest.mark.long),
        pytest.param(2, "stream", marks=pytest.mark.long),  # in a file
    ],
)
async def test_steps_beside_a_sending_and_a_writing_change_nothing_that_leaves(
    tmp_path: Path, model: Path, dp: int, snapshot: str
) -> None:
    with anyio.fail_after(300):
        async with started(model, tmp_path, dp, snapshot=snapshot) as trainer:
            await _send_beside_steps(trainer, model)
            await _write_beside_a_step(trainer, tmp_path)
            await _end_the_run_during_a_step(trainer)


async def _send_beside_steps(trainer: RemoteTrainer, model: Path) -> None:
    first, joiner = await receiver_of(trainer, "first"), await receiver_of(trainer, "joiner")
    assert not trainer.steps_while_sending
    await trainer.hold(1, dtype="bfloat16")
    assert trainer.steps_while_sending
    assert (await trainer.step(random_batch(version=1))).skipped is None  # before the sending begins
    async with trainer.channel.sending(1, ["first"], dtype="bfloat16", again=False) as sending:
        assert (await trainer.step(random_batch(version=1))).skipped is None  # when the first buckets are copied
        first.take(sending.manifest)
        await sending.start(["first"])
        await trainer.step(random_batch(version=1))
        assert await sending.finish(()) == {}
    await anyio.to_thread.run_sync(first.wait)
    assert is_bfloat16_of(first.tensors, model)

    os.kill(trainer.pid, signal.SIGSTOP)  # so that the step is asked for before the joiner, and ends after it began
    stepped = anyio.Event()

    async def step() -> None:
        await trainer.step(random_batch(version=1, samples=20))
        stepped.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(step)
        await anyio.wait_all_tasks_blocked()
        os.kill(trainer.pid, signal.SIGCONT)
        assert is_bfloat16_of(await taken(trainer, joiner, "joiner", 1, again=True), model)


async def _write_beside_a_step(trainer: RemoteTrainer, folder: Path) -> None:
    held = present = await trainer.publish(2, str(folder / "present"))
    await trainer.hold(2, dtype=None)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(trainer.step, random_batch(version=2))
        held = await trainer.publish(2, str(folder / "held"))
    after = await trainer.publish(3, str(folder / "after"))
    assert held.path != present.path
    assert held.tensor_checksums == present.tensor_checksums
    assert after.tensor_checksums != present.tensor_checksums


async def _end_the_run_during_a_step(trainer: RemoteTrainer) -> None:
    """A cancellation ends step and sending, and no error of the sending takes its place."""
    await trainer.hold(4, dtype="bfloat16")
    with anyio.CancelScope() as run:
        async with trainer.channel.sending(4, [], dtype="bfloat16", again=False):
            async with anyio.create_task_group() as steps:
                steps.start_soon(trainer.step, random_batch(version=4, samples=20))
                await anyio.wait_all_tasks_blocked()
                steps.cancel_scope.cancel()
            run.cancel()
            await anyio.sleep_forever()
    assert run.cancelled_caught


@pytest.mark.long
async def test_the_memory_of_former_versions_is_given_back(tmp_path: Path, model: Path) -> None:
    async with started(model, tmp_path, 1, snapshot="host") as trainer:
        for version in range(1, 4):
            await _held_and_written(trainer, version, tmp_path)
        before = resident_bytes(trainer.pid)
        for version in range(4, 16):
            await _held_and_written(trainer, version, tmp_path)
        size = (model / "model.safetensors").stat().st_size
        grown = resident_bytes(trainer.pid) - before
        assert grown < 6 * size  # of 24 copies, 12 of each kind; the allocator keeps some for its threads


async def _held_and_written(trainer: RemoteTrainer, version: int, folder: Path) -> None:
    await trainer.hold(version, dtype="float32")
    async with trainer.channel.sending(version, [], dtype="float32", again=False) as sending:
        assert await sending.finish(()) == {}
    await trainer.publish(version, str(folder / "weights"))


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.long
async def test_without_a_copy_a_version_that_a_step_has_changed_is_refused(tmp_path: Path, model: Path) -> None:
    async with started(model, tmp_path, 1, snapshot="stream") as trainer:
        for dtype in ("float32", None):
            await trainer.hold(1, dtype=dtype)
            assert not trainer.steps_while_sending
            await trainer.step(random_batch(version=1))
            with pytest.raises(UpdatePending, match="the trainer's weights are past version 1"):
                await _let_leave(trainer, 1, dtype, tmp_path)
            await trainer.hold(1, dtype=dtype)
            await _let_leave(trainer, 1, dtype, tmp_path)
        async with trainer.channel.stepping():
            with pytest.raises(InvariantError, match="call `hold` before the step"):
                await _let_leave(trainer, 2, "float32", tmp_path)
        assert (await trainer.step(random_batch(version=1))).skipped is None


async def _let_leave(trainer: RemoteTrainer, version: int, dtype: str | None, folder: Path) -> None:
    if dtype is None:
        await trainer.publish(version, str(folder / "weights"))
        return
    async with trainer.channel.sending(version, [], dtype=dtype, again=False) as sending:
        await sending.finish(())
