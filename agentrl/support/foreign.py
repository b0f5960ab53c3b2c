"""Text from outside, such as the error of a server, made fit for messages, records and terminals.

Invariant: on a terminal, text that `visible` returns moves no cursor, sets no title, colours and reorders nothing.
"""

from __future__ import annotations

import logging
import re

MAX_TEXT = 16_000
"""Most characters of a foreign text that a message or a record keeps."""
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except tab and line feed, marks that reorder text, and lone surrogates."""


def visible(text: str) -> str:
    r"""Return text with escapes for all that could steer a terminal."""
    return _UNSAFE.sub(lambda match: match.group().encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    r"""Return text as `visible` does, line feeds as escapes too, so that it cannot forge a line of a message."""
    return visible(text).replace("\n", "\\n")


def shortened(text: str, limit: int = MAX_TEXT) -> str:
    """Return text of more than `limit` characters without its middle."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} ... ({len(text) - 2 * half} characters left out) ... {text[-half:]}"


class VisibleFormatter(logging.Formatter):
    """Formats log records for a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def make_log_visible() -> None:
    """Escape the output of Python's handler of last resort on a terminal; handlers of a program are its own."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(VisibleFormatter())
