"""Words: encoding ASCII text piece by piece, each distinct piece once.

A byte-level BPE cuts a text into pieces and encodes each for itself. For ASCII text the cuts of the usual model families are
regular expressions that need no Unicode tables, and normalization (NFC and its kin) changes nothing; so the text is cut
here, a new piece goes to the BPE of `tokenizers`, and a known one costs a look-up. Of other text, the lines that are ASCII
are encoded so, and what stands between them by the whole tokenizer.

Invariant: `WordEncoder.encode` returns the ids of the whole tokenizer. A tokenizer whose cuts are not known has no encoder.

Byte-level vocabularies: the bytes that tokens stand for.

Invariant: `ByteDecoder.decode` returns what `tokenizers` returns for a tokenizer whose decoder is `ByteLevel`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, groupby

from tokenizers import Tokenizer
from tokenizers.models import Model

CHARACTERS = {byte: 256 + at for at, byte in enumerate([*range(33), *range(127, 161), 173])}
"""The characters that byte-level vocabularies write for the bytes they do not write as themselves."""
_BYTE_OF = {chr(CHARACTERS.get(byte, byte)): byte for byte in range(256)}
_MAX_TOKENS = 16_384
"""Tokens that are remembered, then the memory starts anew: 2 MB."""


class ByteDecoder(dict[int, bytes]):
    """The bytes of tokens, found out when asked for; safe to share between threads."""

    def __init__(self, text_of: Callable[[int], str | None]) -> None:
        """Decode by the texts of tokens, None where there is no token."""
        super().__init__()
        self._text_of = text_of
        self._known: Callable[[int], bytes] = self.__getitem__

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; invalid UTF-8 becomes U+FFFD."""
        return b"".join(map(self._known, ids)).decode("utf-8", "replace")

    def __missing__(self, number: int) -> bytes:
        text = self._text_of(number) or ""
        if len(self) >= _MAX_TOKENS:
            self.clear()
        found = self[number] = bytes(map(_BYTE_OF.__getitem__, text)) if _BYTE_OF.keys() >= set(text) else text.encode()
        return found


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
