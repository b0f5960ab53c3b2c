"""`scripts/lanes.py`: a change runs the tests of what it touches and of what imports that, and everything where in doubt."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from scripts import lanes as lanes_module
from scripts.lanes import COMPANIONS, CORE, ELSEWHERE, changed_files, paths_of, touched

ROOT = Path(__file__).parents[2]


def test_every_folder_of_tests_belongs_to_one_package_or_to_a_target_of_its_own() -> None:
    owned = [path for package in (CORE, *COMPANIONS) for path in paths_of(package)]
    assert sorted(owned) == sorted(set(owned))
    there = {f"tests/{path.name}" for path in (ROOT / "tests").iterdir() if path.is_dir() or path.match("test_*.py")}
    assert {path for path in there if "__" not in path} == {*owned, *(f"tests/{name}" for name in ELSEWHERE)} - {CORE}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["companions/agentrl_viewer/view/app.py", "docs/concepts.md"], ["agentrl_viewer"]),
        (["envs/agentrl_rewards/math.py"], ["agentrl_envs", "agentrl_rewards", "agentrl_workflows"]),
        (["tests/gateway/test_doors.py"], ["agentrl_doors"]),
        (["examples/01_hello.py"], ["agentrl_workflows"]),
        (["tests/engine/test_engine.py", "README.md"], []),
        (["agentrl/engine/engine.py"], None),
        (["companions/agentrl_viewer/view/app.py", "pyproject.toml"], None),
        (["tests/support/cli.py"], None),
        (["tests/conftest.py"], None),
        ([".ci/run"], None),
    ],
)
def test_a_change_needs_the_lanes_of_what_it_touches_and_of_what_imports_that(
    files: list[str], expected: list[str] | None
) -> None:
    found = touched(files)
    assert found == expected if expected is None else set(found or ()) == set(expected)


def git(folder: Path, *arguments: str) -> None:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b.test", *arguments]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)


@pytest.mark.starts
def test_the_change_is_what_differs_from_where_the_branch_left_main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes_module, "ROOT", tmp_path)
    monkeypatch.delenv("AGENTRL_BASE", raising=False)
    git(tmp_path, "init", "--initial-branch=main")
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("1\n")
        git(tmp_path, "add", "-A")
        git(tmp_path, "commit", "-m", name)
    assert changed_files() is None, "on the main branch itself"
    git(tmp_path, "switch", "-c", "mine", "HEAD~1")
    (tmp_path / "c.py").write_text("1\n")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-m", "c")
    (tmp_path / "new.py").write_text("1\n")
    assert changed_files() == ["c.py", "new.py"], "b.py, which only main has, is not of the change"
    monkeypatch.setenv("AGENTRL_BASE", "nowhere")
    assert changed_files() is None
