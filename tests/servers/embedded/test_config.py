"""What is wrong in the JSON of a checkpoint is named by file and field before weights are read."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from agentrl.errors import ConfigError
from agentrl.servers.embedded.engine import EmbeddedEngine, EngineOptions
from agentrl.servers.embedded.spec import read_spec
from tests.support.tiny import tiny_checkpoint


@pytest.mark.parametrize(
    ("field", "value", "at"),
    [
        ("hidden_size", "abc", "hidden_size"),
        ("hidden_size", None, "hidden_size"),
        ("hidden_size", 32.5, "hidden_size"),
        ("vocab_size", 0, "vocab_size"),
        ("num_attention_heads", 0, "num_attention_heads"),
        ("num_hidden_layers", -1, "num_hidden_layers"),
        ("rms_norm_eps", "x", "rms_norm_eps"),
        ("max_position_embeddings", None, "max_position_embeddings"),
        ("max_position_embeddings", -1, "max_position_embeddings"),
        ("eos_token_id", "</s>", "eos_token_id"),
        ("eos_token_id", -1, "eos_token_id"),
        ("eos_token_id", [1, "x"], "eos_token_id[1]"),
        ("rope_parameters", "linear", "rope_parameters"),
        ("rope_scaling", "linear", "rope_scaling"),
        ("rope_parameters", {"rope_theta": "x"}, "rope_parameters.rope_theta"),
        ("rope_theta", "x", "rope_theta"),
        ("tie_word_embeddings", "yes", "tie_word_embeddings"),
        ("architectures", "LlamaForCausalLM", "architectures"),
    ],
)
def test_a_field_of_the_wrong_kind_is_named(tmp_path: Path, field: str, value: object, at: str) -> None:
    path = tiny_checkpoint(tmp_path, arch="llama")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, field: value}))
    with pytest.raises(ConfigError, match=rf"config\.json: Expected .* at `{re.escape('$.' + at)}`"):
        EmbeddedEngine(EngineOptions(model_path=str(path)))


def test_null_is_as_good_as_no_field_where_the_field_is_not_needed(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, arch="llama")
    expected = read_spec(path)
    config = json.loads((path / "config.json").read_text())
    nulls = dict.fromkeys(("rope_scaling", "quantization_config", "layer_types", "partial_rotary_factor", "mlp_bias"))
    (path / "config.json").write_text(json.dumps({**config, **nulls}))
    assert read_spec(path) == expected


def test_generation_settings_and_the_index_of_shards_are_read_as_carefully(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, arch="llama")
    (path / "model.safetensors.index.json").write_text('{"weight_map": ["a"]}')
    with pytest.raises(ConfigError, match=r"index\.json: Expected `object \| null`, got `array` - at `\$\.weight_map`"):
        EmbeddedEngine(EngineOptions(model_path=str(path)))
    (path / "generation_config.json").write_text('{"eos_token_id": -1}')
    with pytest.raises(ConfigError, match=r"generation_config\.json: Expected .* at `\$\.eos_token_id`"):
        EmbeddedEngine(EngineOptions(model_path=str(path)))
