"""Words: encoding ASCII text piece by piece, each distinct piece once.

A byte-level BPE cuts a text into pieces and encodes each for itself. For ASCII text the cuts of the usual model families are
regular expressions that need no Unicode tables, and normalization (NFC and its kin) changes nothing; so the text is cut
here, a new piece goes to the BPE of `tokenizers`, and a known one costs a look-up. Of other text, the lines that are ASCII
are encoded so, and what stands between them by the whole tokenizer.

Invariant: `WordEncoder.encode` returns the ids of the whole tokenizer. A tokenizer whose cuts are not known has no encoder.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import chain, groupby

from tokenizers import Tokenizer
from tokenizers.models import Model

from agentrl.tokens.bytelevel import CHARACTERS

_MAX_PIECES = 16_384
"""Pieces that are remembered, then the memory starts anew: 4 to 6 MB where they are words, 10 MB at most."""
_MAX_LENGTH = 32
"""Characters of a remembered piece; longer ones rarely come twice."""

_LINE = re.compile(r"(?<=\n)(?=[ \t]*[!-~])")
"""Matches where every known pre-tokenizer cuts, whatever stands around, and nothing before depends on what comes after."""
_SPACE, _OTHER = r"[\t-\r ]", r"[^\t-\r A-Za-z0-9]"


def _pieces(digits: str) -> re.Pattern[str]:
    return re.compile(
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\nA-Za-z0-9]?[A-Za-z]+|{digits}| ?{_OTHER}+[\r\n]*"
        rf"|{_SPACE}*[\r\n]+|{_SPACE}+(?!{_OTHER}|[A-Za-z0-9])|{_SPACE}+"
    )


_SUFFIXES, _ENDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?", r"+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PIECES = {
    _SUFFIXES + r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]" + _ENDS: _pieces("[0-9]"),  # Qwen2 to Qwen3
    _SUFFIXES + r"[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]" + _ENDS: _pieces("[0-9]"),  # Qwen3.5
    _SUFFIXES + r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]" + _ENDS: _pieces("[0-9]{1,3}"),  # Llama 3
}
"""What matches the pieces of ASCII text, by the regular expression that `tokenizer.json` cuts by."""


class WordEncoder:
    """Encodes text as a byte-level BPE without added tokens does; a bounded memory, safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer, pieces: re.Pattern[str]) -> None:
        """Encode as `tokenizer` does; see `word_encoder`."""
        self._tokenizer = tokenizer
        self._pieces: Callable[[str], list[str]] = pieces.findall
        self._ids_of = _Memory(tokenizer.model).__getitem__

    def encode(self, text: str) -> list[int]:
        """Return the ids of text; half a character raises what it raises in the tokenizer."""
        if text.isascii():
            return list(chain.from_iterable(map(self._ids_of, self._pieces(text))))
        ids: list[int] = []
        for plain, lines in groupby(_LINE.split(text), str.isascii):
            part = "".join(lines)
            ids += self.encode(part) if plain else self._tokenizer.encode_batch_fast([part], add_special_tokens=False)[0].ids
        return ids


def word_encoder(data: Mapping[str, object], tokenizer: Tokenizer) -> WordEncoder | None:
    """Return an encoder for a tokenizer, or None if it is not known to encode a text as the pieces it cuts it into.

    Args:
        data: its `tokenizer.json`.
        tokenizer: the tokenizer, which neither truncates nor pads.
    """
    match data:
        case {
            "normalizer": None | {"type": "NFC" | "NFD" | "NFKC" | "NFKD"},  # they leave ASCII as it is
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [
                    {"type": "Split", "pattern": {"Regex": str(cut)}, "behavior": "Isolated", "invert": False},
                    {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
                ],
            },
            "model": {"type": "BPE", "dropout": None},
            "added_tokens": [],
        } if cut in _PIECES:
            return WordEncoder(tokenizer, _PIECES[cut])
        case _:
            return None


class _Memory(dict[str, tuple[int, ...]]):
    """The ids of pieces, found out when asked for."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self._model = model

    def __missing__(self, piece: str) -> tuple[int, ...]:
        ids = tuple([token.id for token in self._model.tokenize(piece.translate(CHARACTERS))])
        if len(piece) <= _MAX_LENGTH:
            if len(self) >= _MAX_PIECES:
                self.clear()
            self[piece] = ids
        return ids
