"""The highest version that a run has used, from its journal."""

from __future__ import annotations

from pathlib import Path

from agentrl.observe.resuming import last_version


def test_a_version_counts_once_it_is_about_to_be_published_and_also_when_its_work_was_lost(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"event":"publishing","policy_version":4,"version":5}\n'
        '{"event":"step","policy_version":4,"step":4}\n'
        '{"event":"publishing","policy_version":5,"version":6}\n'
        '{"event":"resumed","policy_version":3,"step":2}\n'
        '{"event":"publishing","policy_ver'
    )
    assert last_version(tmp_path) == 6
