"""Tasks of two commands: read the note that the question names, then do to a file what it says.

Each container has three notes, of which the question names one, and four files with a number each. Nothing but the note
tells what to do, so an agent that does not read it is right in one of hundreds of tasks.

Invariant: training and held-out tasks share no note, whatever their seeds.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from agentrl.types import Task
from agentrl_sandbox.harbor.task import harbor_tasks
from agentrl_workflows.terminal_tasks.problem import Problem, cached_folder

NOTES: Final = ("ash", "elm", "oak")
NOTE_COLORS: Final = ("red", "blue", "green", "gray")
_HELD_OUT_SHARE: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteTask:
    """What a note asks for."""

    verb: Literal["append", "write", "copy", "move", "remove"]
    source: str
    """A number, or the name of a file."""
    target: str
    """The name of a file; empty for `remove`."""

    @property
    def text(self) -> str:
        """The note."""
        return f"{self.verb} {self.source} to {self.target}" if self.target else f"{self.verb} {self.source}"

    @property
    def command(self) -> str:
        """The command that does it."""
        words = {
            "append": "echo {} >> {}",
            "write": "echo {} > {}",
            "copy": "cp {} {}",
            "move": "mv {} {}",
            "remove": "rm {}",
        }
        return words[self.verb].format(self.source, self.target)

    @property
    def is_held_out(self) -> bool:
        """Whether its tasks are held out: one note in eight."""
        return zlib.crc32(self.text.encode()) % _HELD_OUT_SHARE == 0

    def applied(self, files: Mapping[str, str]) -> dict[str, str]:
        """Return the contents of the files afterwards."""
        after = dict(files)
        if self.verb == "append":
            after[self.target] += f"{self.source}\n"
        elif self.verb == "write":
            after[self.target] = f"{self.source}\n"
        elif self.verb == "copy":
            after[self.target] = after[self.source]
        elif self.verb == "move":
            after[self.target] = after.pop(self.source)
        else:
            del after[self.source]
        return after


def random_note(rng: random.Random) -> NoteTask:
    """Return one of the notes; each verb is equally likely."""
    verb = rng.choice(("append", "write", "copy", "move", "remove"))
    first, second = rng.sample(NOTE_COLORS, 2)
    if verb in ("append", "write"):
        return NoteTask(verb=verb, source=str(rng.randint(10, 99)), target=first)
    return NoteTask(verb=verb, source=first, target="" if verb == "remove" else second)


def note_tasks(*, count: int, seed: int, split: Literal["train", "held_out"] = "train") -> list[Task]:
    """Return `count` tasks as Harbor folders in the cache of this user; the same arguments give the same tasks.

    Each has beside `question` and `folder` the name of its note (`note`) and what it says (`verb`, `source`, `target`).
    """
    rng = random.Random(f"notes {split} {seed}")
    made: list[tuple[str, NoteTask]] = []
    problems: list[Problem] = []
    for number in range(count):
        name, wanted = rng.choice(NOTES), random_note(rng)
        while wanted.is_held_out != (split == "held_out"):
            wanted = random_note(rng)
        problems.append(_problem(f"{split}-{seed}-{number:04}", name, wanted, rng))
        made.append((name, wanted))
    folder = cached_folder(problems, f"notes-{split}-{seed}-{count}")
    return [
        Task(
            id=task.id,
            data={**task.data, "note": name, "verb": note.verb, "source": note.source, "target": note.target},
        )
        for task, (name, note) in zip(harbor_tasks(str(folder)), made, strict=True)
    ]


def _problem(task: str, name: str, wanted: NoteTask, rng: random.Random) -> Problem:
    notes = {each: wanted if each == name else random_note(rng) for each in NOTES}
    colors = {color: f"{rng.randint(10, 99)}\n" for color in NOTE_COLORS}
    files = {each: f"{note.text}\n" for each, note in notes.items()} | colors
    after = {**{each: f"{note.text}\n" for each, note in notes.items()}, **wanted.applied(colors)}
    right = {each: text.encode() for each, text in after.items()}
    return Problem(
        name=task,
        level=1,
        category="notes",
        ask=f"Follow {name}.",
        files=files,
        solve=wanted.command,
        check=f"begin()\npay({{name: data(name) for name in tree()}} == {right!r})",
        wrong=(f"cat {name}", f"rm {name}; {wanted.command}"),
    )
