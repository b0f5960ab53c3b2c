"""The time and the version that a resumed run continues from, read from its `metrics.jsonl`.

Invariant: the clock of a run, seconds since it began in whichever process, never goes back. A run records a version
before any server can have it.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

_TAIL_BYTES = 1 << 20


class _Timed(msgspec.Struct):
    wall_s: float = 0.0


def last_wall_s(run_dir: Path) -> float:
    """Return the time of the last whole line of a run's `metrics.jsonl`, seconds; 0 where there is no such line.

    Example:
        >>> last_wall_s(Path("no-such-run"))
        0.0
    """
    path = run_dir / "metrics.jsonl"
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().splitlines(keepends=True)
    except FileNotFoundError:
        return 0.0
    for line in reversed(lines):
        if line.endswith(b"\n"):
            try:
                return msgspec.json.decode(line, type=_Timed).wall_s
            except msgspec.DecodeError:
                continue  # not a line of a run
    return 0.0


class _Versioned(msgspec.Struct):
    policy_version: int = 0
    """In use when the line was written."""
    version: int = 0
    """About to be published, in a line `publishing`."""


def last_version(run_dir: Path) -> int:
    """Return the highest version in a run's `metrics.jsonl`, also of work that was lost; 0 where there is none.

    Example:
        >>> last_version(Path("no-such-run"))
        0
    """
    highest = 0
    try:
        with (run_dir / "metrics.jsonl").open("rb") as file:
            for line in file:
                try:
                    record = msgspec.json.decode(line, type=_Versioned)
                except msgspec.DecodeError:
                    continue  # half a line that a killed process left
                highest = max(highest, record.policy_version, record.version)
    except FileNotFoundError:
        return 0
    return highest
