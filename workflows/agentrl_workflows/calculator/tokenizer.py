"""The calculator demo's tokenizer: the phrases that its questions, calls and replies consist of.

Invariant: no phrase spans a place where the chat template's text and content meet.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from agentrl_workflows.demo.tokenizer import ROLE_PHRASES, write_phrase_tokenizer

CALCULATOR_PHRASES: Final = (
    *ROLE_PHRASES,
    '{"name": "',
    "calc",
    '", "arguments": ',
    '{"a": ',
    ', "op": "',
    '", "b": ',
    "Compute ",
    " + ",
    " - ",
    " * ",
    "The answer is ",
    "Wrong, try again.",
    "error: busy",
    "error: bad call",
)


def write_tokenizer(path: str | Path) -> int:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja to `path`; return the vocabulary size."""
    return write_phrase_tokenizer(path, CALCULATOR_PHRASES)
