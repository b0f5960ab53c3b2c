"""Byte-level vocabularies: the bytes that tokens stand for.

Invariant: `ByteDecoder.decode` returns what `tokenizers` returns for a tokenizer whose decoder is `ByteLevel`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
