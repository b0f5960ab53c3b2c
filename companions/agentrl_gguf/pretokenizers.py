r"""Pre-tokenizers by the name in `tokenizer.ggml.pre`: normalizer, cuts and lookup as in the original tokenizer.json.

A file names its pre-tokenizer and does not hold it. A wrong one changes the ids of some texts only, so it would go unseen:
ByteLevel alone, which transformers writes for `smollm`, encodes one line of 2,500 in another way.

Invariant: a name that is not in the table is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

Step: TypeAlias = Mapping[str, Any]
"""A normalizer or pre-tokenizer as tokenizer.json writes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """What a byte-level BPE does before it merges."""

    steps: tuple[Step, ...]
    normalizer: Step | None = None
    ignore_merges: bool = False
    """Whether a piece that is a token is taken whole, whatever the merges say."""
    adds_bos: bool = False
    """Whether a text begins with the token of a beginning, where the file does not say."""


def _byte_level(*, use_regex: bool) -> Step:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(regex: str) -> Step:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


_NFC: Final[Step] = {"type": "NFC"}
_DIGITS: Final[Step] = {"type": "Digits", "individual_digits": True}
_SUFFIXES: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?"
_ENDS: Final = r"+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA_3: Final = _SUFFIXES + r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]" + _ENDS
_QWEN_2: Final = _SUFFIXES + r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]" + _ENDS
_QWEN_35: Final = _SUFFIXES + r"[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]" + _ENDS

_GPT_2: Final = PreTokenizer(steps=(_byte_level(use_regex=True),))
_DIGIT_BY_DIGIT: Final = PreTokenizer(steps=(_DIGITS, _byte_level(use_regex=True)))
_LLAMA_BPE: Final = PreTokenizer(steps=(_split(_LLAMA_3), _byte_level(use_regex=False)), ignore_merges=True, adds_bos=True)

PRE_TOKENIZERS: Final[Mapping[str, PreTokenizer]] = {
    "gpt-2": _GPT_2,
    "llama-bpe": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "qwen2": PreTokenizer(steps=(_split(_QWEN_2), _byte_level(use_regex=False)), normalizer=_NFC),
    "qwen35": PreTokenizer(steps=(_split(_QWEN_35), _byte_level(use_regex=False)), normalizer=_NFC),
    "refact": _DIGIT_BY_DIGIT,
    "smollm": _DIGIT_BY_DIGIT,
    "starcoder": _DIGIT_BY_DIGIT,
}
"""By the names that llama.cpp gives them."""
