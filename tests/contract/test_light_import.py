"""The rollout side stays light: no torch, transformers, ray or sglang, and little memory."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

LIGHT = (
    "agentrl",
    "agentrl.types",
    "agentrl.tokens",
    "agentrl.client",
    "agentrl.workflow",
    "agentrl.inference",
    "agentrl.rollout",
    "agentrl.engine",
    "agentrl.observe",
    "agentrl.config",
    "agentrl.launch.cli",
    "agentrl_envs",
    "agentrl_workflows",
    "agentrl_workflows.calculator",
)
HEAVY = ("torch", "transformers", "ray", "sglang")
PROBE = r"""
import importlib, json, re, sys
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
peak_kb = re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1]  # unlike ru_maxrss, not inherited over exec
print(json.dumps({"modules": sorted(sys.modules), "mb": int(peak_kb) / 1024}))
"""


def imported(*names: str) -> tuple[set[str], float]:
    out = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(names)], capture_output=True, text=True, check=True, timeout=60
    )
    found = json.loads(out.stdout)
    return set(found["modules"]), found["mb"]


@pytest.mark.parametrize("name", LIGHT)
def test_importing_a_rollout_module_loads_nothing_heavy(name: str) -> None:
    modules, _ = imported(name)
    assert not modules & set(HEAVY)


def test_the_whole_rollout_side_imports_in_120_megabytes() -> None:
    modules, megabytes = imported(*LIGHT)
    assert not modules & set(HEAVY)
    assert megabytes < 120
