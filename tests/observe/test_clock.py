"""The run's clock continues from the last line of the metrics."""

from __future__ import annotations

import json
from pathlib import Path

from agentrl.observe.resuming import last_wall_s


def test_the_time_is_that_of_the_last_whole_line(tmp_path: Path) -> None:
    lines = [json.dumps({"event": "step", "wall_s": wall_s}) for wall_s in (1.5, 20.25)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"event": "step", "wall_s": 99')
    assert last_wall_s(tmp_path) == 20.25


def test_the_last_line_may_be_long(tmp_path: Path) -> None:
    line = {"event": "end", "wall_s": 7.0, "error": "x" * (1 << 18)}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert last_wall_s(tmp_path) == 7.0


def test_a_file_without_a_line_of_a_run_starts_at_zero(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("half a li")
    assert last_wall_s(tmp_path) == 0.0
