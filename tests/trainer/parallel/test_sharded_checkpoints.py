"""Checkpoints of several ranks: each writes and reads its part, and any number of ranks continues from any other's."""

from __future__ import annotations

import logging
import math
import os
import resource
import threading
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors import safe_open

from agentrl.errors import TrainError
from agentrl.trainer.checkpoints.read import latest_checkpoint, read_checkpoint
from agentrl.trainer.checkpoints.write import BackgroundWriter, CheckpointJob
from agentrl.trainer.parallel.ranks import Ranks
from agentrl.trainer.parallel.shape import MeshShape
from agentrl.trainer.parallel.snapshot import torch_tensor
from agentrl.trainer.policy import PolicyTrainer
from tests.support.ranks import on_ranks
from tests.support.tiny import build_model, build_tokenizer, tiny_checkpoint
from tests.trainer.helpers import load_plain, random_batch, save_checkpoint, state_bytes
from tests.trainer.parallel.steps import make_trainer

pytestmark = pytest.mark.starts

_SETTINGS = {"microbatch_tokens": 64}


class Continued(NamedTuple):
    """What a trainer has after it was restored, and after one more step."""

    state: dict[str, bytes]
    """Weights and optimizer, whole."""
    random_state: bytes
    loss: float
    weights: dict[str, bytes]
    """After the step."""


def trained_and_saved(ranks: Ranks, path: Path, folder: Path) -> Continued:
    trainer = make_trainer(ranks, path, _SETTINGS)
    trainer.step(random_batch(version=1, samples=9))
    torch.manual_seed(100 + ranks.rank)
    save_checkpoint(trainer, folder, "a note")
    return _continued(trainer, ranks)


def restored(ranks: Ranks, path: Path, folder: Path) -> Continued:
    trainer = make_trainer(ranks, path, _SETTINGS)
    trainer.restore(read_checkpoint(folder, rank=ranks.rank, world=ranks.world))
    assert trainer.state.steps == 1
    return _continued(trainer, ranks)


def _continued(trainer: PolicyTrainer, ranks: Ranks) -> Continued:
    state = state_bytes(trainer)
    random_state = state.pop(f"random_state.{ranks.rank}")
    loss = trainer.step(random_batch(version=2, seed=1, samples=9)).metrics["loss"]
    weights = state_bytes(trainer)
    return Continued(state, random_state, loss, {name: weights[name] for name in trainer.model.parameters})


@pytest.mark.parametrize(
    ("written_by", "read_by"),
    [
        (2, (2, 1, 3)),
        (1, (2,)),
        pytest.param(2, (4,), marks=pytest.mark.long),
        pytest.param(3, (2, 4, 1), marks=pytest.mark.long),
    ],
)
def test_any_number_of_ranks_continues_with_the_same_bytes(
    tmp_path: Path, written_by: int, read_by: tuple[int, ...]
) -> None:
    path = tiny_checkpoint(tmp_path / "model")
    expected = on_ranks(written_by, trained_and_saved, path, tmp_path / "saved")

    for world in read_by:
        found = on_ranks(world, restored, path, tmp_path / "saved")

        for rank, (ours, theirs) in enumerate(zip(found, expected * math.ceil(world / written_by), strict=False)):
            assert ours.state == expected[0].state
            assert ours.random_state == theirs.random_state, rank
            assert ours.loss == pytest.approx(expected[0].loss, rel=1e-5)
        if world == written_by:  # exact under the ranks it was written with
            assert [one.loss for one in found] == [one.loss for one in expected]
            assert found[0].weights == expected[0].weights


@pytest.mark.long
@pytest.mark.parametrize(
    ("written_by", "read_by"),
    [
        (MeshShape(dp=2, tp=2), MeshShape(dp=2)),
        (MeshShape(dp=2), MeshShape(dp=2, tp=2)),
        (MeshShape(replicate=2), MeshShape()),
    ],
)
def test_any_mesh_continues_from_any_other(tmp_path: Path, written_by: MeshShape, read_by: MeshShape) -> None:
    path = tiny_checkpoint(tmp_path / "model")
    [expected, *_] = on_ranks(written_by, trained_and_saved, path, tmp_path / "saved")

    for found in on_ranks(read_by, restored, path, tmp_path / "saved"):
        assert found.state == expected.state
        assert found.loss == pytest.approx(expected.loss, abs=1e-6)  # tp sums in another order


@pytest.mark.long
def test_parts_of_unequal_sizes_continue_under_other_meshes(tmp_path: Path) -> None:
    path = tmp_path / "model"
    words = build_tokenizer(path)
    build_model(
        path, vocab_size=words + 1 - words % 2, eos_id=0
    )  # odd: the ranks of tp have unequal parts of the embeddings
    written_by = MeshShape(dp=3, tp=2)
    [expected, *_] = on_ranks(written_by, trained_and_saved, path, tmp_path / "saved")

    for read_by in (MeshShape(tp=2), MeshShape(dp=2), written_by):
        for found in on_ranks(read_by, restored, path, tmp_path / "saved"):
            assert found.state == expected.state
            assert found.loss == pytest.approx(expected.loss, abs=1e-6)  # tp sums in another order


def exported(ranks: Ranks, path: Path, folder: Path) -> dict[str, bytes]:
    trainer = make_trainer(ranks, path, _SETTINGS)
    trainer.step(random_batch(version=1, samples=9))
    save_checkpoint(trainer, folder)
    return {name: bytes(raw.data) for name, raw in trainer.model.export().items()}


def test_the_parts_are_a_hugging_face_model_and_nothing_is_there_twice(tmp_path: Path) -> None:
    path, folder = tiny_checkpoint(tmp_path / "model", arch="llama"), tmp_path / "saved"
    [weights, *_] = on_ranks(2, exported, path, folder)

    loaded = {name: parameter.detach().numpy().tobytes() for name, parameter in load_plain(folder).named_parameters()}

    assert loaded == weights
    files = sorted(child.name for child in folder.iterdir())
    assert [name for name in files if "-of-" in name] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "optimizer-00001-of-00002.state",
        "optimizer-00002-of-00002.state",
    ]
    names: list[str] = []
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:  # pyright: ignore[reportUnknownVariableType]
            names += opened.keys()
    assert sorted(names) == sorted(weights)
    total = sum(len(data) for data in weights.values())
    sizes = [file.stat().st_size for file in folder.glob("*-of-*")]
    assert sum(sizes) < 3.2 * total, "weights once, two moments once"
    assert max(sizes) < 0.7 * sum(sizes), "each rank writes a share"
    assert "tokenizer.json" in files


def test_a_part_is_read_without_the_rest_of_its_tensor(tmp_path: Path) -> None:
    path, folder = tiny_checkpoint(tmp_path / "model"), tmp_path / "saved"
    on_ranks(3, exported, path, folder)
    [name] = [name for name in read_checkpoint(folder).optimizer if name.startswith("exp_avg.") and "embed" in name]
    tensor = read_checkpoint(folder).optimizer[name]
    whole = torch_tensor(tensor.box((0, 0), tensor.shape))

    assert len(tensor.parts) == 3
    rows = tensor.shape[0]
    for begin, end in ((0, 1), (rows // 3 - 1, rows // 3 + 2), (1, rows)):  # within a part, over one bound, over two
        part = torch_tensor(tensor.box((begin, 3), (end - begin, 5)))
        assert torch.equal(part, whole[begin:end, 3:8])


def test_a_damaged_part_is_named_and_the_checkpoint_before_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tiny_checkpoint(tmp_path / "model")
    on_ranks(2, two_saves, path, tmp_path / "saved")
    victim = tmp_path / "saved" / "step-2" / "optimizer-00002-of-00002.state"
    content = bytearray(victim.read_bytes())
    content[-5] ^= 1
    victim.write_bytes(content)

    with caplog.at_level(logging.WARNING):
        found = latest_checkpoint(tmp_path / "saved")

    assert found is not None
    assert found.path.name == "step-1"
    assert "step-2 is damaged: optimizer-00002-of-00002.state was altered" in caplog.text
    victim.unlink()
    with pytest.raises(TrainError, match=r"optimizer-00002-of-00002\.state cannot be read: No such file"):
        read_checkpoint(tmp_path / "saved" / "step-2")


def two_saves(ranks: Ranks, path: Path, folder: Path) -> None:
    trainer = make_trainer(ranks, path, _SETTINGS)
    for number in (1, 2):
        trainer.step(random_batch(version=number, seed=number))
        save_checkpoint(trainer, folder / f"step-{number}")


def refused_on_rank_1(ranks: Ranks, path: Path, folder: Path) -> tuple[str, list[str], list[str]]:
    trainer = make_trainer(ranks, path, _SETTINGS)
    save_checkpoint(trainer, folder / "step-1")
    trainer.step(random_batch(version=1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if ranks.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    message = ""
    try:
        save_checkpoint(trainer, folder / "step-2")
    except TrainError as error:
        message = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    ranks.gather(b"rank 0 has cleaned up")
    left = sorted(os.listdir(folder))
    ranks.gather(b"all have looked")
    save_checkpoint(trainer, folder / "step-2")  # the trainer stays usable
    return message, left, sorted(os.listdir(folder))


def test_a_full_disk_of_one_rank_is_the_error_of_all_and_leaves_what_was_there(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "model")
    for message, left, then in on_ranks(2, refused_on_rank_1, path, tmp_path / "saved"):
        assert message.startswith(f"cannot write {tmp_path / 'saved' / 'step-2'}: File too large")
        assert left == ["step-1"]
        assert then == ["step-1", "step-2"]


class HeldExchanges(Ranks):
    """One rank, whose exchanges of the writing thread wait for `go`."""

    def __init__(self, go: threading.Event) -> None:
        self._go = go

    def beside(self) -> Ranks:
        go = self._go

        class Waiting(Ranks):
            def gather(self, data: bytes) -> list[bytes]:
                assert go.wait(300)
                return super().gather(data)

        return Waiting()


def test_training_continues_while_a_checkpoint_is_written_and_does_not_change_it(tmp_path: Path, checkpoint: Path) -> None:
    trainer, final, go = make_trainer(Ranks(), checkpoint, _SETTINGS), tmp_path / "step-1", threading.Event()
    trainer.step(random_batch(version=1))
    before = state_bytes(trainer)
    writer = BackgroundWriter(HeldExchanges(go))
    writer.start(
        CheckpointJob(directory=final, parts=trainer.stage(), state=trainer.state, note="", source=trainer.model.path)
    )

    trainer.step(random_batch(version=2, seed=1))
    assert writer.finish(wait=False) is None
    assert not final.exists()
    assert state_bytes(trainer) != before
    go.set()
    written = writer.finish(wait=True)
    writer.close()

    assert written is not None
    assert written.directory == str(final)
    assert writer.finish(wait=True) is None
    trainer.restore(read_checkpoint(final))
    assert state_bytes(trainer) == before
