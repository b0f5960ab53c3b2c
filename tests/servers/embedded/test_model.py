"""The embedded forward pass against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from agentrl.errors import ConfigError
from agentrl.servers.embedded.batching import Chunk, build_batch
from agentrl.servers.embedded.cache import KVCache, plan_rows
from agentrl.servers.embedded.model import Transformer
from agentrl.servers.embedded.spec import read_spec
from agentrl.servers.embedded.weights import load_weights
from agentrl.weights.tensors import tensor_checksum
from tests.support.embedded import ReferenceModel
from tests.support.tiny import Architecture, tiny_checkpoint

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": None,
}


def save_model(path: Path, arch: str, **fields: Any) -> Path:  # noqa: ANN401 - config fields
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(arch, **{**SMALL, **fields}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.normal_(1.0, 0.2)
    model.save_pretrained(path)
    return path


def our_logits(path: Path, ids: list[int], *, chunks: list[int], decode: int) -> torch.Tensor:
    """Return the logits of all positions, computed in prefill chunks and then token by token, in cache row 3 of 5."""
    spec = read_spec(path)
    model = Transformer(spec, load_weights(path, spec, device=CPU, dtype=torch.float32), max_context=2048)
    cache = KVCache(spec, num_rows=5, max_context=2048, device=CPU, dtype=torch.float32)
    cache.tokens[3, : len(ids)] = ids
    none, rows = np.zeros(0, np.int64), np.array([3])
    out: list[torch.Tensor] = []
    at = 0
    with torch.inference_mode():
        for size in chunks:
            batch = build_batch(cache, none, none, [Chunk(3, at, at + size)], num_kv_heads=spec.num_kv_heads)
            out.append(model.logits(model.hidden(batch, cache.data)))
            at += size
            cache.lengths[3] = at
        for token in ids[at : at + decode]:
            batch = build_batch(cache, rows, np.array([token]), [], num_kv_heads=spec.num_kv_heads)
            out.append(model.logits(model.hidden(batch, cache.data)))
            cache.lengths[3] += 1
    return torch.cat(out)


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2_untied": ("qwen2", {"tie_word_embeddings": False}),
    "qwen3": ("qwen3", {"head_dim": 20, "tie_word_embeddings": True}),
    "qwen3_bias": ("qwen3", {"head_dim": 16, "attention_bias": True}),
    "llama": ("llama", {"tie_word_embeddings": False}),
    "llama_bias": ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "llama3_rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            }
        },
    ),
    "linear_rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}),
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    arch, fields = MODELS[name]
    path = save_model(tmp_path, arch, **fields)
    ids = np.random.default_rng(0).integers(0, SMALL["vocab_size"], 300).tolist()
    ours = our_logits(path, ids, chunks=[200, 7, 80], decode=13)
    theirs = ReferenceModel(path).logits(ids)
    assert ours.shape == theirs.shape
    assert float((ours - theirs).abs().max()) < 1e-5 * max(1.0, float(theirs.abs().max()))


def test_rope_settings_are_found_in_both_places_config_json_has_kept_them(tmp_path: Path) -> None:
    path = save_model(tmp_path, "llama", rope_parameters={"rope_type": "default", "rope_theta": 77.0})
    file = path / "config.json"
    config = json.loads(file.read_text())
    assert read_spec(path).rope_theta == 77.0
    del config["rope_parameters"]
    config["rope_theta"] = 78.0
    config["rope_scaling"] = {"type": "linear", "factor": 3.0}
    file.write_text(json.dumps(config))
    spec = read_spec(path)
    assert (spec.rope_theta, spec.rope.kind, spec.rope.factor) == (78.0, "linear", 3.0)


def test_a_sharded_checkpoint_gives_the_same_weights_as_a_single_file(tmp_path: Path) -> None:
    whole = save_model(tmp_path / "whole", "qwen3", head_dim=16)
    AutoModelForCausalLM.from_pretrained(whole).save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    assert (tmp_path / "shards" / "model.safetensors.index.json").exists()
    spec = read_spec(whole)
    one, other = (load_weights(tmp_path / name, spec, device=CPU, dtype=torch.float32) for name in ("whole", "shards"))
    assert one.checksums() == other.checksums()


@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "llama"])
def test_checksums_are_those_of_the_tensors_in_the_file(arch: Architecture, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = tiny_checkpoint(tmp_path, arch=arch)
    tensors = load_file(path / "model.safetensors")
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, path / "model.safetensors")
    tensors = load_file(path / "model.safetensors")
    expected = {
        name: tensor_checksum(name, "BF16", list(tensor.shape), tensor.view(torch.uint8).numpy().tobytes())
        for name, tensor in tensors.items()
    }
    spec = read_spec(path)
    assert load_weights(path, spec, device=CPU, dtype=torch.float32).checksums() == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architecture MambaForCausalLM is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantized weights"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "rope type 'yarn' is not supported"),
        ({"hidden_size": None}, "has no field 'hidden_size'"),
    ],
)
def test_a_config_the_engine_cannot_compute_is_refused_by_name(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = save_model(tmp_path, "qwen3", head_dim=16)
    config = {**json.loads((path / "config.json").read_text()), **change}
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    with pytest.raises(ConfigError, match=message):
        read_spec(path)


def test_missing_extra_misshapen_and_broken_tensors_are_refused_by_name(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = save_model(tmp_path, "qwen2")
    spec = read_spec(path)
    file = path / "model.safetensors"
    good = load_file(file)
    name = "model.layers.1.self_attn.k_proj.bias"

    def refused(tensors: dict[str, torch.Tensor], message: str) -> None:
        save_file(tensors, file)
        with pytest.raises(ConfigError, match=message):
            load_weights(path, spec, device=CPU, dtype=torch.float32)

    refused({k: v for k, v in good.items() if k != name}, f"has no tensor {name}")
    refused({**good, "extra": torch.zeros(1)}, r"1 tensors Qwen2ForCausalLM does not have: \['extra'\]")
    refused({**good, name: good[name][:-1].clone()}, "must have shape")
    refused({**good, name: good[name] * float("nan")}, "not finite")
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(ConfigError, match="not a complete safetensors file"):
        load_weights(path, spec, device=CPU, dtype=torch.float32)
    file.unlink()
    with pytest.raises(ConfigError, match="no weights at"):
        load_weights(path, spec, device=CPU, dtype=torch.float32)


def test_a_context_that_fits_no_memory_is_refused(tmp_path: Path) -> None:
    spec = read_spec(save_model(tmp_path, "qwen2"))
    with pytest.raises(ConfigError, match="lower max_context_tokens"):
        plan_rows(spec, max_running=4, max_context=1 << 40, device=CPU, dtype=torch.float32, memory_fraction=0.1)
