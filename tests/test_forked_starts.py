"""A process that the tests fork cannot be told from one that is started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.support.forked_starts import SCRIPT, forked_starts, true_starts

pytestmark = pytest.mark.starts
CIRCUMSTANCES = [sys.executable, "-m", "tests.support.circumstances"]


@pytest.fixture(autouse=True)
def forks() -> Generator[None]:
    """Fork also in a run of a few tests."""
    with forked_starts():
        yield


def started_with(command: list[str], *, truly: bool, **settings: Any) -> tuple[int, dict[str, Any], str]:  # noqa: ANN401 - of `subprocess.run`
    settings.setdefault("env", dict(os.environ))  # libraries in C put variables into their process that Python does not see
    with true_starts() if truly else nullcontext():
        done = subprocess.run(command, input="a word", capture_output=True, text=True, timeout=300, check=False, **settings)
    said = json.loads(done.stdout)
    said["descriptors"] = [each for each in said["descriptors"] if each != "3"]  # of a fork, the link to its own server
    return done.returncode, said, done.stderr


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"start_new_session": True},
        {"process_group": 0, "umask": 0o027},
        {"cwd": "/tmp", "env": {**os.environ, "PYTHONPATH": f"/nowhere{os.pathsep}{Path.cwd()}", "A_WORD": "\udcff ä"}},
    ],
)
def test_a_process_that_is_forked_has_what_a_started_one_has(settings: dict[str, Any]) -> None:
    command = [*CIRCUMSTANCES, "3", "ä word"]
    found, wanted = (started_with(command, truly=truly, **settings) for truly in (False, True))
    assert found == wanted
    assert found[0] == 3
    assert found[1]["parent"] == os.getpid()


def test_signals_that_the_parent_ignores_or_blocks_are_so_in_the_child() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    try:
        found, wanted = (started_with(CIRCUMSTANCES, truly=truly)[1] for truly in (False, True))
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
        signal.signal(signal.SIGHUP, before)
    assert found == wanted


def test_a_text_at_the_end_is_said_with_status_one() -> None:
    assert started_with([*CIRCUMSTANCES, "say", "so it is"], truly=False)[::2] == (1, "so it is\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_that_comes_at_once_ends_it(number: signal.Signals) -> None:
    with subprocess.Popen([*CIRCUMSTANCES, "wait"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        process.send_signal(number)
        assert process.wait(300) == -number


def test_a_command_forks_what_it_starts_and_its_server_ends_with_it(tmp_path: Path) -> None:
    done = subprocess.run([SCRIPT, "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0
    assert "train" in done.stdout


async def test_both_event_loops_get_its_output_and_its_end() -> None:
    done = await anyio.run_process([*CIRCUMSTANCES, "4"], input=b"a word", check=False)
    assert done.returncode == 4
    assert json.loads(done.stdout)["said"] == "a word"


def test_what_is_read_at_an_import_makes_a_true_start() -> None:
    code, said, _ = started_with([*CIRCUMSTANCES, "0"], truly=False, env={**os.environ, "LANG": "C", "HOME": "/tmp"})
    assert (code, said["variables"]["HOME"]) == (0, "/tmp")


def test_a_fork_of_the_parent_starts_truly() -> None:
    """A server forks children of its parent alone, and a process can wait for its own children alone."""
    pid = os.fork()
    if pid == 0:
        os._exit(
            subprocess.run(
                [*CIRCUMSTANCES, "5"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, timeout=300
            ).returncode
        )
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
