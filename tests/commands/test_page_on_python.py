"""The page on Python calls runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny import tiny_checkpoint

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "python.md"


@pytest.mark.starts
@pytest.mark.long
def test_the_calls_of_the_page_train_evaluate_and_serve(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "runs" / "demo" / "warm-start")
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    program = "\n".join([*blocks, "import anyio", "anyio.run(compare)", "anyio.run(look)", "read()"])
    (tmp_path / "page.py").write_text(program)
    command = [sys.executable, "page.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, encoding="utf-8", timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.startswith("runs/addition runs/addition/checkpoints/step-000003\n")
