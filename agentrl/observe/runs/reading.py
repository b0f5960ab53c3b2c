"""Read the files of a run, without the lines of work that was lost when a process was killed.

Invariant: of what these functions return, every step, evaluation and episode id is there once, however often the run was
resumed. A resumed run goes back to a checkpoint; the `resumed` event says which groups and evaluations run again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec
import orjson

from agentrl.episode.summary import EPISODES_HEADER, INDEX_HEADER, TRAINED_HEADER, EpisodeSummary
from agentrl.errors import ConfigError
from agentrl.observe.episode_files import read_lines, step_file, trained_file

_Record: TypeAlias = dict[str, Any]
_OF_A_STEP = ("step", "checkpoint", "evaluation", "evaluation_skipped")
RESUMED_MARK = b'{"event":"resumed"'
"""Beginning of the line that takes back the work of a killed process."""
ONLINE_FOLDER = "online"
"""The folder of a run whose episodes are conversations with clients."""
_SUMMARIES = msgspec.json.Decoder(EpisodeSummary)


class RecordedLine(NamedTuple):
    """An index line and the line of the full record."""

    summary: EpisodeSummary
    record: bytes
    """JSON of a `RecordedEpisode`."""


def read_metrics(run_dir: str | Path) -> Iterator[_Record]:
    """Yield the events of `metrics.jsonl` that stand, in order."""
    path = Path(run_dir) / "metrics.jsonl"
    marks = [(number, orjson.loads(line)) for number, line in enumerate(read_lines(path)) if line.startswith(RESUMED_MARK)]
    for number, line in enumerate(read_lines(path)):
        event: _Record = orjson.loads(line)
        if not any(at > number and _event_is_lost(event, mark) for at, mark in marks):
            yield event


def read_index(run_dir: str | Path) -> list[EpisodeSummary]:
    """Return the lines of `episodes/index.jsonl` that stand, in the order in which episodes ended; none if none are saved.

    Raises:
        ConfigError: the index has another format, or a later version of it.
    """
    path = Path(run_dir) / "episodes" / "index.jsonl"
    if not path.exists():
        return []
    lines = read_lines(path)
    check_header(path, next(lines, None), INDEX_HEADER)
    found: list[EpisodeSummary] = []
    for line in lines:
        if line.startswith(RESUMED_MARK):
            mark = orjson.loads(line)
            found = [summary for summary in found if not _runs_again(summary.group, summary.episode_id, mark)]
        else:
            found.append(_SUMMARIES.decode(line))
    return found


def read_record_lines(run_dir: str | Path, summaries: Sequence[EpisodeSummary] | None = None) -> Iterator[RecordedLine]:
    """Yield the records of episodes, one file after the other, in the order of each file; pruned ones are left out.

    `summaries` are lines of the index; None: all that stand.

    Raises:
        ConfigError: a file has another format, or a later version of it.
    """
    by_file: dict[str, dict[int, EpisodeSummary]] = {}
    for summary in read_index(run_dir) if summaries is None else summaries:
        by_file.setdefault(summary.file, {})[summary.line] = summary
    for name, wanted in by_file.items():
        path, last = Path(run_dir) / "episodes" / f"{name}.jsonl", max(wanted)
        try:
            for number, line in enumerate(read_lines(path)):
                if number == 0:
                    check_header(path, line, EPISODES_HEADER)
                if number in wanted and line != b"\n":
                    yield RecordedLine(wanted[number], line)
                if number == last:
                    break
        except FileNotFoundError:
            continue  # pruned


def read_record(run_dir: str | Path, summary: EpisodeSummary) -> bytes:
    """Return the record of one episode, the JSON of a `RecordedEpisode`; raises ConfigError where it was pruned."""
    for found in read_record_lines(run_dir, [summary]):
        return found.record
    raise ConfigError(
        f"{step_file(Path(run_dir) / 'episodes', summary.step)} no longer holds the record of episode {summary.episode_id}: "
        "engine.keep_episode_steps let the run delete it; the index line is all that is left"
    )


def read_trained_lines(run_dir: str | Path, step: int) -> Iterator[bytes]:
    """Yield the JSON of each `TrainedEpisode` of a step; nothing where it is not written yet, or pruned."""
    path = trained_file(Path(run_dir) / "episodes", step)
    if not path.exists():
        return
    lines = read_lines(path.with_suffix(""))
    check_header(path, next(lines, None), TRAINED_HEADER)
    yield from lines


def check_header(path: Path, line: bytes | None, expected: Mapping[str, object]) -> None:
    """Check the first line of a file; raises ConfigError for another format, or a later version of it."""
    try:
        header: object = None if line is None else orjson.loads(line)
    except orjson.JSONDecodeError:
        header = line
    if header != expected:
        raise ConfigError(
            f"{path}: expected the header {orjson.dumps(expected).decode()}, got {header!r:.80}; "
            "another release of agentrl wrote this file, or something else did"
        )


def _event_is_lost(event: _Record, mark: _Record) -> bool:
    kind = event["event"]
    if kind == "evaluation" and event["step"] in mark["evaluations_due"]:
        return True
    if kind in _OF_A_STEP:
        return event["step"] > mark["step"]
    if kind == "episode_failed":
        return _runs_again(event["group"], event["episode_id"], mark)
    return kind == "dropped_group" and _group_runs_again(event["group"], mark)


def _runs_again(group: int | None, episode_id: str, mark: _Record) -> bool:
    if group is not None:
        return _group_runs_again(group, mark)
    step = int(episode_id.split(".")[1])  # eval.STEP.NUMBER
    return step > mark["step"] or step in mark["evaluations_due"]


def _group_runs_again(group: int, mark: Mapping[str, Any]) -> bool:
    return group >= mark["groups_admitted"] or group in mark["groups_open"]
