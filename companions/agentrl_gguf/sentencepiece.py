"""Tokenizers of the kind `llama`, which SentencePiece trained: a BPE over characters, with a token for each byte.

A file has a score for each piece and no merges. They are the pairs of pieces that make a piece, the best piece first; for
Gemma 3 these are the merges of the published tokenizer.json, in its order but for two that never meet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from agentrl_gguf.header import GgufHeader
from agentrl_gguf.pieces import BYTE, OWN, UNKNOWN

_SPACE: Final = "\N{LOWER ONE EIGHTH BLOCK}"
"""Stands for a space in pieces."""
_REPLACE: Final[Mapping[str, Any]] = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}


def piece_texts(tokens: Sequence[str], kinds: Sequence[int]) -> list[str]:
    """Return tokens as tokenizer.json has them: converters write the spaces in tokens of users as spaces."""
    return [text.replace(" ", _SPACE) if kind == OWN else text for text, kind in zip(tokens, kinds, strict=True)]


def piece_tokenizer(header: GgufHeader, tokens: Sequence[str], kinds: Sequence[int]) -> dict[str, Any]:
    """Return normalizer, pre-tokenizer, decoder and model of tokenizer.json.

    Raises:
        ConfigError: scores or bytes are missing, or the file asks for a step that is not known.
    """
    scores = header.numbers("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise header.error(
            "tokenizer.ggml.scores has no score for each token, which a llama tokenizer needs; convert it again"
        )
    if header.get("tokenizer.ggml.remove_extra_whitespaces", bool):
        raise header.error("tokenizer.ggml.remove_extra_whitespaces is true; use the Hugging Face directory of the model")
    unknown = header.get("tokenizer.ggml.unknown_token_id", int)
    if unknown is None and UNKNOWN in kinds:
        unknown = kinds.index(UNKNOWN)
    if kinds.count(BYTE) != 256 or unknown is None or not 0 <= unknown < len(tokens):
        raise header.error("a llama tokenizer needs 256 tokens of bytes and one for the unknown; convert the file again")
    marks_start = header.get("tokenizer.ggml.add_space_prefix", bool) is not False
    prepend = {"type": "Prepend", "prepend": _SPACE}
    steps = [{"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    return {
        "normalizer": {"type": "Sequence", "normalizers": [prepend, _REPLACE]} if marks_start else _REPLACE,
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [*steps, strip] if marks_start else steps},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": tokens[unknown],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {text: number for number, text in enumerate(tokens)},
            "merges": _merges_by_score(tokens, scores, kinds),
        },
    }


def _merges_by_score(tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int]) -> list[list[str]]:
    """Return the pairs that make a piece: those of users first, then by score; of equal ones the longest left part first."""
    ids = {text: number for number, text in enumerate(tokens)}
    found: list[tuple[float, int, int, str, str]] = []
    for text, score, kind in zip(tokens, scores, kinds, strict=True):
        parts = ((text[:at], text[at:]) for at in range(1, len(text)))
        pairs = [(left, right) for left, right in parts if left in ids and right in ids]
        rank = float("inf") if kind == OWN else score
        found += [(rank, len(left), len(right), left, right) for left, right in pairs]
    found.sort(key=lambda each: each[:3], reverse=True)
    return [[left, right] for *_, left, right in found]
