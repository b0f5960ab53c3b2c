"""The terminal demo's tokenizer: the words of its notes, and of the commands that follow them.

Invariant: no phrase spans a place where the chat template's text and content meet.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from agentrl_workflows.demo.tokenizer import ROLE_PHRASES, write_phrase_tokenizer
from agentrl_workflows.terminal_demo.expert import DONE, SILENT
from agentrl_workflows.terminal_demo.tasks import NOTE_COLORS, NOTES

TERMINAL_PHRASES: Final = (
    *ROLE_PHRASES,
    '{"name": "',
    "bash",
    '", "arguments": ',
    '{"command": "',
    "Follow ",
    DONE,
    SILENT,
    *NOTES,
    *NOTE_COLORS,
    "append ",
    "write ",
    "copy ",
    "move ",
    "remove ",
    " to ",
    "cat ",
    "echo ",
    "cp ",
    "mv ",
    "rm ",
    " > ",
    " >> ",
    ": No such file or directory",
    "[exit status 1]",
)


def write_terminal_tokenizer(path: Path) -> int:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja to `path`; return the vocabulary size."""
    return write_phrase_tokenizer(path, TERMINAL_PHRASES)
