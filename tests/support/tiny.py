"""Tiny random checkpoints in HF format, made on the spot: a byte-level tokenizer with ChatML markup and a model around it.

Invariant: the same arguments give the same bytes; the vocabulary of the model is exactly that of its tokenizer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from agentrl.rollout.scripted_policy import CHAT_TEMPLATE, MARKERS, SPECIALS

Architecture = Literal["qwen2", "qwen3", "llama"]

_MERGE_CORPUS = (
    "The answer is forty two. What is the sum of these numbers? Use the tool, then tell me the result.\n"
    'user assistant system tool {"name": "calc", "arguments": {"a": 12, "op": "+", "b": 30}}\n'
) * 4


def build_tokenizer(path: str | Path, *, vocab_size: int = 384, chat_template: str = CHAT_TEMPLATE) -> int:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja to `path`; return the vocabulary size."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue] - typed read-only
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue] - typed read-only
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIALS) - len(MARKERS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_MERGE_CORPUS], trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKERS])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
    (folder / "chat_template.jinja").write_text(chat_template)
    return tokenizer.get_vocab_size(with_added_tokens=True)


def build_model(
    path: str | Path,
    *,
    arch: Architecture = "qwen3",
    vocab_size: int,
    eos_id: int,
    seed: int = 0,
    spread: float = 0.3,
) -> None:
    """Write config.json, generation_config.json and model.safetensors of a random model to `path`.

    `spread` is the standard deviation of its weights: more of it makes surer of its tokens, and of rounding errors too.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        arch,
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=4096,
        tie_word_embeddings=arch != "llama",
        eos_token_id=eos_id,
        bos_token_id=None,
        pad_token_id=None,
        initializer_range=spread,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(path)


def tiny_checkpoint(path: str | Path, *, arch: Architecture = "qwen3", seed: int = 0, spread: float = 0.3) -> Path:
    """Write a whole random checkpoint (model and tokenizer) to `path` and return it."""
    from tokenizers import Tokenizer

    folder = Path(path)
    vocab_size = build_tokenizer(folder)
    eos_id = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id("<|im_end|>")
    assert eos_id is not None
    build_model(folder, arch=arch, vocab_size=vocab_size, eos_id=eos_id, seed=seed, spread=spread)
    return folder
