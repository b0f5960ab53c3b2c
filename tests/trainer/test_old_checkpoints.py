"""Checkpoints of other releases: those of version 1 are continued exactly, and newer ones are refused."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from agentrl.errors import ConfigError, TrainError
from agentrl.trainer.checkpoints.read import latest_checkpoint, read_checkpoint
from agentrl.trainer.parallel.ranks import Ranks
from agentrl.trainer.parallel.snapshot import raw_tensor
from agentrl.trainer.policy import PolicyTrainer
from agentrl.weights.disk import atomic_directory, write_model
from agentrl.weights.tensors import model_checksum, write_safetensors
from tests.support.ranks import on_ranks
from tests.trainer.helpers import random_batch, save_checkpoint, state_bytes
from tests.trainer.parallel.steps import make_trainer

pytestmark = pytest.mark.starts

SETTINGS = {"microbatch_tokens": 64}


def write_version_1(trainer: PolicyTrainer, directory: Path) -> None:
    """Write what releases before sharded checkpoints wrote: two files of whole tensors, one random state."""
    tensors = dict(trainer.optimizer_tensors())
    tensors["random_state"] = tensors.pop("random_state.0")
    optimizer = {name: raw_tensor(tensor) for name, tensor in tensors.items()}
    state = {name: getattr(trainer.state, name) for name in ("policy_version", "steps", "optimizer_steps", "bad_steps")}
    with atomic_directory(directory) as folder:
        manifest = write_model(
            folder, trainer.model.export(), version=trainer.state.policy_version, source=trainer.model.path
        )
        write_safetensors(folder / "optimizer.state", optimizer)
        checksums = [
            manifest.checksum,
            model_checksum({name: tensor.checksum(name) for name, tensor in optimizer.items()}),
        ]
        record = {
            "state": state,
            "note": "a note",
            "model_checksum": checksums[0],
            "optimizer_checksum": checksums[1],
            "digest": hashlib.blake2b(msgspec.json.encode([state, "a note", *checksums]), digest_size=16).hexdigest(),
        }
        (folder / "trainer.json").write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1))


@pytest.fixture
def old(tmp_path: Path, checkpoint: Path) -> tuple[PolicyTrainer, Path]:
    """A trainer after two steps, and its checkpoint of version 1."""
    trainer, folder = make_trainer(Ranks(), checkpoint, SETTINGS), tmp_path / "saved" / "step-2"
    for version in (1, 2):
        trainer.step(random_batch(version=version, seed=version))
    write_version_1(trainer, folder)
    return trainer, folder


def test_a_checkpoint_of_version_1_is_continued_bit_for_bit(old: tuple[PolicyTrainer, Path], checkpoint: Path) -> None:
    straight, folder = old
    random_state = torch.get_rng_state()
    found = latest_checkpoint(folder.parent)
    assert found is not None
    assert (found.path, found.note, found.world) == (folder, "a note", 1)
    resumed = make_trainer(Ranks(), checkpoint, SETTINGS)
    torch.manual_seed(99)

    resumed.restore(found)

    assert resumed.state == straight.state
    assert torch.equal(torch.get_rng_state(), random_state)
    for trainer in (straight, resumed):
        trainer.step(random_batch(version=3, seed=3))
    after = [state_bytes(trainer) for trainer in (straight, resumed)]
    assert after[0] == after[1]


def test_a_run_that_continues_from_version_1_writes_the_present_version(
    old: tuple[PolicyTrainer, Path], checkpoint: Path
) -> None:
    straight, folder = old
    resumed = make_trainer(Ranks(), checkpoint, SETTINGS)
    resumed.restore(read_checkpoint(folder))

    save_checkpoint(resumed, folder)

    assert msgspec.json.decode((folder / "trainer.json").read_bytes())["version"] == 2
    assert not (folder / "manifest.json").exists()
    again = make_trainer(Ranks(), checkpoint, SETTINGS)
    again.restore(read_checkpoint(folder))
    assert state_bytes(again) == state_bytes(straight)


def restored_state(ranks: Ranks, path: Path, folder: Path) -> dict[str, bytes]:
    trainer = make_trainer(ranks, path, SETTINGS)
    trainer.restore(read_checkpoint(folder, rank=ranks.rank, world=ranks.world))
    state = state_bytes(trainer)
    return {name: data for name, data in state.items() if not name.startswith("random_state")}


def test_two_ranks_continue_from_a_checkpoint_of_version_1(old: tuple[PolicyTrainer, Path], checkpoint: Path) -> None:
    straight, folder = old
    expected = {name: data for name, data in state_bytes(straight).items() if not name.startswith("random_state")}

    assert on_ranks(2, restored_state, checkpoint, folder) == [expected, expected]


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.state", "trainer.json"])
def test_a_damaged_checkpoint_of_version_1_is_refused(old: tuple[PolicyTrainer, Path], name: str) -> None:
    file = old[1] / name
    content = bytearray(file.read_bytes())
    content[content.index(b"a note") if name == "trainer.json" else -5] ^= 1
    file.write_bytes(content)

    with pytest.raises(TrainError, match="altered after it was written"):
        read_checkpoint(old[1])


def read_newest(folder: Path) -> object:
    return latest_checkpoint(folder.parent)


@pytest.mark.parametrize("read", [read_checkpoint, read_newest])
def test_a_checkpoint_of_a_later_release_is_refused(
    tmp_path: Path, checkpoint: Path, read: Callable[[Path], object]
) -> None:
    folder = tmp_path / "saved" / "step-1"
    save_checkpoint(make_trainer(Ranks(), checkpoint, SETTINGS), folder)
    record = msgspec.json.decode((folder / "trainer.json").read_bytes())
    later = {**record, "version": 3, "unheard_of": {}}
    (folder / "trainer.json").write_bytes(msgspec.json.encode(later))

    with pytest.raises(ConfigError, match=r"step-1: trainer\.json has format version 3, and this release reads versions 1"):
        read(folder)
