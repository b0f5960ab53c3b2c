"""Imports go down only; the contract is in pyproject.toml."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TypeGuard

import pytest

from agentrl.support.companions import ENTRY_POINTS, load_companion

ROOT = Path(__file__).parents[2]
ROOTS = ("agentrl", "companions", "envs", "workflows")
NAMING = {
    "agentrl/support/companions.py",
    "agentrl/support/moved.py",
    "agentrl/config/run.py",
    "agentrl/plan/text.py",
    "agentrl/processes/watchdog/stacks.py",
}
"""Files with names of companions; the last three only compare them, with a run file's words or with frames."""


@pytest.mark.starts
def test_the_import_layers_hold() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_module_of_the_core_is_in_a_layer() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    [core] = [contract for contract in contracts if contract.get("containers") == ["agentrl"]]
    assert (core["exhaustive"], core["exhaustive_ignores"]) == (True, ["config"]), "its modules stand in two layers"


def strings_of(file: Path) -> set[str]:
    """Return the strings of a file, docstrings left out."""
    tree = ast.parse(file.read_text())
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    notes = {id(node.body[0].value) for node in ast.walk(tree) if isinstance(node, documented) and is_note(node.body[0])}
    constants = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in notes)
    return {node.value for node in constants if isinstance(node.value, str)}


def is_note(statement: ast.stmt) -> TypeGuard[ast.Expr]:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def test_the_core_names_a_companion_in_two_files_alone() -> None:
    """Neither in an import, which import-linter sees, nor in a string that could be imported."""
    companion = re.compile(r"agentrl_(doors|envs|rewards|sandbox|simulate|testing|viewer|workflows)(\.\w+)*(:\w+)?")
    named = {
        str(file.relative_to(ROOT))
        for file in sorted((ROOT / "agentrl").rglob("*.py"))
        if any(companion.fullmatch(text) for text in strings_of(file))
    }
    assert named <= NAMING, named - NAMING


def test_what_joins_the_core_is_the_same_installed_and_from_a_checkout() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {group: entries for group, entries in project["entry-points"].items() if group != "agentrl.environments"}
    assert declared == ENTRY_POINTS
    for group, entries in ENTRY_POINTS.items():
        for name in entries:
            assert load_companion(group, name) is not None


def test_no_package_has_a_module_that_is_imported_by_a_string_of_its_name() -> None:
    calls = re.compile(r"import_module\(\s*f?[\"']agentrl")
    found = [file for root in ROOTS for file in (ROOT / root).rglob("*.py") if calls.search(file.read_text())]
    assert found == []
