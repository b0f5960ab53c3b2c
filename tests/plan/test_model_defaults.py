"""Settings follow from the size of a model, and the dry run names values that suit a toy."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from agentrl.commands.train import train_command
from agentrl.config import ModelConfig, RunConfig
from agentrl.errors import ConfigError
from agentrl.plan.model import read_model
from agentrl.plan.model_defaults import DEFAULTS, LORA_FACTOR, count_parameters, defaults_for, spoken, toy_values

SMOL = {  # SmolLM2-135M
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49_152,
    "tie_word_embeddings": True,
}
LARGE = {**SMOL, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
TINY = {
    **SMOL,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 512,
}


def model(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def found(path: Path, **sections: object) -> list[str]:
    run = RunConfig.model_validate(
        {"name": "run", "workflow": "agent:Agent", "tasks": {"path": "t.jsonl"}, "model": {"path": str(path)}, **sections}
    )
    return toy_values(run, read_model(str(path)))


def test_the_size_comes_from_the_config_or_else_from_the_headers_of_the_weights(tmp_path: Path) -> None:
    assert count_parameters(ModelConfig(path=str(model(tmp_path / "smol", SMOL)))) == 134_515_008
    stored = tmp_path / "stored"
    stored.mkdir()
    save_file({"a": np.zeros((3, 5), np.float32), "b": np.zeros(7, np.float16)}, stored / "model.safetensors")
    assert count_parameters(ModelConfig(path=str(stored))) == 22
    with pytest.raises(ConfigError, match=r"cannot tell the size of .*nothing: its config.json gives none"):
        count_parameters(ModelConfig(path=str(tmp_path / "nothing")))


def test_larger_models_learn_at_lower_rates() -> None:
    rates = [defaults_for(size).lr for size in (134_515_008, 1_543_714_304, 7_600_000_000)]
    assert rates == [1.5e-5, 1e-5, 1e-6]
    assert all(each.source for each in DEFAULTS)
    assert spoken(1_543_714_304) == "1.5B"


@pytest.mark.parametrize(
    ("config", "sections", "expected"),
    [
        (
            LARGE,
            {"trainer": {"lr": 5e-4}},
            "trainer.lr: 0.0005 suits a toy; a model of .*B parameters learns at about 1e-05",
        ),
        (SMOL, {"trainer": {"lr": 5e-5}}, "set trainer.lr: 1.5e-05"),
        (SMOL, {"trainer": {"lr": 5e-3, "lora": {}}}, "an adapter of a model of 135M parameters learns at about 0.00015"),
        (SMOL, {"sampling": {"max_tokens": 16}}, "sampling.max_tokens: 16 suits a toy.* set sampling.max_tokens: 256"),
        (SMOL, {"algorithm": {"group_size": 4, "groups_per_step": 4}}, "16 episodes a step suit a toy.*groups_per_step: 8"),
        (SMOL, {"trainer": {"minibatches": 16}}, "trainer.minibatches: 16 steps on a batch suit a toy"),
    ],
)
def test_values_of_a_toy_are_named_with_the_field_to_change(
    tmp_path: Path, config: dict[str, Any], sections: dict[str, Any], expected: str
) -> None:
    sections.setdefault("algorithm", {"group_size": 8, "groups_per_step": 8})
    (line,) = found(model(tmp_path / "m", config), **sections)
    assert re.search(expected, line), line


def test_the_settings_for_a_size_are_no_toys(tmp_path: Path) -> None:
    fits = DEFAULTS[0]
    algorithm = {"group_size": fits.group_size, "groups_per_step": fits.groups_per_step}
    trainer = {"lr": fits.lr, "minibatches": fits.minibatches}
    path = model(tmp_path / "m", SMOL)
    assert found(path, algorithm=algorithm, trainer=trainer, sampling={"max_tokens": fits.max_tokens}) == []
    adapter = {**trainer, "lr": fits.lr * LORA_FACTOR, "lora": {}}
    assert found(path, algorithm=algorithm, trainer=adapter) == []


def test_a_tiny_model_or_one_of_unknown_size_is_left_alone(tmp_path: Path) -> None:
    toy = {"trainer": {"lr": 5e-3}, "sampling": {"max_tokens": 1}}
    assert found(model(tmp_path / "tiny", TINY), **toy) == []
    assert found(tmp_path / "unknown", **toy) == []


def test_the_dry_run_prints_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model(tmp_path / "m", SMOL)
    (tmp_path / "t.jsonl").write_text('{"question": "?"}\n')
    run = {"name": "run", "workflow": "agentrl_workflows.math_feedback:MathFeedback", "tasks": {"path": "t.jsonl"}}
    (tmp_path / "run.yaml").write_text(json.dumps({**run, "model": {"path": "m"}, "trainer": {"lr": 5e-4}}))
    with pytest.raises(SystemExit):
        train_command(Path("run.yaml"), dry_run=True)
    assert "warning: trainer.lr: 0.0005 suits a toy; a model of 135M parameters" in capsys.readouterr().out
