"""The clock of a run: seconds since the run began, in whichever process.

Invariant: it never goes back. A resumed run continues from the last time that an earlier process recorded.
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
