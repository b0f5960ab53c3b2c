"""The table of commands in CONTRIBUTING.md takes up what `.ci/run` measured, and has every command that it runs."""

from __future__ import annotations

import json
from pathlib import Path

from scripts.ci import EVERYTHING, targets
from scripts.target_times import PAGE, START, commands, read_times, with_times


def test_only_the_minutes_of_measured_commands_change(tmp_path: Path) -> None:
    times = tmp_path / "times.jsonl"
    times.write_text(
        "".join(json.dumps({"target": name, "seconds": s}) + "\n" for name, s in (("test", 660), ("check", 90)))
    )
    page = PAGE.read_text()
    changed = with_times(page, read_times(times))
    lines = {old: new for old, new in zip(page.splitlines(), changed.splitlines(), strict=True) if old != new}
    assert {line.split("`")[1]: line.rsplit("|", 2)[1].strip() for line in lines.values()} == {
        "make test": "11",
        "make check": "1.5",
    }


def test_the_table_has_every_command_of_a_landing() -> None:
    assert START in PAGE.read_text()
    run = {*EVERYTHING, *targets(["agentrl_viewer"])}
    assert {f"make {target}" for target in run} <= set(commands(PAGE.read_text()))
