"""An adapter is trained on a frozen base: what it computes, what leaves it, and what its checkpoints hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from peft import PeftModel
from pydantic import ValidationError
from safetensors import safe_open
from transformers import PreTrainedModel

from agentrl.config import parse_config
from agentrl.errors import ConfigError, TrainError
from agentrl.trainer.checkpoints.read import read_checkpoint
from agentrl.trainer.config import LoraConfig
from agentrl.trainer.lora import add_adapters
from agentrl.trainer.model import PolicyModel
from agentrl.trainer.parallel.ranks import Ranks
from agentrl.trainer.parallel.shape import MeshShape
from agentrl.trainer.parallel.snapshot import raw_tensor, torch_tensor
from agentrl.trainer.policy import PolicyTrainer
from agentrl.weights.disk import publish_adapter
from agentrl.weights.model_files import model_tensors
from agentrl.weights.peft_files import ADAPTER_BASE_FILE, ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE
from agentrl.weights.tensors import StoredTensor, read_safetensors
from tests.support.ranks import on_ranks
from tests.support.tiny import Architecture, tiny_checkpoint
from tests.trainer.helpers import full_logprobs, load_plain, random_batch, save_checkpoint, state_bytes
from tests.trainer.parallel.steps import IDS, assert_same, make_trainer, three_steps

LORA: dict[str, Any] = {"lora": {"rank": 4, "alpha": 8}, "lr": 1e-2}


def trained_one_step(path: Path, settings: dict[str, Any], ranks: Ranks | None = None) -> PolicyTrainer:
    trainer = make_trainer(ranks or Ranks(), path, settings)
    trainer.step(random_batch(version=1, samples=9))
    return trainer


def bytes_of(trainer: PolicyTrainer) -> dict[str, bytes]:
    return {name: bytes(raw.data) for name, raw in trainer.model.export().items()}


@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "llama"])
def test_a_new_adapter_is_the_base_and_a_trained_one_its_merged_weights(tmp_path: Path, arch: Architecture) -> None:
    path = tiny_checkpoint(tmp_path / "model", arch=arch)
    base = make_trainer(Ranks(), path, {})
    trainer = make_trainer(Ranks(), path, LORA)
    for ours, theirs in zip(trainer.logprobs(IDS), base.logprobs(IDS), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert bytes_of(trainer) == bytes_of(base)

    trainer.step(random_batch(version=1, samples=9))

    merged = load_plain(path)
    changed = {name: torch_tensor(raw) for name, raw in trainer.model.export().items()}
    same = {name for name, value in changed.items() if torch.equal(value, merged.state_dict()[name])}
    assert {name for name in changed if name.endswith("_proj.weight")} == changed.keys() - same
    merged.load_state_dict(changed, strict=False)
    sample = random_batch(version=2, samples=1).samples[0].sample
    [ours] = trainer.logprobs([sample.token_ids])
    with torch.no_grad():
        np.testing.assert_allclose(ours, full_logprobs(merged, sample).numpy(), rtol=0, atol=2e-5)


def test_only_the_adapter_has_gradients_and_optimizer_state(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "model")
    before = {name: bytes(stored.whole().data) for name, stored in model_tensors(path).items()}

    trainer = trained_one_step(path, {"lora": {"rank": 2, "targets": ["q_proj", "down_proj"]}})

    assert len(trainer.model.trained) == 2 * 2 * 2  # layers, targets, A and B
    moments = {name.partition(".")[2] for name in trainer.optimizer_tensors() if name.startswith("exp_avg.")}
    assert moments == trainer.model.trained.keys()
    held = trainer.model.parameters
    assert {name: held[name].detach().numpy().tobytes() for name in before if name in held} == {
        name: data for name, data in before.items() if name in held
    }


def test_a_pattern_selects_the_weights_that_are_trained(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "model")
    before = {name: bytes(stored.whole().data) for name, stored in model_tensors(path).items()}

    trainer = trained_one_step(path, {"trainable": r"layers\.1\..*norm"})

    after = bytes_of(trainer)
    changed = {name for name, data in after.items() if data != before[name]}
    assert changed == {name for name in after if "layers.1." in name and "norm" in name}
    assert changed


@pytest.mark.parametrize(
    ("mesh", "arch", "settings"),
    [
        (MeshShape(dp=2), "qwen3", {"microbatch_tokens": 64, "gradient_checkpointing": True}),
        (MeshShape(tp=2), "qwen3", {"microbatch_tokens": 100}),
        pytest.param(MeshShape(dp=2, tp=2), "llama", {"minibatches": 2}, marks=pytest.mark.long),
        pytest.param(MeshShape(dp=3), "qwen2", {"lora": {"rank": 2}}, marks=pytest.mark.long),
        pytest.param(MeshShape(cp=2), "qwen2", {"microbatch_tokens": 64}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_several_processes_train_the_adapter_of_one(
    tmp_path: Path, mesh: MeshShape, arch: Architecture, settings: dict[str, Any]
) -> None:
    path = tiny_checkpoint(tmp_path / "model", arch=arch, spread=0.1)
    chosen = {**LORA, "lr": 1e-4, **settings}
    assert_same(on_ranks(mesh, three_steps, path, chosen), three_steps(Ranks(), path, chosen))


def test_gradient_checkpointing_trains_the_same_adapter(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "model")
    plain, recomputed = (trained_one_step(path, {**LORA, "gradient_checkpointing": value}) for value in (False, True))
    assert bytes_of(recomputed) == bytes_of(plain)


def bfloat16_state(ranks: Ranks, path: Path) -> tuple[set[torch.dtype], set[torch.dtype], list[Any], list[Any]]:
    whole, adapted = (make_trainer(ranks, path, {"dtype": "bfloat16", **more}) for more in ({}, LORA))
    same = whole.logprobs(IDS), adapted.logprobs(IDS)
    adapted.step(random_batch(version=1, samples=9))
    base, trained = adapted.model.parameters, adapted.model.trained
    return {p.dtype for p in base.values()}, {p.dtype for p in trained.values()}, *same


def test_in_bfloat16_the_base_takes_half_the_memory_and_the_adapter_stays_float32(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "model")
    [(base, trained, whole, adapted)] = on_ranks(1, bfloat16_state, path)
    assert (base, trained) == ({torch.bfloat16}, {torch.float32})
    for ours, theirs in zip(adapted, whole, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def saved_state(ranks: Ranks, path: Path, folder: Path) -> dict[str, bytes]:
    trainer = trained_one_step(path, LORA, ranks)
    save_checkpoint(trainer, folder)
    return next_state(trainer)


def restored_state(ranks: Ranks, path: Path, folder: Path) -> dict[str, bytes]:
    trainer = make_trainer(ranks, path, LORA)
    trainer.restore(read_checkpoint(folder, rank=ranks.rank, world=ranks.world))
    return next_state(trainer)


def next_state(trainer: PolicyTrainer) -> dict[str, bytes]:
    trainer.step(random_batch(version=2, seed=1, samples=9))
    return {name: data for name, data in state_bytes(trainer).items() if not name.startswith("random_state")}


def test_a_checkpoint_holds_the_adapter_and_continues_bit_for_bit(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "model")
    expected = saved_state(Ranks(), path, tmp_path / "saved")
    assert restored_state(Ranks(), path, tmp_path / "saved") == expected
    with safe_open(tmp_path / "saved" / "adapter_model.safetensors", "pt") as file:
        assert len(file.keys()) == 2 * 2 * 7
    assert not (tmp_path / "saved" / "model.safetensors").exists()


@pytest.mark.starts
def test_two_processes_continue_bit_for_bit_from_one_file(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "model")
    expected = on_ranks(2, saved_state, path, tmp_path / "saved")
    assert on_ranks(2, restored_state, path, tmp_path / "saved") == expected
    assert [file.name for file in (tmp_path / "saved").glob("*.safetensors")] == ["adapter_model.safetensors"]


# PEFT 0.21 asks transformers by a name that transformers 5.20 has deprecated.
@pytest.mark.starts
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "llama"])
def test_a_checkpoint_loads_in_peft_with_the_log_probs_of_the_trainer(tmp_path: Path, arch: Architecture) -> None:
    path = tiny_checkpoint(tmp_path / "model", arch=arch)
    trainer = trained_one_step(path, LORA)
    save_checkpoint(trainer, tmp_path / "saved")

    loaded = PeftModel.from_pretrained(load_plain(path), str(tmp_path / "saved"))

    sample = random_batch(version=2, samples=1).samples[0].sample
    [ours] = trainer.logprobs([sample.token_ids])
    with torch.no_grad():
        theirs = full_logprobs(cast("PreTrainedModel", loaded), sample).numpy()
        base = full_logprobs(load_plain(path), sample).numpy()
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5)
    assert np.abs(ours - base).max() > 1e-2


@pytest.mark.starts
def test_an_adapter_of_another_base_is_refused_by_its_digest(tmp_path: Path) -> None:
    path, other = tiny_checkpoint(tmp_path / "model"), tiny_checkpoint(tmp_path / "other", seed=1)
    save_checkpoint(trained_one_step(path, LORA), tmp_path / "saved")
    with pytest.raises(ConfigError, match=r"was trained on .*model"):
        restored_state(Ranks(), other, tmp_path / "saved")


@pytest.mark.starts
def test_an_altered_description_of_the_adapter_is_damage(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "model")
    save_checkpoint(trained_one_step(path, LORA), tmp_path / "saved")
    file = tmp_path / "saved" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "lora_alpha": 16.0}))
    with pytest.raises(TrainError, match=r"adapter_config\.json"):
        read_checkpoint(tmp_path / "saved")


def published_files(ranks: Ranks, path: Path, saved: Path, folder: Path) -> dict[str, bytes]:
    """Return what a mesh publishes of the adapter in the checkpoint `saved`; nothing on the ranks that do not write."""
    model = make_trainer(ranks, path, LORA).model
    assert model.adapter is not None
    stored = read_safetensors(saved / ADAPTER_WEIGHTS_FILE)
    model.adapter.read({name: StoredTensor.of(raw) for name, raw in stored.items()}, model.adapter.config.alpha, saved)
    copies = model.adapter.copies(ranks)
    if ranks.rank != 0:
        return {}
    tensors = {name: raw_tensor(tensor) for name, tensor in copies.items()}
    publication = publish_adapter(tensors, model.adapter.documents(model.base), version=2, directory=folder)
    return {file.name: file.read_bytes() for file in Path(publication.path).iterdir()}


@pytest.mark.starts
@pytest.mark.parametrize("mesh", [MeshShape(tp=2), MeshShape(dp=2)], ids=str)
def test_a_mesh_publishes_the_bytes_of_one_process_as_safetensors_and_json(tmp_path: Path, mesh: MeshShape) -> None:
    path, saved = tiny_checkpoint(tmp_path / "model"), tmp_path / "saved"
    save_checkpoint(trained_one_step(path, LORA), saved)
    alone = published_files(Ranks(), path, saved, tmp_path / "alone")
    first, *others = on_ranks(mesh, published_files, path, saved, tmp_path / "together")
    assert first == alone
    assert others == [{}]
    assert set(alone) == {ADAPTER_WEIGHTS_FILE, ADAPTER_CONFIG_FILE, ADAPTER_BASE_FILE}
    assert alone[ADAPTER_WEIGHTS_FILE] == (saved / ADAPTER_WEIGHTS_FILE).read_bytes()


@pytest.mark.starts
@pytest.mark.parametrize("given", ["all", "all-linear", ["q_proj", "v_proj"]])
def test_files_and_flags_of_servers_list_targets_by_the_names_of_the_layers(tmp_path: Path, given: str | list[str]) -> None:
    path = tiny_checkpoint(tmp_path / "model")
    settings = {"rank": 2, "targets": given}
    adapter = PolicyModel(path, device=torch.device("cpu"), lora=LoraConfig.model_validate(settings)).adapter
    assert adapter is not None
    listed = adapter.peft_config("base").target_modules
    assert isinstance(listed, tuple)
    assert set(listed) == {name.split(".")[-3] for name, _ in adapter.matrices().values()}
    run = parse_config({
        "workflow": "my:Agent", "tasks": {"path": "t.jsonl"}, "model": {"path": "m"},
        "trainer": {"lora": settings}, "sync": {"adapter": "adapter"}, "inference": {"backend": "sglang"},
    })  # fmt: skip
    flags = run.resolved_inference.sglang_args
    at = flags.index("--lora-target-modules") + 1
    assert flags[at : at + len(listed)] == listed


@pytest.mark.starts
def test_settings_that_differ_from_those_of_the_checkpoint_are_named(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "model")
    save_checkpoint(trained_one_step(path, LORA), tmp_path / "adapter")
    save_checkpoint(trained_one_step(path, {}), tmp_path / "whole")
    adapter, whole = read_checkpoint(tmp_path / "adapter"), read_checkpoint(tmp_path / "whole")
    with pytest.raises(ConfigError, match=r"does not fit trainer\.lora \(rank 8.*lora_A"):
        make_trainer(Ranks(), path, {"lora": {"rank": 8}}).restore(adapter)
    with pytest.raises(ConfigError, match=r"does not fit trainer\.lora \(.*, alpha 64\): .*alpha 8; continue"):
        make_trainer(Ranks(), path, {"lora": {**LORA["lora"], "alpha": 64}}).restore(adapter)
    with pytest.raises(ConfigError, match=r"no trainer\.lora"):
        make_trainer(Ranks(), path, {}).restore(adapter)
    with pytest.raises(ConfigError, match=r"remove trainer\.lora"):
        make_trainer(Ranks(), path, LORA).restore(whole)


@pytest.mark.starts
def test_a_rank_above_the_size_of_a_layer_is_refused(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"trainer\.lora\.rank: 20 is above .*k_proj.* at most 16"):
        PolicyModel(path, device=torch.device("cpu"), lora=LoraConfig(rank=20))


@pytest.mark.starts
def test_targets_that_match_no_layer_are_refused_with_those_that_there_are() -> None:
    module = torch.nn.ModuleDict({"q_proj": torch.nn.Linear(8, 8), "norm": torch.nn.LayerNorm(8)})
    with pytest.raises(ConfigError, match=r"trainer\.lora\.targets: the model has no linear layer up_proj; it has q_proj"):
        add_adapters(module, LoraConfig(rank=2, targets=("up_proj",)), None, "the model")


@pytest.mark.starts
def test_a_pattern_that_matches_nothing_is_refused(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"trainer\.trainable: 'visual' matches no weight"):
        PolicyModel(path, device=torch.device("cpu"), trainable="visual")


@pytest.mark.starts
def test_targets_are_layers_or_all_of_them_and_dropout_is_0() -> None:
    assert len(LoraConfig.model_validate({"targets": "all-linear", "dropout": 0}).targets) == 7
    for given in (["qkv"], ["all-linear"], "q_proj|v_proj", [".*_proj"]):  # neither fused names nor patterns
        with pytest.raises(ValidationError, match="targets"):
            LoraConfig.model_validate({"targets": given})
    with pytest.raises(ValidationError, match="sample without it"):
        LoraConfig.model_validate({"dropout": 0.1})
