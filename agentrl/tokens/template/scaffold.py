"""Scaffolds: the ids a template puts around the texts of new messages, learned once for each shape of messages.

What a turn adds to a prompt is mostly the same in every turn but for the texts of its messages. A scaffold is learned from
a traced rendering (`trace.py`) and must give the ids of the ordinary one; afterwards, only texts are encoded.

Invariant: the ids `Scaffolds.fill` returns are those of rendering and encoding the messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, cast

from agentrl.errors import ConfigError, TokenError
from agentrl.tokens.parse import THINK_OPEN
from agentrl.tokens.template.environment import PlainMessage
from agentrl.tokens.template.trace import Step, Trace, Untraceable
from agentrl.tokens.tokenizer.codec import TokenCodec

_MAX_SHAPES = 256
_MAX_TRIES = 4
"""For each shape: a template may write one thing or another, depending on what a text begins with."""

Shape = tuple[object, ...]
_Piece = tuple[list[int], str, Callable[[Sequence[str]], Any], tuple[list[int], str] | None]
"""Ids, the text that follows them with `%s` for texts of the messages and `%%` for a percent sign, and what picks those;
ids and text once more, cut before the first of those instead, where it begins a line."""


class Context(NamedTuple):
    """Ids a request adds, up to the point where the model writes."""

    ids: list[int]
    thinking_open: bool
    """The prompt ends inside `<think>`, so the output begins with reasoning."""


class _Scaffold(NamedTuple):
    steps: Sequence[Step]
    pieces: Sequence[_Piece]
    end: list[int]
    """Ids after the last of them."""
    thinking_open: bool


class Scaffolds:
    """Encodes new messages by what their template wrote around others of the same shape; a bounded memory."""

    def __init__(self, render: Callable[[Trace, Sequence[PlainMessage], bool], str], codec: TokenCodec) -> None:
        """Start without scaffolds.

        Args:
            render: writes new messages with traced texts; raises `Untraceable` if their text depends on anything else.
            codec: encodes.
        """
        self._render = render
        self._codec = codec
        self._known: dict[Shape, list[_Scaffold | None]] = {}

    def fill(self, new: Sequence[PlainMessage], tools: bool) -> tuple[list[int], bool] | None:
        """Return the context that new messages make (see `Context`); None if no scaffold fits them."""
        shape, texts = _read(new, tools)
        for scaffold in self._known.get(shape, ()):
            context = None if scaffold is None else self._filled(scaffold, texts)
            if context is not None:
                return context
        return None

    def learn(self, new: Sequence[PlainMessage], tools: bool, expected: Context) -> None:
        """Learn the scaffold of messages whose context is `expected`, if there is one."""
        shape, texts = _read(new, tools)
        known = self._known.get(shape, [])
        if len(known) >= _MAX_TRIES or len(self._known) >= _MAX_SHAPES or not all(type(text) is str for text in texts):
            return
        try:
            scaffold = self._traced(new, tools) if self._codec.separable else None
        except (Untraceable, TokenError, ConfigError):
            scaffold = None
        if scaffold is not None and self._filled(scaffold, texts) != expected:
            scaffold = None
        self._known[shape] = [*known, scaffold]

    def _filled(self, scaffold: _Scaffold, given: list[str]) -> tuple[list[int], bool] | None:
        steps, pieces, end, thinking_open = scaffold
        texts = given.copy() if steps else given
        for text, function, arguments, answer in steps:
            result = function(texts[text], *arguments)
            if answer is None:
                texts.append(cast("str", result))
            elif bool(result) is not answer:
                return None
        ids: list[int] = []
        for before, text, pick, cut in pieces:
            picked = pick(texts)
            if cut is not None and "!" <= (picked if type(picked) is str else picked[0])[:1] <= "~":
                before, text = cut
            ids += before
            ids += self._codec.encode_content(picked if text == "%s" else text % picked)
        ids += end
        return ids, thinking_open

    def _traced(self, new: Sequence[PlainMessage], tools: bool) -> _Scaffold:
        trace = Trace()
        traced: list[PlainMessage] = [
            {name: value if name == "role" else trace.text(cast("str", value)) for name, value in message.items()}
            for message in new
        ]
        written = trace.split(self._render(trace, traced, tools))
        end = cast("str", written[-1]).rstrip()
        if len(end) < len(THINK_OPEN):
            raise Untraceable
        pieces: list[_Piece] = []
        ids, text, numbers, head = list[int](), "", list[int](), ""
        for item in (*written, None):
            if isinstance(item, int):
                head = head if numbers else text
                numbers.append(item)
                text += "%s"
                continue
            for at, part in enumerate(("", "") if item is None else self._codec.split(item)):
                if at & 1 == 0:
                    text += part.replace("%", "%%")
                    continue
                if numbers:
                    line = self._codec.cuts_lines and head.endswith("\n")
                    cut = (ids + self._codec.encode_content(head % ()), text[len(head) :]) if line else None
                    pieces.append((ids, text, itemgetter(*numbers), cut))
                    ids, numbers = [], []
                else:
                    ids += self._codec.encode_content(text % ())
                text = ""
                if part:
                    ids.append(self._codec.control[part])
        return _Scaffold(trace.steps, pieces, ids, end.endswith(THINK_OPEN))


def _read(new: Sequence[PlainMessage], tools: bool) -> tuple[Shape, list[str]]:
    """Return the shape of messages, whose first key is `role`, and their texts: `str` in any shape that was learned."""
    shape: list[object] = [tools]
    texts: list[Any] = []
    for message in new:
        for name, value in message.items():
            if name == "role":
                shape.append(value)
            else:
                shape.append(name)
                texts.append(value)
    return tuple(shape), texts
