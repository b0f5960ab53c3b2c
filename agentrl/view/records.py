"""A pass over the records of a run that keeps little of each: the ages of trained tokens.

Invariant: a pass holds one record at a time.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Final

import msgspec

from agentrl.observe.episode_files import read_lines, trained_file
from agentrl.observe.episode_record import TRAINED_HEADER
from agentrl.runs.reading import check_header, read_index, read_record_lines


class TrainedVersion(msgspec.Struct, frozen=True):
    """What the pass keeps of a line of a `trained` file."""

    episode_id: str
    policy_version: int


class SpansOfTurn(msgspec.Struct, frozen=True):
    """The policy versions of a turn: `(start, end, version)`."""

    spans: list[tuple[int, int, int]]


class SpansOfEpisode(msgspec.Struct, frozen=True):
    """The policy versions of an episode's turns."""

    turns: list[SpansOfTurn]


_TRAINED: Final = msgspec.json.Decoder(TrainedVersion)
_SPANS: Final = msgspec.json.Decoder(SpansOfEpisode)


def trained_ages(run_dir: Path, step: int) -> Counter[int]:
    """Return how many output tokens of each age are in the episodes that a step trained.

    The age of a token is the version that was trained minus the one that sampled it. Empty where no record is kept of what
    the step trained.
    """
    versions = _trained_versions(run_dir, step)
    wanted = [summary for summary in read_index(run_dir) if summary.episode_id in versions]
    ages: Counter[int] = Counter()
    for found in read_record_lines(run_dir, wanted):
        trained = versions[found.summary.episode_id]
        for turn in _SPANS.decode(found.record).turns:
            for start, end, version in turn.spans:
                ages[trained - version] += end - start
    return ages


def _trained_versions(run_dir: Path, step: int) -> dict[str, int]:
    """Return the version that a step trained, for each of its episodes."""
    path = trained_file(run_dir / "episodes", step)
    if not path.exists():
        return {}
    lines = read_lines(path.with_suffix(""))
    check_header(path, next(lines, None), TRAINED_HEADER)
    return {line.episode_id: line.policy_version for line in map(_TRAINED.decode, lines)}
