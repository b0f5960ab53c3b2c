"""Local stand-ins for published model families: a tokenizer trained on the spot, and the family's chat template."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEMPLATES = Path(__file__).parent / "templates"
_QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = (
    "What is the sum of twelve and thirty? Use the tool to add the numbers, then tell me the result.\n"
    'You are a helpful assistant. {"name": "calc", "arguments": {"a": 12, "op": "+", "b": 30}} user system assistant tool\n'
    "def solve(values):\n    return [value < 3 and value > 1 for value in values]\n<b>bold</b> [1, 2, 3] the answer is 42.\n"
) * 8


@dataclass(frozen=True)
class Family:
    name: str
    specials: tuple[str, ...]
    markers: tuple[str, ...]
    """Added tokens that are not registered as special."""
    end: str
    named: dict[str, str]
    spm: bool = False
    """Built like a converted SentencePiece model."""
    tools: bool = True
    eos_config: tuple[str, ...] = ()


_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_HERMES = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
_LLAMA = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<|eom_id|>", "<|python_tag|>", *(f"<|reserved_special_token_{at}|>" for at in range(40)),
)  # fmt: skip
_LLAMA_ENDS = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")
_LLAMA_NAMED = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
FAMILIES = {
    family.name: family
    for family in (
        Family("qwen25", _CHATML, _HERMES[:2], "<|im_end|>", {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}),
        Family("qwen3", _CHATML, _HERMES, "<|im_end|>", {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}),
        Family("llama31", _LLAMA, (), "<|eot_id|>", _LLAMA_NAMED, eos_config=_LLAMA_ENDS),
        Family("llama32", _LLAMA, (), "<|eot_id|>", _LLAMA_NAMED, eos_config=_LLAMA_ENDS),
        Family(
            "mistral",
            (
                "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
                "[TOOL_RESULTS]", "[/TOOL_RESULTS]", *(f"[control_{at}]" for at in range(40)),
            ),
            (),
            "</s>",
            {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
            spm=True,
        ),
        Family(
            "deepseek_r1",
            ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
            (
                "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
                "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>",
                "<｜tool▁outputs▁end｜>",
                "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>",
            ),
            "<｜end▁of▁sentence｜>",
            {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"},
            tools=False,
        ),
    )
}  # fmt: skip


def train_tokenizer(family: Family) -> Tokenizer:
    """Return a byte-level BPE with the family's added tokens; for `spm`, one like a converted SentencePiece model."""
    if family.spm:
        return _spm_tokenizer(family)
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(_QWEN_SPLIT), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator([CORPUS], trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in family.specials])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in family.markers])
    return tokenizer


def _spm_tokenizer(family: Family) -> Tokenizer:
    """Control tokens stand first in the model's own vocabulary, spaces are "▁", unknown characters fall back to bytes."""
    names = [*family.specials, *(f"<0x{byte:02X}>" for byte in range(256))]
    trained: Any = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="never", split=False)
    trained.train_from_iterator(CORPUS.split("\n"), trainers.BpeTrainer(vocab_size=200, show_progress=False))
    data = json.loads(trained.to_str())
    pieces = sorted(data["model"]["vocab"], key=data["model"]["vocab"].get)
    vocabulary = {text: at for at, text in enumerate([*names, *pieces])}
    merges = [tuple(merge) for merge in data["model"]["merges"]]
    tokenizer: Any = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in family.specials])
    return tokenizer


def write_family(folder: Path, family: Family) -> Path:
    """Write the tokenizer side of a model directory."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(family)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **family.named}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text((TEMPLATES / f"{family.name}.jinja").read_text())
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    ids = [tokenizer.token_to_id(text) for text in family.eos_config or (family.end,)]
    (folder / "config.json").write_text(json.dumps({"vocab_size": size + 7, "max_position_embeddings": 4096}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids if len(ids) > 1 else ids[0]}))
    return folder
