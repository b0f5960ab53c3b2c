"""Checkpoints: exact continuation, and what is done about damage."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from agentrl.algo.config import AlgorithmConfig
from agentrl.errors import ConfigError, TrainError
from agentrl.trainer.checkpoints.format import TrainerState
from agentrl.trainer.checkpoints.read import latest_checkpoint, read_checkpoint
from agentrl.trainer.checkpoints.write import CheckpointJob, StagedParts, write_checkpoint
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.model import PolicyModel
from agentrl.trainer.parallel.ranks import Ranks
from agentrl.trainer.policy import PolicyTrainer
from agentrl.weights.tensors import RawTensor, TensorPart
from tests.support.tiny import tiny_checkpoint
from tests.trainer.helpers import load_plain, random_batch, save_checkpoint, state_bytes


def _trainer(path: Path, **algorithm: object) -> PolicyTrainer:
    config = TrainerConfig(lr=1e-3, minibatches=2, weight_decay=0.01, warmup_steps=2, schedule="cosine")
    return PolicyTrainer(
        PolicyModel(path, device=torch.device("cpu")), config, AlgorithmConfig.model_validate(algorithm), total_steps=10
    )


def _tiny(root: Path, steps: int) -> Path:
    raw = RawTensor.of(np.full(8, steps, np.float32))
    part = TensorPart(whole=raw.shape, offset=(0,), data=raw)
    state = TrainerState(policy_version=steps, steps=steps, optimizer_steps=steps, bad_steps=0)
    path = root / f"step-{steps:08d}"
    parts = StagedParts(weights={"w": part}, optimizer={"exp_avg.w": part})
    write_checkpoint(Ranks(), CheckpointJob(directory=path, parts=parts, state=state, note="", source=root))
    return path


def test_a_restored_run_goes_on_bit_for_bit_like_the_uninterrupted_one(tmp_path: Path, checkpoint: Path) -> None:
    batches = [random_batch(version=version, seed=version) for version in range(1, 6)]
    straight = _trainer(checkpoint, guard="effective_samples")
    for batch in batches[:3]:
        straight.step(batch)
    save_checkpoint(straight, tmp_path / "step-3")
    expected = [straight.step(batch).metrics for batch in batches[3:]]

    torch.manual_seed(99)
    resumed = _trainer(checkpoint, guard="effective_samples")
    resumed.restore(read_checkpoint(tmp_path / "step-3"))
    metrics = [resumed.step(batch).metrics for batch in batches[3:]]

    assert resumed.state == straight.state
    for ours, theirs in zip(metrics, expected, strict=True):
        timeless = [{k: v for k, v in m.items() if not k.startswith("seconds")} for m in (ours, theirs)]
        assert timeless[0] == timeless[1]
    for name, parameter in straight.model.parameters.items():
        assert torch.equal(parameter, resumed.model.parameters[name]), name
    assert state_bytes(resumed) == state_bytes(straight)


def test_a_checkpoint_is_a_hugging_face_model(tmp_path: Path, checkpoint: Path) -> None:
    trainer = _trainer(checkpoint)
    trainer.step(random_batch())
    save_checkpoint(trainer, tmp_path / "c")

    loaded = load_plain(tmp_path / "c")

    assert torch.equal(loaded.get_parameter("model.norm.weight"), trainer.model.parameters["model.norm.weight"])
    assert (tmp_path / "c" / "tokenizer.json").is_file()


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, checkpoint: Path) -> None:
    save_checkpoint(_trainer(tiny_checkpoint(tmp_path / "other", arch="llama")), tmp_path / "c")

    with pytest.raises(ConfigError, match=r"c: the weights do not fit .*qwen3/config\.json: missing_keys"):
        _trainer(checkpoint).restore(read_checkpoint(tmp_path / "c"))


def test_the_newest_checkpoint_is_found_by_its_counter_not_by_its_name_or_date(tmp_path: Path) -> None:
    _tiny(tmp_path, 10)
    _tiny(tmp_path, 9)
    (tmp_path / "step-00000010").rename(tmp_path / "a-first")

    found = latest_checkpoint(tmp_path)

    assert found is not None
    assert found.path == tmp_path / "a-first"
    assert found.state.steps == 10


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.state", "trainer.json", "shards.json"])
@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_a_damaged_newest_checkpoint_falls_back_by_one_with_a_message(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, damage: str
) -> None:
    for steps in (1, 2, 3):
        _tiny(tmp_path, steps)
    victim = tmp_path / "step-00000003" / name
    content = bytearray(victim.read_bytes())
    if damage == "gone":
        victim.unlink()
    elif damage == "cut":
        victim.write_bytes(content[:-7])
    else:
        content[-5 if name.endswith("safetensors") else content.index(b"3")] ^= 1
        victim.write_bytes(content)

    with caplog.at_level(logging.WARNING):
        found = latest_checkpoint(tmp_path)

    assert found is not None
    assert found.path.name == "step-00000002"
    assert "step-00000003" in caplog.text


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_anew(tmp_path: Path) -> None:
    (_tiny(tmp_path, 1) / "optimizer.state").write_bytes(b"")

    with pytest.raises(TrainError, match=r"every checkpoint in .* is damaged"):
        latest_checkpoint(tmp_path)


def test_no_checkpoint_at_all_is_none(tmp_path: Path) -> None:
    (tmp_path / ".writing-step-00000001").mkdir()

    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "missing") is None


def test_an_inference_server_finds_nothing_but_weights_in_a_checkpoint(tmp_path: Path) -> None:
    folder = _tiny(tmp_path, 1)

    assert [path.name for path in folder.glob("*.safetensors")] == ["model.safetensors"]
