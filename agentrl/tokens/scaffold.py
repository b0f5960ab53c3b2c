"""Scaffolds: the ids a template puts around the texts of new messages, learned once for each shape of messages.

What a turn adds to a prompt is mostly the same in every turn but for the texts of its messages. A scaffold is learned from
a traced rendering (`agentrl.tokens.trace`) and must give the ids of the ordinary one; afterwards, only texts are encoded.

Invariant: the ids `Scaffolds.fill` returns are those of rendering and encoding the messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

from agentrl.errors import ConfigError, TokenError
from agentrl.tokens.encode import TokenCodec
from agentrl.tokens.parse import THINK_OPEN
from agentrl.tokens.template import PlainMessage
from agentrl.tokens.trace import Step, Trace, Untraceable

_MAX_SHAPES = 256
_MAX_TRIES = 4
"""For each shape: a template may write one thing or another, depending on what a text begins with."""

Shape = tuple[object, ...]


class Context(NamedTuple):
    """Ids a request adds, up to the point where the model writes."""

    ids: list[int]
    thinking_open: bool
    """The prompt ends inside `<think>`, so the output begins with reasoning."""


class _Scaffold(NamedTuple):
    steps: Sequence[Step]
    pieces: Sequence[tuple[int, ...] | list[str | int]]
    """Ids, and texts between control tokens with the numbers of the messages' texts in them."""
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
        known = self._known.get(_shape(new, tools))
        texts = _texts(new) if known else []
        for scaffold in known or ():
            context = None if scaffold is None else self._filled(scaffold, texts)
            if context is not None:
                return context
        return None

    def learn(self, new: Sequence[PlainMessage], tools: bool, expected: Context) -> None:
        """Learn the scaffold of messages whose context is `expected`, if there is one."""
        shape = _shape(new, tools)
        known = self._known.get(shape, [])
        texts = _texts(new)
        if len(known) >= _MAX_TRIES or len(self._known) >= _MAX_SHAPES or not all(type(text) is str for text in texts):
            return
        try:
            scaffold = self._traced(new, tools) if self._codec.separable else None
        except (Untraceable, TokenError, ConfigError):
            scaffold = None
        if scaffold is not None and self._filled(scaffold, texts) != expected:
            scaffold = None
        self._known[shape] = [*known, scaffold]

    def _filled(self, scaffold: _Scaffold, given: Sequence[str]) -> tuple[list[int], bool] | None:
        texts = [*given]
        for text, function, arguments, answer in scaffold.steps:
            result = function(texts[text], *arguments)
            if answer is None:
                texts.append(cast("str", result))
            elif bool(result) is not answer:
                return None
        ids: list[int] = []
        for piece in scaffold.pieces:
            if isinstance(piece, tuple):
                ids += piece
            else:
                ids += self._codec.encode_content(
                    "".join([texts[part] if isinstance(part, int) else part for part in piece])
                )
        return ids, scaffold.thinking_open

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
        pieces: list[tuple[int, ...] | list[str | int]] = [[]]
        for item in written:
            parts = [item] if isinstance(item, int) else self._codec.split(item)
            for at, part in enumerate(parts):
                if at & 1:
                    pieces += [(self._codec.control[cast("str", part)],), []]
                elif part != "":
                    cast("list[str | int]", pieces[-1]).append(part)
        return _Scaffold(trace.steps, _merged(pieces, self._codec), end.endswith(THINK_OPEN))


def _merged(
    pieces: Sequence[tuple[int, ...] | list[str | int]], codec: TokenCodec
) -> list[tuple[int, ...] | list[str | int]]:
    """Return pieces with everything known encoded."""
    merged: list[tuple[int, ...] | list[str | int]] = []
    for piece in pieces:
        if type(piece) is list and not any(isinstance(part, int) for part in piece):
            piece = tuple(codec.encode_content("".join(cast("list[str]", piece))))
        if type(piece) is tuple and merged and type(merged[-1]) is tuple:
            merged[-1] += piece
        else:
            merged.append(piece)
    return merged


def _shape(new: Sequence[PlainMessage], tools: bool) -> Shape:
    return tools, *[(message["role"], *message) for message in new]


def _texts(new: Sequence[PlainMessage]) -> list[str]:
    return [message[name] for message in new for name in message if name != "role"]
