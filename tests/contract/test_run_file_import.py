"""Reading a run file stays light: it loads as many modules as journeys.toml says."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUDGET = tomllib.loads(Path(__file__).with_name("journeys.toml").read_text())["modules"]["run_file"]
PROBE = """
import json, sys
from agentrl.config import load_config
load_config("examples/gpu/qwen3-1.7b-one-gpu.yaml")
print(json.dumps(sorted(name for name in sys.modules if name.split(".")[0] == "agentrl")))
"""


@pytest.mark.starts
def test_reading_a_run_file_loads_few_modules_and_no_part_that_a_run_starts() -> None:
    out = subprocess.run([sys.executable, "-c", PROBE], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert out.returncode == 0, out.stderr
    loaded: list[str] = json.loads(out.stdout)
    assert {"agentrl.config.run", "agentrl.trainer.config"} <= set(loaded)
    assert not any(
        name.startswith(("agentrl.trainer.scripted", "agentrl.client.endpoint", "agentrl.tokens")) for name in loaded
    )
    assert len(loaded) == BUDGET, "\n".join(loaded)
