"""A model that is read part by part has the weights that transformers loads, whatever form its files have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from agentrl.errors import ConfigError
from agentrl.trainer.model import PolicyModel
from agentrl.trainer.parallel.ranks import Ranks
from agentrl.trainer.parallel.shape import MeshShape
from agentrl.trainer.parallel.shard import whole
from agentrl.weights.model_files import model_tensors
from tests.support.ranks import on_ranks
from tests.support.tiny import tiny_checkpoint
from tests.trainer.helpers import load_plain

_CPU = torch.device("cpu")
_IDS = np.arange(1, 12, dtype=np.int32)
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def weights_of(ranks: Ranks, path: Path) -> dict[str, bytes]:
    """Return the whole weights and buffers as bytes, and log-probs of a few tokens."""
    model = PolicyModel(path, device=_CPU, ranks=ranks)
    with torch.no_grad():
        logprobs = model.logprobs(model.microbatch([_IDS], [np.arange(len(_IDS)) > 0]))
    tensors = {**model.parameters, **dict(model.module.named_buffers()), "logprobs": logprobs}
    return {name: whole(tensor.detach()).numpy().tobytes() for name, tensor in tensors.items()}


def _loaded_by_transformers(path: Path) -> dict[str, bytes]:
    plain = load_plain(path)
    ids = torch.from_numpy(_IDS.astype(np.int64))
    with torch.no_grad():
        logits = plain(input_ids=ids[None], use_cache=False).logits[0, :-1]
    logprobs = -torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")
    tensors = {**dict(plain.named_parameters()), **dict(plain.named_buffers()), "logprobs": logprobs}
    return {name: tensor.detach().numpy().tobytes() for name, tensor in tensors.items()}


def _random_model(path: Path, architecture: str, **more: Any) -> Path:  # noqa: ANN401 - fields of a config
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = AutoConfig.for_model(architecture, vocab_size=101, **sizes, **heads, **more)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def _tied(path: Path) -> Path:
    return tiny_checkpoint(path)


def _untied(path: Path) -> Path:
    return tiny_checkpoint(path, arch="llama")


def _in_bfloat16(path: Path) -> Path:
    model = load_plain(tiny_checkpoint(path, arch="qwen2"), torch.bfloat16)
    model.save_pretrained(path)
    return path


def _in_several_files(path: Path) -> Path:
    model = load_plain(tiny_checkpoint(path))
    (path / "model.safetensors").unlink()
    model.save_pretrained(path, max_shard_size="40KB")
    assert len(list(path.glob("model-*.safetensors"))) > 2
    return path


def _experts(path: Path) -> Path:
    return _random_model(path, "qwen3_moe", **_EXPERTS)


def _renamed_by_transformers(path: Path) -> Path:
    """GPT-NeoX, whose head has another name in files."""
    return _random_model(path, "gpt_neox", rotary_pct=1.0)


def _scaled_rotations(path: Path) -> Path:
    scaled = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    more = {"original_max_position_embeddings": 64, "rope_theta": 1e4}
    return _random_model(path, "llama", rope_parameters=scaled | more)


def _of_a_base_model(path: Path) -> Path:
    """Write names without the prefix `model.`, as the file of a model without a head has them."""
    tensors = load_file(tiny_checkpoint(path) / "model.safetensors")
    renamed = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(renamed, path / "model.safetensors", metadata={"format": "pt"})
    return path


def _with_a_head_beside_the_embeddings(path: Path, difference: float) -> Path:
    tensors = load_file(tiny_checkpoint(path) / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + difference
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def _with_a_redundant_head(path: Path) -> Path:
    return _with_a_head_beside_the_embeddings(path, 0.0)


def _with_a_head_of_its_own(path: Path) -> Path:
    return _with_a_head_beside_the_embeddings(path, 0.5)


_FORMS = [
    _tied,
    _untied,
    _in_bfloat16,
    _in_several_files,
    _experts,
    _renamed_by_transformers,
    _scaled_rotations,
    _of_a_base_model,
    _with_a_redundant_head,
    _with_a_head_of_its_own,
]


@pytest.mark.starts
@pytest.mark.parametrize("form", _FORMS, ids=lambda form: form.__name__.strip("_"))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_one_process_has_every_bit_of_what_transformers_loads(tmp_path: Path, form: Any) -> None:  # noqa: ANN401 - a function above
    path = form(tmp_path / "model")
    assert weights_of(Ranks(), path) == _loaded_by_transformers(path)


@pytest.mark.starts
@pytest.mark.parametrize(
    ("mesh", "forms"),
    [
        (MeshShape(dp=2), (_in_bfloat16, _experts, _renamed_by_transformers)),
        pytest.param(MeshShape(dp=4), _FORMS, marks=pytest.mark.long),
        pytest.param(
            MeshShape(dp=2, tp=2), (_tied, _untied, _in_several_files, _with_a_head_of_its_own), marks=pytest.mark.long
        ),
    ],
    ids=["dp2", "dp4", "dp2-tp2"],
)
def test_several_processes_hold_the_same_weights_together(tmp_path: Path, mesh: MeshShape, forms: Any) -> None:  # noqa: ANN401 - functions above
    for form in forms:
        path = form(tmp_path / form.__name__)
        alone = weights_of(Ranks(), path)
        del alone["logprobs"]  # its sums have another order
        for found in on_ranks(mesh, weights_of, path):
            assert {name: found[name] for name in alone} == alone


def test_a_file_that_the_index_names_and_that_is_missing_is_a_config_error(tmp_path: Path) -> None:
    path = _in_several_files(tmp_path)
    victim = sorted(path.glob("model-*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(ConfigError, match=rf"cannot be loaded as a causal language model: .*{victim.name}"):
        PolicyModel(path, device=_CPU)


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({"model.norm.weight": "../other.safetensors"}, r"names files outside the directory: \['\.\./other\.safetensors'\]"),
        (
            {"model.absent": "model-00001-of-00003.safetensors"},
            r"promises tensors that its files do not hold: \['model\.absent'\]",
        ),
    ],
)
def test_an_index_that_contradicts_the_files_is_a_config_error(tmp_path: Path, places: dict[str, str], message: str) -> None:
    path = _in_several_files(tmp_path)
    first = sorted(path.glob("model-*.safetensors"))[0]
    first.rename(path / "model-00001-of-00003.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(ConfigError, match=message):
        PolicyModel(path, device=_CPU)


def test_quantized_weights_are_a_config_error(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ConfigError, match="the weights are quantized"):
        PolicyModel(path, device=_CPU)


def test_weights_stored_as_integers_are_refused_with_the_types_that_can_be_trained(tmp_path: Path) -> None:
    path = _tied(tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"model\.norm\.weight is stored as I8; training needs one of F32, BF16, F16, F64"):
        PolicyModel(path, device=_CPU)


def test_a_refused_checkpoint_leaves_the_names_of_the_export_as_they_were(tmp_path: Path) -> None:
    model = PolicyModel(_renamed_by_transformers(tmp_path / "own"), device=_CPU)
    before = sorted(model.export())
    with pytest.raises(ConfigError, match="the weights do not fit"):
        model.read(model_tensors(_untied(tmp_path / "foreign")), tmp_path)
    assert sorted(model.export()) == before
    assert "embed_out.weight" in before
