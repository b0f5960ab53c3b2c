"""GGUF files of tiny random models: what a converter makes of a Hugging Face directory, written by the package gguf."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import quantize
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.support.tiny import build_tokenizer

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
GEMMA_3_NAMES = {
    **NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
"""Names in a file by names, or their parts, in a model."""


def tiny_model(folder: Path, arch: str, *, seed: int = 0, **settings: object) -> PreTrainedModel:
    """Write a whole random model with its tokenizer; norms and biases are random too."""
    vocabulary = build_tokenizer(folder)
    shape: dict[str, object] = {
        "vocab_size": vocabulary,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "tie_word_embeddings": arch != "llama",
        "rms_norm_eps": 1e-6,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    config = AutoConfig.for_model(arch, **{**shape, **settings})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.ndim == 1))
    model.save_pretrained(folder)
    return model.eval()


def keys_of(folder: Path) -> dict[str, Any]:
    """Return the keys that a converter writes for a Hugging Face directory."""
    config = json.loads((folder / "config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    arch, rope = config["model_type"].removesuffix("_text"), config["rope_parameters"]
    windows = {f"{arch}.attention.sliding_window": config.get("sliding_window")} if arch == "gemma3" else {}
    rope = rope.get("full_attention", rope)
    added = {token["content"]: token for token in tokenizer["added_tokens"]}
    ids = {**tokenizer["model"]["vocab"], **{text: token["id"] for text, token in added.items()}}
    tokens = sorted(ids, key=lambda text: ids[text])
    pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in tokenizer["model"]["merges"]]
    return {
        "general.name": "tiny",
        **windows,
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": config["num_attention_heads"],
        f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch}.attention.key_length": config["head_dim"],
        f"{arch}.attention.value_length": config["head_dim"],
        f"{arch}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{arch}.rope.freq_base": float(rope["rope_theta"]),
        f"{arch}.rope.dimension_count": config["head_dim"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1 if text not in added else 3 if added[text]["special"] else 4 for text in tokens],
        "tokenizer.ggml.merges": pairs,
        "tokenizer.ggml.eos_token_id": ids["<|im_end|>"],
        "tokenizer.ggml.padding_token_id": ids["<|endoftext|>"],
        "tokenizer.chat_template": (folder / "chat_template.jinja").read_text(),
    }


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a Hugging Face directory by their names in a file, rows of a Llama's heads reordered."""
    config = json.loads((folder / "config.json").read_text())
    found: dict[str, np.ndarray] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        values = tensor.numpy()
        if config["model_type"] == "llama" and (".q_proj." in name or ".k_proj." in name):
            values = interleaved(values, config["head_dim"])
        is_gemma = config["model_type"] == "gemma3_text"
        if is_gemma and name.endswith("norm.weight"):
            values = values + np.float32(1)
        found[_name_in_file(name, GEMMA_3_NAMES if is_gemma else NAMES)] = values
    return found


def interleaved(values: np.ndarray, head_dim: int) -> np.ndarray:
    """Return rows in which llama.cpp's pairs are neighbours: row 2i of a head was row i, row 2i + 1 was i + head_dim / 2."""
    order = [row for i in range(head_dim // 2) for row in (i, i + head_dim // 2)]
    rows = [head * head_dim + row for head in range(len(values) // head_dim) for row in order]
    return values[rows]


def write_gguf(
    path: Path,
    folder: Path,
    *,
    kind: str = "F32",
    arch: str | None = None,
    keys: Mapping[str, object] | None = None,
    tensors: Mapping[str, np.ndarray | None] | None = None,
) -> Path:
    """Write the model in `folder` as a file; None in `keys` and `tensors` leaves one out.

    Args:
        path: the file.
        folder: the Hugging Face directory.
        kind: type of the matrices in ggml.
        arch: name of the architecture; None: that of the model.
        keys: keys in place of, or beside, those of the model.
        tensors: the same of tensors, float32.
    """
    name = json.loads((folder / "config.json").read_text())["model_type"].removesuffix("_text")
    writer = gguf.GGUFWriter(path, arch or name)
    for key, value in {**keys_of(folder), **(keys or {})}.items():
        add_key(writer, key, value)
    for tensor, values in {**tensors_of(folder), **(tensors or {})}.items():
        if values is None:
            continue
        if values.ndim == 1 or kind == "F32":
            writer.add_tensor(tensor, np.ascontiguousarray(values, np.float32))
        else:
            form = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(tensor, quantize(np.ascontiguousarray(values, np.float32), form), raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def huge_gguf(path: Path, folder: Path) -> Path:
    """Write the header of a Llama of 9e12 weights, and a hole in place of them."""
    hidden, block = 2**20, gguf.GGMLQuantizationType.Q4_0
    writer = gguf.GGUFWriter(path, "llama")
    changes = {"embedding_length": hidden, "attention.head_count_kv": 4}
    changes |= dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"), hidden // 4)
    for key, value in {**keys_of(folder), **{f"llama.{key}": value for key, value in changes.items()}}.items():
        add_key(writer, key, value)
    size = 0
    for name, values in tensors_of(folder).items():
        shape = [hidden if length in (32, 16) else length for length in values.shape]
        num_bytes = int(np.prod(shape)) * 4 if values.ndim == 1 else int(np.prod(shape)) // 32 * 18
        kind = None if values.ndim == 1 else block
        writer.add_tensor_info(name, shape, np.dtype(np.float32), num_bytes, raw_dtype=kind)
        size += -(-num_bytes // 32) * 32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(path, path.stat().st_size + 64 + size)
    return path


def logits_of(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits of the model in a directory, float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    with torch.no_grad():
        return model.eval()(ids).logits


def some_ids(vocabulary: int, length: int = 48) -> torch.Tensor:
    """Return ids of two sequences."""
    return torch.randint(0, vocabulary, (2, length), generator=torch.Generator().manual_seed(1))


def _name_in_file(name: str, names: Mapping[str, str]) -> str:
    if name in names:
        return names[name]
    _, _, layer, *middle, last = name.split(".")
    return f"blk.{layer}.{names['.'.join(middle)]}.{last}"


def add_key(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    """Add a key in the type of its value; None adds nothing."""
    match value:
        case None:
            pass
        case bool():
            writer.add_bool(key, value)
        case str():
            writer.add_string(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case list():
            writer.add_array(key, value)
        case _:
            raise TypeError(key)
