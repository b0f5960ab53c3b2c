"""What all tests of reading a run share."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.tokens.renderer import Renderer
from tests.tokens.families import FAMILIES, write_family


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("runs") / "model", FAMILIES["qwen25"])


@pytest.fixture(scope="session")
def renderer(model_dir: Path) -> Renderer:
    return Renderer.load(model_dir)
