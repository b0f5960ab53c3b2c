"""Imports go down only; the contract is in pyproject.toml."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.processes
def test_the_import_layers_hold() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_module_of_the_package_is_in_a_layer() -> None:
    """import-linter has no `exhaustive` for layers of several packages."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    [layers] = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    # The modules of a room may stand in several layers, as those of agentrl.config do.
    named = {".".join(name.strip().split(".")[:2]) for layer in layers for name in layer.split("|")}
    files = [path for path in (ROOT / "agentrl").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    modules = {f"agentrl.{path.stem}" for path in files if not path.stem.startswith("__")}
    assert modules - named == set()
