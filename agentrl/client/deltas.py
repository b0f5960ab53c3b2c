"""Splits a streamed output into reasoning and content while it grows.

Invariant: the text handed out so far is always a prefix of what the parsed message will hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum, auto

from agentrl.client.backend import Delta
from agentrl.errors import TokenError
from agentrl.tokens.parse import ToolFormat, thinking_tags
from agentrl.types import Message


class _At(Enum):
    START = auto()
    REASONING_START = auto()
    REASONING = auto()
    CONTENT_GAP = auto()
    CONTENT_START = auto()
    CONTENT = auto()
    HELD = auto()


class DeltaSplitter:
    r"""Splits one streamed output.

    Text is kept back while its meaning is open: a marker or stop string that may have begun, white space that may be
    trimmed, bytes that may yet become a character, and everything from the first tool call on.

    Example:
        >>> splitter = DeltaSplitter(HERMES, tools=True, stops=(), thinking_open=False)
        >>> [splitter.push(text) for text in ("<thi", "nk>Two", "</think>\n\nIt is <to", "ol_call>{}")]
        [Delta(reasoning='', content=''), Delta(reasoning='Two', content=''), Delta(reasoning='', content='It is'),
         Delta(reasoning='', content='')]
        >>> splitter.rest("Two", "It is")
        Delta(reasoning='', content='')
    """

    def __init__(self, form: ToolFormat | None, *, tools: bool, stops: Iterable[str], thinking_open: bool) -> None:
        """Split an output whose tool calls have the form `form`; None, or no `tools`, if it holds none."""
        self._openings = form.openings if form is not None and tools else ()
        self._starts = form.starts if form is not None and tools else ()
        self._tools = tools and form is not None
        self._stops = (*stops, "\ufffd")
        self._thinking_open = thinking_open
        self._thinking = thinking_tags(form)
        self._closing = self._thinking[0][1]
        self._at = _At.START if form is None or form.split is None else _At.HELD  # channels come at the end
        self._gate = ""
        self._stopped = False
        self._pending = ""
        self._sent_reasoning: list[str] = []
        self._sent_content: list[str] = []

    def push(self, text: str) -> Delta:
        """Return what `text` settles."""
        if self._stopped:
            return Delta("", "")
        self._gate += text
        cut, self._stopped = _first_marker(self._gate, self._stops)
        self._pending += self._gate[:cut]
        self._gate = self._gate[cut:]
        reasoning, content = len(self._sent_reasoning), len(self._sent_content)
        while self._advance():
            pass
        return Delta("".join(self._sent_reasoning[reasoning:]), "".join(self._sent_content[content:]))

    def shown(self) -> Message:
        """Return the message that the text handed out so far makes."""
        message: dict[str, object] = {"role": "assistant", "content": "".join(self._sent_content)}
        reasoning = "".join(self._sent_reasoning)
        return message | {"reasoning_content": reasoning} if reasoning else message

    def rest(self, reasoning: str, content: str) -> Delta:
        """Return what is still missing of the finished message.

        Raises:
            TokenError: what was handed out is no prefix of it.
        """
        missing: list[str] = []
        for name, final, sent in (("reasoning", reasoning, self._sent_reasoning), ("content", content, self._sent_content)):
            before = "".join(sent)
            if not final.startswith(before):
                raise TokenError(f"streamed {name} {before[-80:]!r} is not how the parsed message begins: {final[:80]!r}")
            missing.append(final[len(before) :])
        return Delta(*missing)

    def _advance(self) -> bool:
        """Consume pending text up to the next change of place; return whether there was one."""
        place = self._at
        match place:
            case _At.START:
                self._start()
            case _At.REASONING_START:
                self._skip_newlines(_At.REASONING)
            case _At.REASONING:
                self._reasoning()
            case _At.CONTENT_GAP:
                self._skip_newlines(_At.CONTENT_START)
            case _At.CONTENT_START:
                self._content_start()
            case _At.CONTENT:
                self._content()
            case _At.HELD:
                self._pending = ""
        return self._at is not place

    def _start(self) -> None:
        text = self._pending.lstrip()
        if any(len(text) < len(opening) and opening.startswith(text) for opening, _ in self._thinking):
            return
        if tags := next((tags for tags in self._thinking if text.startswith(tags[0])), None):
            opening, self._closing = tags
            self._pending = text.removeprefix(opening)
            self._at = _At.REASONING_START
        elif self._thinking_open:
            self._pending = text
            self._at = _At.REASONING_START
        else:
            self._at = _At.CONTENT_START

    def _skip_newlines(self, then: _At) -> None:
        self._pending = self._pending.lstrip("\n")
        if self._pending:
            self._at = then

    def _reasoning(self) -> None:
        cut, closed = _first_marker(self._pending, (self._closing,))
        text = self._pending[:cut].rstrip("\n")
        self._sent_reasoning.append(text)
        self._pending = self._pending[cut + len(self._closing) :] if closed else self._pending[len(text) :]
        if closed:
            self._at = _At.CONTENT_GAP

    def _content_start(self) -> None:
        text = self._pending
        if not text:
            return
        if not self._tools:
            self._at = _At.CONTENT
        elif text[0].isspace() or text.startswith(self._starts):
            self._at = _At.HELD
        elif not any(start.startswith(text) for start in self._starts):
            self._at = _At.CONTENT

    def _content(self) -> None:
        cut, found = _first_marker(self._pending, self._openings)
        text = self._pending[:cut].rstrip()
        self._sent_content.append(text)
        self._pending = self._pending[len(text) :]
        if found:
            self._at = _At.HELD


def _first_marker(text: str, markers: Sequence[str]) -> tuple[int, bool]:
    """Return where the first marker in `text`, whole or begun at its end, starts, and whether it is whole."""
    positions = [at for marker in markers if (at := text.find(marker)) >= 0]
    if positions:
        return min(positions), True
    begun = (length for marker in markers for length in range(1, len(marker)) if text.endswith(marker[:length]))
    return len(text) - max(begun, default=0), False
