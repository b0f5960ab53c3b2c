"""The versions of the weights that a run has used, in whichever process.

Invariant: the run records a version before any server can have it.
"""

from __future__ import annotations

from pathlib import Path

import msgspec


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
