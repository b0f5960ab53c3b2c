"""`agentrl diff` prints what two runs do not share."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.errors import ConfigError
from agentrl_viewer.commands.diff import describe_difference
from tests.support.synthetic_run import write_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("runs")
    left = write_run(folder / "low", steps=4, with_records=False, fields={"trainer": {"lr": 1e-6}})
    return left, write_run(folder / "high", steps=4, with_records=False, seed=1, fields={"trainer": {"lr": 1e-5}})


def test_it_prints_fields_figures_and_tasks(runs: tuple[Path, Path]) -> None:
    text = describe_difference(*runs)
    lines = [line.split() for line in text.splitlines()]
    assert ["trainer.lr", "1.0e-06", "1.0e-05"] in lines
    assert any(line[:1] == ["success_rate"] and len(line) == 4 for line in lines)
    assert "Both runs evaluated 16 tasks" in text
    assert "Both runs trained 32 tasks" in text
    assert text.count("What is ") == 20 + sum(line[0].startswith("held-out-") for line in lines if line)
    assert "trainer.behavior_weight_mean" not in text


def test_all_prints_every_figure(runs: tuple[Path, Path]) -> None:
    assert "staleness_p50" not in describe_difference(*runs)
    assert "staleness_p50" in describe_difference(*runs, every=True)


def test_a_run_does_not_differ_from_itself(runs: tuple[Path, Path]) -> None:
    text = describe_difference(runs[0], runs[0])
    assert "The run files have the same fields." in text
    assert "0 succeed more often and 0 less" in text


@pytest.mark.starts
def test_the_command_prints_it_and_names_what_is_no_run(runs: tuple[Path, Path]) -> None:
    def ended(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "agentrl", "diff", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)

    good = ended(*map(str, runs))
    assert (good.returncode, good.stderr) == (0, "")
    assert good.stdout.startswith("fields that differ")
    bad = ended(str(runs[0]), str(runs[1] / "none"))
    assert bad.returncode == 2
    assert "is no run directory" in bad.stderr


def test_text_of_a_run_cannot_move_the_cursor(tmp_path: Path) -> None:
    left = write_run(tmp_path / "a", steps=1, with_records=False, fields={"workflow_args": {"x": "\x1b[2J"}})
    right = write_run(tmp_path / "b", steps=1, with_records=False)
    assert "\x1b" not in describe_difference(left, right)


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no run directory"):
        describe_difference(tmp_path, tmp_path)
