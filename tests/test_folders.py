"""What agentrl makes for a run is its owner's alone, until the owner shares it."""

from __future__ import annotations

import stat
from pathlib import Path

from agentrl.processes.base import open_log
from agentrl.support.folders import make_private
from agentrl.weights.disk import atomic_directory


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_logs_and_weights_lie_in_directories_of_their_owner(tmp_path: Path) -> None:
    open_log(tmp_path / "run" / "logs" / "a.log").close()
    with atomic_directory(tmp_path / "weights" / "v1") as folder:
        (folder / "a").write_text("x")
    assert [mode(tmp_path / name) for name in ("run/logs", "weights")] == [0o700] * 2


def test_a_directory_that_its_owner_shares_stays_shared(tmp_path: Path) -> None:
    make_private(tmp_path / "runs" / "a")
    assert mode(tmp_path / "runs" / "a") == 0o700
    (tmp_path / "runs" / "a").chmod(0o755)
    make_private(tmp_path / "runs" / "a")
    assert mode(tmp_path / "runs" / "a") == 0o755
