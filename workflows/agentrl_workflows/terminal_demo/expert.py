"""The scripted demonstrator of the warm start: it can read notes and follow them, but mostly does something at once.

Invariant: a demonstration is a conversation as the workflow has it, with the outputs that the commands have
(`tests/workflows/terminal/test_terminal_demo.py` compares them with the container's). Demonstrations use training notes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from agentrl.types import Message
from agentrl_workflows.terminal_demo.tasks import NOTES, NoteTask, random_note

DONE: Final = "Done."
SILENT: Final = "(no output)"
BASH_TOOL: Final = {"type": "function", "function": {"name": "bash", "description": "", "parameters": {"type": "object"}}}
"""The demo's template shows the name of a tool and nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteReader:
    """How the scripted demonstrator errs; each number is a probability."""

    p_hasty: float
    """It runs some command instead of reading the note."""
    p_slip: float = 0.05
    """It follows another note than the one that it read."""


def demonstrate_note(name: str, wanted: NoteTask, reader: NoteReader, rng: random.Random) -> list[Message]:
    """Return the conversation of one demonstrated episode."""
    messages: list[Message] = [{"role": "user", "content": f"Follow {name}."}]
    if rng.random() < reader.p_hasty:
        _run(messages, random_note(rng).command, SILENT)
    else:
        _run(messages, f"cat {name}", wanted.text)
        done = random_note(rng) if rng.random() < reader.p_slip else wanted
        _run(messages, done.command, SILENT)
    return [*messages, {"role": "assistant", "content": DONE}]


def note_demonstrations(*, count: int, seed: int, reader: NoteReader) -> list[Mapping[str, Sequence[Any]]]:
    """Return `count` conversations on notes that are not held out, as `{"messages": [...], "tools": [...]}`."""
    rng = random.Random(f"note demonstrations {seed}")
    found: list[Mapping[str, Sequence[Any]]] = []
    while len(found) < count:
        wanted = random_note(rng)
        if not wanted.is_held_out:
            messages = demonstrate_note(rng.choice(NOTES), wanted, reader, rng)
            found.append({"messages": messages, "tools": [BASH_TOOL]})
    return found


def _run(messages: list[Message], command: str, output: str) -> None:
    function = {"name": "bash", "arguments": json.dumps({"command": command})}
    call = {"id": f"call-{len(messages)}", "type": "function", "function": function}
    messages.append(cast("Message", {"role": "assistant", "content": None, "tool_calls": [call]}))
    messages.append(cast("Message", {"role": "tool", "tool_call_id": call["id"], "content": output}))
