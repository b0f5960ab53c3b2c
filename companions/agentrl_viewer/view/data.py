"""What the page shows of a run directory, as JSON: read from the disk at each request, so that it is live.

Invariant: the viewer writes nothing. What a resumed run took back is never shown: the answer that holds the mark replaces
all that was sent before.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Generic, NamedTuple, TypeVar

import msgspec
import orjson
import yaml

from agentrl.commands.open_run import Run
from agentrl.episode.summary import EpisodeSummary
from agentrl.errors import ConfigError
from agentrl.observe.runs.reading import RESUMED_MARK, read_index, read_metrics
from agentrl.observe.runs.run_lock import is_locked
from agentrl.types import JsonValue
from agentrl_viewer.exchange.foreign_run import RUN_FILES, Closing
from agentrl_viewer.view.episode import episode_json
from agentrl_viewer.view.metric_names import describe_metrics
from agentrl_viewer.view.token_ages import trained_ages

Item = TypeVar("Item")
_HEADER: Final = b'{"format":'
_COLUMNS: Final = EpisodeSummary.__struct_fields__
_READS: Final = 5
"""How often a file that grows while it is read is read again."""


class Place(NamedTuple):
    """A byte of a file, and which file that was: a run that began again has another one of the same name."""

    inode: int
    offset: int

    @classmethod
    def parse(cls, text: str) -> Place:
        """Return the place that `str` wrote; an empty text is the beginning."""
        inode, dash, offset = (text or "0-0").partition("-")
        if not (dash and inode.isdecimal() and offset.isdecimal()):
            raise ValueError(f"from: expected what the answer before gave as `next`, or nothing, got {text!r}")
        return cls(int(inode), int(offset))

    def __str__(self) -> str:
        return f"{self.inode}-{self.offset}"


class NewLines(NamedTuple):
    """The whole lines of a file from a place on."""

    lines: list[bytes]
    next: Place
    """The place behind them."""
    is_reset: bool
    """Whether what was read before no longer stands: the file was replaced, or its new lines take something back."""


class _NewItems(NamedTuple, Generic[Item]):
    items: Sequence[Item]
    next: Place
    is_reset: bool


class RunData:
    """Reads one run directory; every method may be called from any thread."""

    def __init__(self, path: Path, *, source: Path | None = None, closing: Closing | None = None) -> None:
        """Read from `path`.

        Args:
            path: the directory.
            source: the file, or folder, of another program that the directory was made from.
            closing: messages after the last answers of its episodes.
        """
        if not path.is_dir():
            raise ConfigError(f"{path}: expected the directory of a run, such as runs/NAME, or a file of ATIF")
        if not any((path / name).exists() for name in RUN_FILES):
            raise ConfigError(
                f"{path}: expected the directory of a run, with config.yaml or metrics.jsonl in it, or files of ATIF"
            )
        self.path = path.resolve()
        self.source = source or path
        """What the reader asked for."""
        self._closing = closing or {}
        self._token_texts = Run(self.path).token_texts()  # a large tokenizer takes a second to load
        self._decoder = msgspec.json.Decoder(EpisodeSummary)

    def run(self, others: Sequence[Path] = ()) -> bytes:
        """Return what the frame of the page shows: `name`, `path`, `is_running`, `saves_episodes`, `others`.

        Args:
            others: directories of the runs that the page compares with this one.
        """
        shown = run_json(self.path, is_running=is_locked(self.path))
        named = {"name": self.name, "path": str(self.source.resolve())}
        return orjson.dumps({**shown, **named, "others": len(others)})

    @property
    def name(self) -> str:
        """The name of the run's directory."""
        return self.source.resolve().name

    def metrics(self, place: Place) -> bytes:
        """Return the events of metrics.jsonl from a place on: `next`, `reset`, `events`, and the `names` of their keys."""
        read = self._read_new("metrics.jsonl", place, orjson.loads, lambda: list(read_metrics(self.path)))
        names = describe_metrics(read.items)
        return _json_bytes({"next": str(read.next), "reset": read.is_reset, "events": read.items, "names": names})

    def timeline(self, place: Place) -> bytes:
        """Return the spans of timeline.jsonl from a place on: `next`, `reset` and `spans`."""
        new = new_lines(self.path / "timeline.jsonl", place)  # no later line takes one back: the time was spent
        return _json_bytes({"next": str(new.next), "reset": new.is_reset, "spans": _decoded(new.lines, orjson.loads)})

    def episodes(self, place: Place) -> bytes:
        """Return the lines of the index from a place on, by column: `next`, `reset`, `count` and `columns`."""
        read = self._read_new("episodes/index.jsonl", place, self._decoder.decode, lambda: read_index(self.path))
        rows = map(msgspec.structs.astuple, read.items)
        columns = dict(zip(_COLUMNS, zip(*rows, strict=True), strict=True)) if read.items else dict.fromkeys(_COLUMNS, ())
        return _json_bytes({"next": str(read.next), "reset": read.is_reset, "count": len(read.items), "columns": columns})

    def episode(self, episode_id: str) -> bytes:
        """Return one episode with the text of each token."""
        return orjson.dumps(self.episode_fields(episode_id), option=orjson.OPT_SERIALIZE_NUMPY)

    def episode_fields(self, episode_id: str) -> dict[str, Any]:
        """Return one episode as the page and a file for a colleague read it."""
        found = episode_json(Run(self.path).episode(episode_id), self._token_texts)
        for turn, messages in self._closing.get(episode_id, {}).items():
            found["turns"][turn]["closing"] = messages
        return found

    def staleness(self, step: int) -> bytes:
        """Return how many tokens of each age a step trained: `step` and `tokens`, ages in versions."""
        ages = trained_ages(self.path, step)
        return _json_bytes({"step": step, "tokens": {str(age): count for age, count in sorted(ages.items())}})

    def _read_new(
        self, name: str, place: Place, decode: Callable[[bytes], Item], standing: Callable[[], Sequence[Item]]
    ) -> _NewItems[Item]:
        """Decode the new lines of a file; read all that stands where some of them take others back."""
        path = self.path / name
        new = new_lines(path, place)
        if not any(line.startswith(RESUMED_MARK) for line in new.lines):
            return _NewItems(_decoded(new.lines, decode), new.next, new.is_reset)
        for _ in range(_READS):
            end = new_lines(path, new.next).next
            items = standing()
            if new_lines(path, end).next == end:
                return _NewItems(items, end, True)
        raise ValueError(f"{name} grows faster than it is read; ask again")


def run_json(path: Path, *, is_running: bool) -> dict[str, JsonValue]:
    """Return what the frame of the page shows of a run."""
    return {
        "name": path.resolve().name,
        "path": str(path),
        "is_running": is_running,
        "saves_episodes": _saves_episodes(path),
    }


def _saves_episodes(path: Path) -> bool:
    """Return whether episodes are there, or may come."""
    file = path / "config.yaml"
    if (path / "episodes" / "index.jsonl").exists() or not file.exists():
        return True
    fields = yaml.safe_load(file.read_text(encoding="utf-8"))
    engine = fields.get("engine") if isinstance(fields, dict) else None
    return not isinstance(engine, dict) or engine.get("save_trajectories") is not False


def new_lines(path: Path, place: Place) -> NewLines:
    """Return the whole lines of a file from a place on, without a header; none where it does not exist."""
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            is_reset = place.offset > 0 and (place.inode != found.st_ino or place.offset > found.st_size)
            start = 0 if is_reset else place.offset
            file.seek(start)
            text = file.read(found.st_size - start)
    except FileNotFoundError:
        return NewLines([], Place(0, 0), place.offset > 0)
    whole = text[: text.rfind(b"\n") + 1]
    lines = [line for line in whole.splitlines() if not line.startswith(_HEADER)]
    return NewLines(lines, Place(found.st_ino, start + len(whole)), is_reset)


def _decoded(lines: Sequence[bytes], decode: Callable[[bytes], Item]) -> list[Item]:
    return [decode(line) for line in lines]


def _json_bytes(value: Mapping[str, object]) -> bytes:
    return orjson.dumps(value, default=msgspec.to_builtins)
