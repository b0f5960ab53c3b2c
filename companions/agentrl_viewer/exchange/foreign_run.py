"""Files of other programs as the directory of a run, which the viewer reads as any other.

Invariant: every episode has an id of its own, and a return only where the files give a reward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from agentrl.episode.checks import check_turn
from agentrl.episode.codec import encode_line, stored_trajectory
from agentrl.episode.summary import EPISODES_HEADER, INDEX_HEADER, EndedEpisode, EpisodeSummary, summarize
from agentrl.errors import ConfigError, InvariantError
from agentrl.observe.records import JsonLines
from agentrl_viewer.exchange.atif_messages import WireMessage
from agentrl_viewer.exchange.atif_read import read_atif
from agentrl_viewer.exchange.foreign_record import EpisodeRecord, ReadEpisode
from agentrl_viewer.exchange.inspect_read import INSPECT_MARKS, read_inspect

Closing: TypeAlias = Mapping[str, Mapping[int, Sequence[WireMessage]]]
"""The messages after the last answer of a conversation, by episode and turn."""
_MARK: Final = b'"ATIF-v'
_FILE: Final = "step-000000"
RUN_FILES: Final = ("config.yaml", "metrics.jsonl", "episodes")
"""A directory that has one of these is a run."""


def is_foreign(source: Path) -> bool:
    """Return whether a path is a file, or a folder that is no run and holds trajectories of other programs."""
    if source.is_file():
        return True
    is_run = any((source / name).exists() for name in RUN_FILES)
    return not is_run and next(_trajectory_files(source), None) is not None


def write_foreign_run(source: Path, folder: Path) -> Closing:
    """Write the episodes of a file, or of all files below a folder, as a run directory.

    Raises:
        ConfigError: a file is damaged.
    """
    found: dict[str, Mapping[int, Sequence[WireMessage]]] = {}
    (folder / "metrics.jsonl").touch()
    index = JsonLines(folder / "episodes" / "index.jsonl", header=INDEX_HEADER)
    lines = JsonLines(folder / "episodes" / f"{_FILE}.jsonl", header=EPISODES_HEADER)
    try:
        for file in [source] if source.is_file() else _trajectory_files(source):
            for read in _read_file(file):
                identity = _free_name(read.record["episode_id"], found)
                record = {**read.record, "episode_id": identity, "turns": _with_closing(read)}
                found[identity] = read.closing
                lines.append(record)
                index.append(msgspec.structs.asdict(_summary(record, file, len(found))))
    finally:
        index.close()
        lines.close()
    return found


def _trajectory_files(folder: Path) -> Iterator[Path]:
    for file in sorted(folder.rglob("*")):
        if file.suffix in (".eval", ".json") and file.is_file() and (file.suffix == ".eval" or _is_known(file.read_bytes())):
            yield file


def _is_known(text: bytes) -> bool:
    return _MARK in text or all(mark in text for mark in INSPECT_MARKS)


def _read_file(file: Path) -> Iterator[ReadEpisode]:
    try:
        text = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    if _MARK not in text and (file.suffix == ".eval" or _is_known(text)):
        yield from read_inspect(file)
    else:
        yield read_atif(text, file)


def _free_name(wanted: object, taken: Mapping[str, object]) -> str:
    name = str(wanted)
    number = 2
    while name in taken:
        name = f"{wanted} ({number})"
        number += 1
    return name


def _with_closing(read: ReadEpisode) -> list[EpisodeRecord]:
    """Return the turns with what followed them, which a search finds too."""
    turns: list[EpisodeRecord] = read.record["turns"]
    return [{**turn, "closing": read.closing[at]} if at in read.closing else turn for at, turn in enumerate(turns)]


def _summary(record: EpisodeRecord, file: Path, line: int) -> EpisodeSummary:
    try:
        trajectory = stored_trajectory(encode_line(record))
        for number, turn in enumerate(trajectory.turns):
            parent = None if turn.parent is None else trajectory.turns[turn.parent]
            check_turn(turn, parent, f"turn {number}")
        ended = EndedEpisode(
            trajectory,
            purpose=record["purpose"],
            group=record["group"],
            step=record["step"],
            policy_version=record["policy_version"],
            run_begin_s=0.0,
        )
    except (msgspec.DecodeError, InvariantError, KeyError, TypeError, IndexError, OverflowError) as error:
        raise ConfigError(f"{file} holds no whole episode: {type(error).__name__}: {error}") from error
    summary = summarize(ended, file=_FILE, line=line)
    graded = {name: record.get(name) for name in ("episode_return", "success")}
    return msgspec.structs.replace(summary, **graded)
