"""The rollout side stays light: no torch, transformers, ray or sglang, and little memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "agentrl",
    "workflows/agentrl_workflows",
    *(f"envs/agentrl_{name}" for name in ("envs", "rewards", "sandbox")),
    *(f"companions/agentrl_{name}" for name in ("doors", "simulate", "testing", "viewer")),
)
COMPUTES = (
    "agentrl.servers.embedded",
    "agentrl.weights.heads",
    "agentrl.weights.modules",
    "agentrl.weights.process_group",
    "agentrl_testing.properties.check_policy_loss",
    "agentrl_testing.properties.loss_batches",
)
"""Beside the training spine, what is made of tensors: a server in a process, modules, groups, checks of losses."""
HEAVY = ("torch", "transformers", "ray", "sglang")
PROBE = r"""
import importlib, json, re, sys
heavy, loaded_by = set(sys.argv[2:]), {}
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
    for package in heavy.intersection(sys.modules) - loaded_by.keys():
        loaded_by[package] = name
peak_kb = re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1]  # unlike ru_maxrss, not inherited over exec
print(json.dumps({"loaded_by": loaded_by, "mb": int(peak_kb) / 1024}))
"""


def contract(name: str) -> dict[str, Any]:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    return next(found for found in contracts if found["name"] == name)


def modules() -> list[str]:
    """Return every module that is shipped, but for the scripts that run when imported or belong to another Python."""
    found: list[str] = []
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(file.relative_to((ROOT / package).parent).with_suffix("").parts)
            found.append(name.removesuffix(".__init__"))
    return [name for name in found if not name.endswith("__main__") and not name.startswith("agentrl_envs.servers.")]


def light() -> list[str]:
    """Return every module but those of the training spine and those that compute with tensors."""
    spine: list[str] = contract("the rollout spine does not know the training spine")["forbidden_modules"]
    beside = (*spine, *COMPUTES)
    return [name for name in modules() if not any(f"{name}.".startswith(f"{other}.") for other in beside)]


def imported(*names: str) -> tuple[dict[str, str], float]:
    """Return which module was the first to load each heavy package, and the peak memory in megabytes."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", PROBE, json.dumps(names), *HEAVY]
    out = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert out.returncode == 0, out.stderr
    found = json.loads(out.stdout)
    return found["loaded_by"], found["mb"]


def test_the_list_is_every_module_of_the_packages_that_the_import_contract_calls_the_rollout_spine() -> None:
    names = light()
    spine: list[str] = contract("the rollout spine does not know the training spine")["source_modules"]
    for package in (
        *spine,
        "agentrl.engine",
        "agentrl.observe",
        "agentrl.commands.main",
        "agentrl_envs",
        "agentrl_workflows",
    ):
        missing = {name for name in modules() if f"{name}.".startswith(f"{package}.")} - set(names)
        assert [name for name in missing if not name.startswith(COMPUTES)] == []
        assert any(f"{name}.".startswith(f"{package}.") for name in names), package
    some = {"agentrl", "agentrl.config", "agentrl.engine.engine", "agentrl.inference.pool.pool", "agentrl.rollout.episode"}
    assert some <= set(names)


@pytest.mark.starts
def test_importing_the_whole_rollout_side_loads_nothing_heavy_and_takes_under_120_megabytes() -> None:
    imported(*light())  # to compile a module takes memory, too
    loaded_by, megabytes = imported(*light())
    assert loaded_by == {}
    assert megabytes < 120


@pytest.mark.starts
def test_a_module_that_loads_something_heavy_is_named() -> None:
    loaded_by, _ = imported("agentrl.types", "agentrl.weights.process_group", "agentrl.errors")
    assert loaded_by == {"torch": "agentrl.weights.process_group"}
