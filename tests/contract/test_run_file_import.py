"""Reading a run file stays light: the modules that it loads are counted, and the count may only fall."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST = 54
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
    assert len(loaded) <= MOST, "\n".join(loaded)
