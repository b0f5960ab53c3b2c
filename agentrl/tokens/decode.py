"""Decoding a streamed output piece by piece.

Invariant: what `push` and `flush` return, joined, is the decoded text of all ids pushed, and no piece ends inside a
character, nor where a later id may still change it.
"""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.tokens.encode import TokenCodec
from agentrl.types import Int32Array


class IncrementalDecoder:
    """Turns a stream of ids into text, holding back bytes that are not yet a whole character.

    Tokenizers with byte fallback decode a run of byte tokens (`<0xE2>`) as a whole: one wrong byte makes each byte of the
    run a U+FFFD. Their bytes are held back until the run is over.

    Example: three `push` calls with the three bytes of "€" return "", "" and "€".
    """

    __slots__ = ("_codec", "_ids", "_shown", "_start")

    def __init__(self, codec: TokenCodec) -> None:
        self._codec = codec
        self._ids: list[int] = []
        self._start = 0
        self._shown = 0

    def push(self, ids: Sequence[int] | Int32Array) -> str:
        """Return the text that `ids` complete; it may be empty."""
        # Ids without a token are no part of the text, so a run goes on across them.
        self._ids += [number for number in map(int, ids) if self._codec.token_text(number) is not None]
        in_run = self._ids and str(self._codec.token_text(self._ids[-1])).startswith("<0x")
        return "" if in_run else self._advance(final=False)

    def flush(self) -> str:
        """Return what was held back; an unfinished character becomes U+FFFD."""
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        known = self._codec.decode(self._ids[self._start : self._shown], skip_special=False)
        text = self._codec.decode(self._ids[self._start :], skip_special=False)
        if len(text) <= len(known) or (text.endswith("�") and not final):
            return ""
        self._start, self._shown = self._shown, len(self._ids)
        return text[len(known) :]
