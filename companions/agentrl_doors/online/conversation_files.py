"""The folder `online/` of a run: the conversations that are not trained yet, with their turns and their feedback.

- `ID.jsonl`: one conversation; a line for its beginning, for each turn, for each feedback, and for its end.
- `taken.jsonl`: one line for each training step, with the conversations that it took.

Invariant: a turn is in its file before its answer is sent whole, and feedback is on the disk when `sync` returns. A
conversation that every checkpoint holds, and one that is left, has no file. A disk that refuses a line stops the run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

import anyio.to_thread
import msgspec

from agentrl.episode.codec import pack_turn, unpack_turn
from agentrl.errors import InvariantError, RunStopped
from agentrl.observe.records import JsonLines, cannot_write
from agentrl.observe.runs.reading import ONLINE_FOLDER
from agentrl.support.folders import make_private
from agentrl.types import Turn
from agentrl_doors.gateway.sessions.rewards import RewardValue

_TAKEN: Final = "taken.jsonl"


class OpeningLine(msgspec.Struct, frozen=True, tag="opened"):
    """The first line of a conversation."""

    id: str
    client: str
    name: str
    """The id under which the client knows it."""


class AnswerLine(msgspec.Struct, frozen=True, tag="answered"):
    """A turn."""

    answer: str
    """Its `Answer.id`."""
    turn: bytes
    """The turn without its reward, by `pack_turn`."""


class FeedbackLine(msgspec.Struct, frozen=True, tag="feedback"):
    """A reward that was accepted."""

    turn: int | None
    """None: the final one."""
    reward: RewardValue
    at: int | None
    """`Turn.rewarded_at`."""


class EndLine(msgspec.Struct, frozen=True, tag="ended"):
    """The last line of a conversation that ended with feedback."""


class _Taken(msgspec.Struct, frozen=True):
    step: int
    ids: tuple[str, ...]


ConversationLine: TypeAlias = OpeningLine | AnswerLine | FeedbackLine | EndLine


@dataclass(slots=True, kw_only=True)
class StoredConversation:
    """A conversation as an earlier process left it."""

    opened: OpeningLine
    answers: list[tuple[str, Turn]] = field(default_factory=list[tuple[str, Turn]])
    feedback: list[FeedbackLine] = field(default_factory=list[FeedbackLine])
    is_ended: bool = False


class ConversationFiles:
    """Writes and reads the folder of one run."""

    def __init__(self, run_dir: Path) -> None:
        self._folder, self._checkpoints = run_dir / ONLINE_FOLDER, run_dir / "checkpoints"
        self._taken: dict[str, int] = {}
        """The step that took each conversation whose file is still there."""

    def add(self, conversation: str, line: ConversationLine) -> None:
        """Add a line to the file of a conversation, and make it with its first line."""
        self._append(self._path(conversation), msgspec.json.encode(line) + b"\n")

    def add_turn(self, conversation: str, answer: str, turn: Turn) -> None:
        """Add a turn, which has no reward yet."""
        self.add(conversation, AnswerLine(answer=answer, turn=bytes(pack_turn(turn))))

    async def sync(self, conversation: str) -> None:
        """Return when all lines of a conversation are on the disk."""
        await anyio.to_thread.run_sync(self._sync, self._path(conversation))

    def forget(self, conversation: str) -> None:
        """Delete a conversation that will not be trained."""
        self._path(conversation).unlink(missing_ok=True)

    async def take(self, step: int, conversations: Sequence[str]) -> None:
        """Record that a step is about to train conversations, and delete those that every checkpoint holds."""
        self._append(self._folder / _TAKEN, msgspec.json.encode(_Taken(step=step, ids=tuple(conversations))) + b"\n")
        await anyio.to_thread.run_sync(self._sync, self._folder / _TAKEN)
        self._taken.update(dict.fromkeys(conversations, step))
        saved = min((_step_of_folder(path) for path in self._checkpoints.glob("step-*")), default=0)
        for conversation in [each for each, at in self._taken.items() if at <= saved]:
            self.forget(conversation)
            del self._taken[conversation]

    def take_up(self, step: int) -> Iterator[StoredConversation]:
        """Yield the conversations that the weights of `step` have not been trained on, and delete the others.

        They come in the order of their last lines.
        """
        if not self._folder.is_dir():
            return
        taken = {each: line.step for line in self._taken_lines() for each in line.ids if line.step <= step}
        self._forget_lost_steps(step)
        for path in sorted(self._folder.glob("*.jsonl"), key=lambda path: path.stat().st_mtime_ns):
            if path.name == _TAKEN:
                continue
            if path.stem in taken:
                path.unlink()
                continue
            JsonLines(path).close()  # cuts off half a line
            stored = _read_conversation(path)
            if stored is not None:
                yield stored

    def _taken_lines(self) -> list[_Taken]:
        path = self._folder / _TAKEN
        if not path.exists():
            return []
        JsonLines(path).close()
        return [msgspec.json.decode(line, type=_Taken) for line in path.read_bytes().splitlines()]

    def _forget_lost_steps(self, step: int) -> None:
        path = self._folder / _TAKEN
        kept = [line for line in self._taken_lines() if line.step <= step]
        unfinished = path.with_name(path.name + ".unfinished")
        try:
            unfinished.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in kept))
            self._sync(unfinished)
            unfinished.replace(path)
        except OSError as error:
            raise cannot_write(path, error) from error

    def _path(self, conversation: str) -> Path:
        return self._folder / f"{conversation}.jsonl"

    def _append(self, path: Path, lines: bytes) -> None:
        try:
            make_private(self._folder)
        except OSError as error:
            raise cannot_write(path, error) from error
        file = JsonLines(path)
        try:
            file.append_bytes(lines)
        finally:
            file.close()

    def _sync(self, path: Path) -> None:
        """Put a file, and its name in the folder, on the disk."""
        try:
            for each in (path, self._folder):
                descriptor = os.open(each, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
        except OSError as error:
            raise cannot_write(path, error) from error


def _read_conversation(path: Path) -> StoredConversation | None:
    """Return the conversation of a file; None if not even its first line is whole."""
    stored: StoredConversation | None = None
    try:
        for text in path.read_bytes().splitlines():
            line = msgspec.json.decode(text, type=ConversationLine)
            if isinstance(line, OpeningLine):
                stored = StoredConversation(opened=line)
            elif stored is None:
                raise InvariantError("the file does not begin with the beginning of a conversation")
            elif isinstance(line, AnswerLine):
                stored.answers.append((line.answer, unpack_turn(msgspec.Raw(line.turn))))
            elif isinstance(line, FeedbackLine):
                stored.feedback.append(line)
            else:
                stored.is_ended = True
    except (msgspec.DecodeError, InvariantError) as error:
        raise RunStopped(f"{path} holds no conversation: {error}; move it away, and what was said in it is lost") from error
    return stored


def _step_of_folder(path: Path) -> int:
    digits = path.name.removeprefix("step-")
    return int(digits) if digits.isdigit() else 0
