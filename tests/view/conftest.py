"""A run that the tests of the viewer share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.synthetic_run import write_run


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps with their episodes, the last of them open; do not write to it."""
    return write_run(tmp_path_factory.mktemp("runs") / "synthetic", steps=4)
