"""Seconds and peak memory of importing the rollout side in a fresh interpreter, beside a bare one.

Run: .venv/bin/python -m benchmarks.import_cost        (about fifteen seconds)
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "import_cost.json"
REPEATS = 7
MODULES = [
    "agentrl.types",
    "agentrl.tokens",
    "agentrl.client",
    "agentrl.workflow",
    "agentrl.rollout",
    "agentrl.engine.engine",
    "agentrl.config",
]
PROBE = r"""
import importlib, json, re, sys, time
begin, cpu = time.perf_counter(), time.process_time()
for name in sys.argv[1:]:
    importlib.import_module(name)
peak = re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1]
print(json.dumps({"wall_s": time.perf_counter() - begin, "cpu_s": time.process_time() - cpu, "peak_mb": int(peak) / 1024}))
"""


def measure(*modules: str) -> dict[str, float]:
    """Return the medians over fresh interpreters that import `modules`."""
    runs: list[dict[str, float]] = []
    for _ in range(REPEATS):
        out = subprocess.run([sys.executable, "-c", PROBE, *modules], capture_output=True, text=True, check=True)
        runs.append(json.loads(out.stdout))
    return {key: round(statistics.median(run[key] for run in runs), 4) for key in runs[0]}


def main() -> None:
    """Measure, print and record."""
    found = {"bare": measure(), "openai alone": measure("openai"), "rollout side": measure(*MODULES)}
    for name, values in found.items():
        print(f"{name:<14} {values}")
    RESULTS.write_text(json.dumps({"targets": {"wall_s": 1.0, "peak_mb": 120}, "medians": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
