"""The code demo's tokenizer: the words of its descriptions and of its feedback, and of the Python that answers them.

Invariant: no phrase spans a place where the chat template's text and content meet. A program is some twenty tokens, each of
them a part that Python's own grammar knows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from agentrl_workflows.demo.tokenizer import ROLE_PHRASES, write_phrase_tokenizer

CODE_PHRASES: Final = (
    *ROLE_PHRASES,
    "Write f(x): if x is ",
    "even",
    "over 10",
    "under 11",
    ", ",
    "; otherwise, ",
    "add ",
    "subtract ",
    "multiply by ",
    "combine with ",
    "f(",
    ") returned ",
    ", expected ",
    "```python\n",
    "```",
    "def f(x):",
    "\n    return ",
    " + ",
    " - ",
    " * ",
    " % ",
    " == ",
    " > ",
    " < ",
    " if ",
    " else ",
)


def write_code_tokenizer(path: Path) -> int:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja to `path`; return the vocabulary size."""
    return write_phrase_tokenizer(path, CODE_PHRASES)
