"""`scripts/ci.py`: which targets a change runs, and what is told at the end."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from scripts import ci as ci_module
from scripts.ci import EVERYTHING, Ended, installations, run_target, summary, targets, write_times
from scripts.lanes import COMPANIONS

MAKEFILE = (Path(__file__).parents[2] / "Makefile").read_text()


def test_a_landing_runs_the_core_its_lanes_conformance_and_the_short_fault_matrix() -> None:
    assert targets(None) == list(EVERYTHING)
    assert targets(["agentrl_viewer"]) == [
        "check",
        "test-core",
        "lane PACKAGE=agentrl_viewer",
        "test-conformance",
        "chaos CELLS=short",
    ]


def test_what_targets_install_begins_before_them() -> None:
    assert installations(targets(["agentrl_envs"])) == ["lane-install PACKAGE=agentrl_envs", "sglang-install"]
    assert installations(EVERYTHING) == [
        "clients-install",
        "envs-install",
        "browser-install",
        "containers-install",
        "sglang-install",
    ]


def test_every_target_is_one_of_the_makefile() -> None:
    known = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
    chosen = [*targets(None), *targets(COMPANIONS)]
    assert {words.split()[0] for words in [*chosen, *installations(chosen)]} <= known


@pytest.mark.starts
def test_a_target_that_fails_is_told_again_at_the_end_and_every_time_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    (tmp_path / "Makefile").write_text("good:\n\t@echo fine\nbad:\n\t@echo the reason $(CELLS); exit 3\n")
    monkeypatch.setattr(ci_module, "ROOT", tmp_path)
    monkeypatch.setattr(ci_module, "LOGS", tmp_path)
    monkeypatch.setattr(ci_module, "TIMES", tmp_path / "times.jsonl")
    good, bad = run_target("good"), run_target("bad CELLS=short")
    assert (good.status, bad.status != 0) == (0, True)
    assert b"fine" in capfdbinary.readouterr().out
    told = summary([bad, good])
    assert "=== make bad CELLS=short failed" in told
    assert told.count("the reason short") == 1
    assert re.search(
        r"bad CELLS=short +\d+\.\d min, .*failed\ngood +\d+\.\d min, +\d+\.\d of a core\nin all +\d+\.\d min, .*core$", told
    )
    write_times([Ended("check", 61.25, 100.0, 0, tmp_path)])
    [line] = (tmp_path / "times.jsonl").read_text().splitlines()
    assert json.loads(line).keys() == {"target", "seconds", "cpu_seconds", "cores"}
