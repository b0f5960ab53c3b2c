"""An adapter and its base become a whole model, which computes what the trainer computes."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from agentrl.commands.models.merge import merge_command
from agentrl.errors import ConfigError
from agentrl.trainer.checkpoints.read import read_checkpoint
from agentrl.trainer.model import PolicyModel
from agentrl.trainer.parallel.ranks import Ranks
from agentrl.weights.merging import merge_adapter, whole_model
from agentrl.weights.peft_files import ADAPTER_CONFIG_FILE
from tests.support.tiny import tiny_checkpoint
from tests.trainer.helpers import full_logprobs, load_plain, random_batch, save_checkpoint
from tests.trainer.parallel.steps import make_trainer

SAMPLE = random_batch(version=2, samples=1).samples[0].sample


def trained_adapter(base: Path, folder: Path) -> np.ndarray:
    """Save an adapter after one step; return the trainer's log-probs of `SAMPLE`."""
    trainer = make_trainer(Ranks(), base, {"lora": {"rank": 4}, "lr": 1e-2})
    trainer.step(random_batch(version=1, samples=9))
    save_checkpoint(trainer, folder)
    return trainer.logprobs([SAMPLE.token_ids])[0]


def test_a_merged_run_computes_the_log_probs_of_its_trainer(tmp_path: Path) -> None:
    base, run = tiny_checkpoint(tmp_path / "model"), tmp_path / "run"
    expected = trained_adapter(base, run / "checkpoints" / "step-000001")

    merge_command(run, tmp_path / "merged")

    with torch.no_grad():
        np.testing.assert_allclose(
            full_logprobs(load_plain(tmp_path / "merged"), SAMPLE).numpy(), expected, rtol=0, atol=2e-5
        )
    assert (tmp_path / "merged" / "tokenizer.json").is_file()
    with pytest.raises(ConfigError, match="exists"):
        merge_command(run, tmp_path / "merged")


def test_a_model_of_several_bfloat16_files_keeps_its_files_and_is_rounded_once(tmp_path: Path) -> None:
    base = tiny_checkpoint(tmp_path / "model")
    load_plain(base, torch.bfloat16).save_pretrained(base, max_shard_size="30KB")
    (base / "model.safetensors").unlink(missing_ok=True)
    trained_adapter(base, tmp_path / "adapter")
    exact = {name: tensor.to(torch.bfloat16) for name, tensor in restored_weights(base, tmp_path / "adapter").items()}

    merge_adapter(tmp_path / "adapter", tmp_path / "merged")

    files = {file.name for file in base.glob("model*.safetensors*")}
    assert len(files) > 2
    assert {file.name for file in (tmp_path / "merged").glob("model*")} == files
    for name in files - {"model.safetensors.index.json"}:
        for key, tensor in load_file(tmp_path / "merged" / name).items():
            assert tensor.dtype == torch.bfloat16
            # Two ways to sum float32 may round apart by one bit of bfloat16.
            torch.testing.assert_close(tensor, exact[key], rtol=2**-7, atol=0)


def restored_weights(base: Path, adapter: Path) -> dict[str, torch.Tensor]:
    trainer = make_trainer(Ranks(), base, {"lora": {"rank": 4}})
    trainer.restore(read_checkpoint(adapter))
    return trainer.model.weights()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # of PEFT 0.21
def test_an_adapter_of_peft_merges_into_a_base_that_is_named(tmp_path: Path) -> None:
    base = tiny_checkpoint(tmp_path / "model")
    adapted = get_peft_model(load_plain(base), LoraConfig(r=2, lora_alpha=3, target_modules=["q_proj", "up_proj"]))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    adapted.save_pretrained(str(tmp_path / "adapter"))
    expected = dict(adapted.merge_and_unload().state_dict())

    with pytest.raises(ConfigError, match=r"agentrl_base\.json.* PEFT has none; give the directory of .* with --base"):
        merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    merge_adapter(tmp_path / "adapter", tmp_path / "merged", base)

    for name, tensor in load_file(tmp_path / "merged" / "model.safetensors").items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-7)


def test_an_altered_base_is_refused(tmp_path: Path) -> None:
    base = tiny_checkpoint(tmp_path / "model")
    trained_adapter(base, tmp_path / "adapter")
    other = tiny_checkpoint(tmp_path / "other", seed=1)
    with pytest.raises(ConfigError, match=r"was trained on .* and .*other has the weights"):
        merge_adapter(tmp_path / "adapter", tmp_path / "merged", other)
    assert not (tmp_path / "merged").exists()


def test_an_adapter_with_whole_layers_or_another_kind_is_refused(tmp_path: Path) -> None:
    base = tiny_checkpoint(tmp_path / "model")
    trained_adapter(base, tmp_path / "adapter")
    file = tmp_path / "adapter" / ADAPTER_CONFIG_FILE
    settings = msgspec.json.decode(file.read_bytes())
    for change, said in [
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save names whole layers \(lm_head\)"),
        ({"use_dora": True}, "use_dora is True"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
    ]:
        file.write_bytes(msgspec.json.encode({**settings, **change}))
        with pytest.raises(ConfigError, match=said):
            merge_adapter(tmp_path / "adapter", tmp_path / "merged")


def test_a_checkpoint_of_an_adapter_is_served_as_the_whole_model(tmp_path: Path) -> None:
    base = tiny_checkpoint(tmp_path / "model")
    trained_adapter(base, tmp_path / "adapter")
    assert whole_model(base) == base
    merged = whole_model(tmp_path / "adapter")
    assert whole_model(tmp_path / "adapter") == merged
    PolicyModel(merged, device=torch.device("cpu"))
    read_checkpoint(tmp_path / "adapter")


def test_a_checkpoint_of_whole_weights_has_no_adapter(tmp_path: Path) -> None:
    base = tiny_checkpoint(tmp_path / "model")
    with pytest.raises(ConfigError, match="no adapter here"):
        merge_command(base, tmp_path / "merged")
