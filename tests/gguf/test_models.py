"""A model that is imported is the model that was written: weights and logits, for each architecture and type."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from agentrl.servers.embedded.spec import read_spec
from agentrl.weights.model_files import model_tensors
from agentrl_gguf.importing import ChosenType, check_file, record_of, write_model_directory
from agentrl_gguf.weights import write_weights
from tests.gguf.writing import add_key, interleaved, keys_of, logits_of, some_ids, tensors_of, tiny_model, write_gguf

LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def imported(path: Path, *, dtype: ChosenType = "auto", name: str = "imported") -> Path:
    checked, folder = check_file(path, dtype=dtype), path.parent / name
    write_model_directory(checked, record_of(checked), folder)
    return folder


def logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize(
    ("arch", "settings"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"head_dim": 16, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
        ("qwen2", {}),
        ("qwen2", {"tie_word_embeddings": False}),
        ("qwen3", {"head_dim": 16}),
        ("gemma3_text", {"num_hidden_layers": 7, "sliding_window": 16, "head_dim": 16, "query_pre_attn_scalar": 16}),
    ],
)
def test_logits_are_those_of_the_model(tmp_path: Path, arch: str, settings: dict[str, Any]) -> None:
    model = tiny_model(tmp_path / "hf", arch, **settings)
    rope = model.config.rope_parameters
    rope = rope.get("full_attention", rope)
    scaling = {f"{arch}.rope.scaling.type": "linear", f"{arch}.rope.scaling.factor": rope.get("factor")}
    path = write_gguf(tmp_path / "tiny.gguf", tmp_path / "hf", keys=scaling if rope["rope_type"] == "linear" else {})
    folder, ids = imported(path), some_ids(model.config.vocab_size)
    assert torch.equal(logits_of(folder, ids), logits(model, ids))
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
    if arch != "gemma3_text":
        assert read_spec(folder).rms_norm_eps == model.config.rms_norm_eps


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_weights_are_those_that_transformers_loads_from_the_file(tmp_path: Path, arch: str) -> None:
    tiny_model(tmp_path / "hf", arch, **({"head_dim": 128} if arch == "qwen3" else {}))  # it loads no other
    path = write_gguf(tmp_path / "tiny.gguf", tmp_path / "hf", kind="Q8_0")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32).state_dict()
    ours = load_file(imported(path) / "model.safetensors")
    assert theirs.keys() - ours.keys() <= {"lm_head.weight"}
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def test_rotations_of_llama_3_are_found_from_the_factors_of_the_file(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "hf", "llama", head_dim=64, rope_parameters=LLAMA_3)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, torch.device("cpu"))
    plain = 1 / 500000.0 ** (torch.arange(0, 64, 2) / 64)
    path = write_gguf(tmp_path / "tiny.gguf", tmp_path / "hf", tensors={"rope_freqs.weight": (plain / scaled).numpy()})
    folder, ids = imported(path), some_ids(model.config.vocab_size, 200)
    assert json.loads((folder / "config.json").read_text())["rope_parameters"] == LLAMA_3
    assert torch.equal(logits_of(folder, ids), logits(model, ids))


def test_rows_of_a_llamas_heads_are_put_back_in_closed_form(tmp_path: Path) -> None:
    rows = np.arange(2 * 8, dtype=np.float32)[:, None] * np.ones((1, 32), np.float32)
    assert interleaved(rows, 8)[:, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]
    tiny_model(tmp_path / "hf", "llama")
    path = write_gguf(tmp_path / "tiny.gguf", tmp_path / "hf", tensors={"blk.0.attn_k.weight": interleaved(rows, 8)})
    weights = load_file(imported(path) / "model.safetensors")
    assert weights["model.layers.0.self_attn.k_proj.weight"].numpy().tolist() == rows.tolist()


def test_every_type_is_what_the_package_gguf_makes_of_it(tmp_path: Path) -> None:
    """Random blocks of every type that it dequantizes, one matrix each."""
    kinds = [kind for kind in gguf.GGMLQuantizationType if _dequantizes(kind)]
    assert len(kinds) >= 26
    wide = {"hidden_size": 256, "intermediate_size": 256, "num_key_value_heads": 4, "head_dim": 64}
    tiny_model(tmp_path / "hf", "qwen3", num_hidden_layers=4, **wide)
    path, drawn = tmp_path / "tiny.gguf", np.random.default_rng(0)
    tensors = tensors_of(tmp_path / "hf")
    names = [name for name, values in tensors.items() if values.ndim == 2 and name.startswith("blk.")]
    blocks = {
        name: (kind, _random_blocks(kind, tensors[name].shape, drawn)) for kind, name in zip(kinds, names, strict=False)
    }
    assert len(blocks) == len(kinds)
    _write_blocks(path, tmp_path / "hf", blocks)
    weights = load_file(imported(path) / "model.safetensors")
    stored = {tensor.source: tensor.name for tensor in check_file(path).model.tensors}
    for name, (kind, raw) in blocks.items():
        expected = dequantize(_typed(raw, kind), kind).astype(np.float32)
        assert weights[stored[name]].numpy().tobytes() == expected.tobytes(), kind


def test_bfloat16_is_rounded_once_and_a_file_of_bfloat16_stays_one(tmp_path: Path) -> None:
    tiny_model(tmp_path / "hf", "qwen3")
    exact = load_file(imported(write_gguf(tmp_path / "q8.gguf", tmp_path / "hf", kind="Q8_0")) / "model.safetensors")
    rounded = load_file(imported(tmp_path / "q8.gguf", dtype="bfloat16", name="half") / "model.safetensors")
    for name, tensor in exact.items():
        assert torch.equal(tensor.bfloat16(), rounded[name])
    short = {name: _as_bfloat16(values) for name, values in tensors_of(tmp_path / "hf").items()}
    path = write_gguf(tmp_path / "bf16.gguf", tmp_path / "hf", kind="BF16", tensors=short)
    kept = load_file(imported(path, name="kept") / "model.safetensors")
    assert {tensor.dtype for tensor in kept.values()} == {torch.bfloat16}
    assert torch.equal(kept["model.norm.weight"].float(), torch.from_numpy(short["output_norm.weight"]))
    odd = {**short, "output_norm.weight": short["output_norm.weight"] + np.float32(1e-4)}
    path = write_gguf(tmp_path / "odd.gguf", tmp_path / "hf", kind="BF16", tensors=odd)
    assert check_file(path).dtype == "float32"


def test_a_large_model_is_written_in_pieces(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "hf", "qwen2")
    checked = check_file(write_gguf(tmp_path / "tiny.gguf", tmp_path / "hf"))
    folder, seen = imported(tmp_path / "tiny.gguf"), list[int]()
    (folder / "model.safetensors").unlink()
    write_weights(checked.header, checked.model, folder, "float32", on_progress=seen.append, piece_bytes=20_000)
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert sum(seen) == checked.model.num_parameters == model.num_parameters()
    assert model_tensors(folder).keys() == load_file(tmp_path / "hf" / "model.safetensors").keys()
    ids = some_ids(model.config.vocab_size)
    assert torch.equal(logits_of(folder, ids), logits(model, ids))


def _dequantizes(kind: gguf.GGMLQuantizationType) -> bool:
    try:
        size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        dequantize(_typed(np.zeros((1, 256 // size * num_bytes), np.uint8), kind), kind)
    except NotImplementedError:
        return False
    return True


def _random_blocks(kind: gguf.GGMLQuantizationType, shape: tuple[int, ...], drawn: np.random.Generator) -> np.ndarray:
    """Return bytes of a matrix, drawn until every value is finite."""
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = drawn.integers(0, 256, (shape[0] * shape[1] // size, num_bytes), np.uint8)
    with np.errstate(all="ignore"):
        while not (finite := np.isfinite(dequantize(_typed(blocks, kind), kind)).all(axis=1)).all():
            blocks[~finite] = drawn.integers(0, 256, (np.count_nonzero(~finite), num_bytes), np.uint8)
    return blocks.reshape(shape[0], -1)


def _typed(raw: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    form = {"F32": np.float32, "F16": np.float16}.get(kind.name)
    return raw if form is None else raw.view(form)


def _as_bfloat16(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(values).bfloat16().float().numpy()


def _write_blocks(path: Path, folder: Path, blocks: dict[str, tuple[gguf.GGMLQuantizationType, np.ndarray]]) -> None:
    """Write a file some of whose tensors are given as blocks of their types."""
    writer = gguf.GGUFWriter(path, "qwen3")
    for key, value in keys_of(folder).items():
        add_key(writer, key, value)
    for name, values in tensors_of(folder).items():
        if name in blocks:
            kind, raw = blocks[name]
            writer.add_tensor(name, raw, raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
