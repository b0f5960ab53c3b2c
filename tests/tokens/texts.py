"""Texts that are hard to encode, and small tokenizers that encode them."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tests.tokens.families import CORPUS, Family

ORDINARY = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)
_SUFFIXES, _ENDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {
    "qwen3": _SUFFIXES + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _ENDS,
    "qwen35": _SUFFIXES + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _ENDS,
    "llama3": _SUFFIXES + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _ENDS,
}
ODD = "\x0b\x1c\x85\xa0\u180e\u2028\u3000\u0301\u0662\u01c5\u1e9eſK½Ⅷ，。é漢字🙂\ufdd0\u200d\ufeff"
"""Characters whose classes are easily taken for others: spaces, marks, digits, case-folded letters, joiners."""
MIXED = st.text(st.sampled_from("aLlsSvre'19 \t\n\r.!{}_" + ODD), max_size=60) | st.text(max_size=40)


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    """Return a byte-level BPE that cuts as a model family does, with merges over spaces, line ends, digits and marks.

    Of another kind, it cuts nothing, and merges over all of them.
    """
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(SPLITS.get(kind, r"(?!)")), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    pairs = ["".join(pair) * 3 for pair in product("aLs'1 \t\n\r.!_" + ODD, repeat=2)]
    trainer = trainers.BpeTrainer(vocab_size=1500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator([CORPUS, *pairs, *["\na", "\nL", "\ns"] * 20], trainer)
    return tokenizer


def byte_tokenizer(*added: AddedToken, vocabulary: tuple[str, ...] = ()) -> Tokenizer:
    """Return a byte-level tokenizer without merges; `vocabulary` stands first in its own vocabulary."""
    letters = [*vocabulary, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer: Any = Tokenizer(models.BPE(vocab={text: at for at, text in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(list(added))
    return tokenizer


def hostile_text(family: Family) -> st.SearchStrategy[str]:
    """Return text made of control tokens, pieces of them and ordinary text."""
    controls = (*family.specials, *family.markers)
    pieces = [piece for text in controls[:16] for at in (1, len(text) // 2) for piece in (text[:at], text[at:])]
    return st.lists(st.one_of(st.sampled_from(controls), st.sampled_from(pieces), ORDINARY), max_size=6).map("".join)
