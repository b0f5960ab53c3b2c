"""Fill in how long the commands of CONTRIBUTING.md take, as `.ci/run` measured them.

    python -m scripts.target_times

`.ci/run` writes a line for each target to `build/ci_times.jsonl`. Invariant: of the table between the two markers only the
last column of measured commands changes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
TIMES = ROOT / "build" / "ci_times.jsonl"
START, END = "<!-- times -->\n", "<!-- end of times -->\n"


def read_times(path: Path) -> dict[str, float]:
    """Return the seconds of each command."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {f"make {line['target']}": float(line["seconds"]) for line in lines}


def with_times(page: str, seconds: Mapping[str, float]) -> str:
    """Return the page with the minutes of the commands in its table."""
    before, table, after = _parts(page)
    rows = [_row(line, seconds) for line in table.splitlines(keepends=True)]
    return "".join([before, START, *rows, END, after])


def commands(page: str) -> list[str]:
    """Return the commands of the table."""
    return re.findall(r"^\| `([^`]+)`", _parts(page)[1], re.MULTILINE)


def _parts(page: str) -> tuple[str, str, str]:
    before, _, rest = page.partition(START)
    table, _, after = rest.partition(END)
    return before, table, after


def _row(line: str, seconds: Mapping[str, float]) -> str:
    command = re.match(r"\| `([^`]+)`", line)
    if command is None or command[1] not in seconds:
        return line
    minutes = seconds[command[1]] / 60
    written = f"{minutes:.1f}" if minutes < 10 else f"{minutes:.0f}"
    return re.sub(r"\| [^|]* \|$", f"| {written} |", line)


if __name__ == "__main__":
    PAGE.write_text(with_times(PAGE.read_text(), read_times(TIMES)))
