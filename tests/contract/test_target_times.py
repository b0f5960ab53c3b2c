"""The table of commands in CONTRIBUTING.md takes up what `.ci/run` measured, and has every command that it runs."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from scripts.target_times import PAGE, ROOT, START, commands, read_times, with_times


def test_only_the_minutes_of_measured_commands_change(tmp_path: Path) -> None:
    times = tmp_path / "times.csv"
    times.write_text("make test,600\nmake check,90\nmake test,660\n")
    page = PAGE.read_text()
    changed = with_times(page, read_times(times))
    lines = {old: new for old, new in zip(page.splitlines(), changed.splitlines(), strict=True) if old != new}
    assert {line.split("`")[1]: line.rsplit("|", 2)[1].strip() for line in lines.values()} == {
        "make test": "11",
        "make check": "1.5",
    }


def test_the_table_has_every_command_of_a_landing() -> None:
    run = re.findall(r"^timed (make .+)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert START in PAGE.read_text()
    assert run
    assert set(run) <= set(commands(PAGE.read_text()))


def test_a_landing_records_what_succeeds_and_ends_at_what_fails(tmp_path: Path) -> None:
    script = (ROOT / ".ci" / "run").read_text()
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci" / "run").write_text(
        re.sub(r"^timed make .+$", "timed true one\ntimed false two\n", script, flags=re.M)
    )
    ended = subprocess.run(["bash", tmp_path / ".ci" / "run"], check=False)
    assert ended.returncode == 1
    assert list(read_times(tmp_path / ".ci" / "times.csv")) == ["true one"]
