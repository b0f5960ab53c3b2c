"""The lock of a run directory, held by real processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.commands.run_directory import Existing
from agentrl.commands.train import train_run
from agentrl.config import load_config
from agentrl.errors import ConfigError
from agentrl.observe.runs.run_lock import run_lock
from tests.support.cli import write_run

HOLD = """
import os, sys
from pathlib import Path
from agentrl.observe.runs.run_lock import run_lock
with run_lock(Path(sys.argv[1])):
    child = os.fork() if sys.argv[2] == "fork" else -1
    if child == 0:
        sys.stdin.read()
        os._exit(0)
    print(child, flush=True)
    sys.stdin.readline()
os._exit(0)
"""


def holder(folder: Path, how: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", HOLD, str(folder), how]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline()
    return process


@pytest.mark.starts
def test_a_second_process_is_refused_and_the_first_is_named(tmp_path: Path) -> None:
    with holder(tmp_path / "run", "alone") as process:
        with pytest.raises(ConfigError, match=rf"is running, process {process.pid}"), run_lock(tmp_path / "run"):
            pass
        process.communicate(b"\n")
    with run_lock(tmp_path / "run"):
        pass


@pytest.mark.starts
def test_a_killed_process_releases_it_even_where_its_forked_child_lives_on(tmp_path: Path) -> None:
    with holder(tmp_path / "run", "fork") as process:
        process.kill()
        process.wait()
        with run_lock(tmp_path / "run"):
            pass
        assert process.stdin is not None
        process.stdin.close()  # ends the child, which read from it


@pytest.mark.starts
def test_deleting_the_directory_does_not_release_it(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with holder(tmp_path / "run", "alone") as process:
        (tmp_path / "run").rmdir()
        with pytest.raises(ConfigError, match="is running"), run_lock(tmp_path / "run"):
            pass
        process.communicate(b"\n")


@pytest.mark.starts
@pytest.mark.parametrize("existing", ["resume", "replace", "use"])
async def test_a_run_that_is_running_is_neither_resumed_nor_replaced(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, existing: Existing
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    run = load_config(write_run(tmp_path, checkpoint))
    (run.run_dir / "checkpoints").mkdir(parents=True)
    (run.run_dir / "metrics.jsonl").write_text("as it was\n")
    before = [(path, path.stat().st_mtime_ns) for path in sorted(run.run_dir.rglob("*"))]
    with holder(run.run_dir, "alone") as process:
        with pytest.raises(ConfigError, match=rf"is running, process {process.pid}"):
            await train_run(run, existing=existing)
        process.communicate(b"\n")
    assert [(path, path.stat().st_mtime_ns) for path in sorted(run.run_dir.rglob("*"))] == before


def test_a_place_that_cannot_be_written_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write the lock"), run_lock(tmp_path / "file" / "run"):
        pass
