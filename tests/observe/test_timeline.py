"""The timeline of a run is read line by line."""

from __future__ import annotations

from pathlib import Path

import msgspec

from agentrl.observe.timeline import Activity, read_timeline


def test_half_a_line_at_the_end_is_left_out(tmp_path: Path) -> None:
    update = Activity(actor="servers", activity="update", start_s=100.5, end_s=101.25, step=3)
    (tmp_path / "timeline.jsonl").write_bytes(msgspec.json.encode(update) + b'\n{"actor":"trainer","act')
    assert list(read_timeline(tmp_path)) == [update]


def test_a_run_that_has_not_begun_has_no_activities(tmp_path: Path) -> None:
    assert list(read_timeline(tmp_path)) == []
