"""How `agentrl serve` ends: one message and the status of the first signal, however many follow."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from pathlib import Path

import pytest

from tests.support.cli import AGENTRL, ended, read_until, started

pytestmark = pytest.mark.starts

Send = Callable[[subprocess.Popen[str], Sequence[signal.Signals]], str]
SAID = "{}; everything this command started has ended."
ENDS = [
    ([signal.SIGINT], 130, "Interrupted"),
    ([signal.SIGTERM], 143, "Ended by SIGTERM"),
    ([signal.SIGINT, signal.SIGTERM], 130, "Interrupted"),
    ([signal.SIGTERM, signal.SIGINT], 143, "Ended by SIGTERM"),
]


def command(model: Path) -> tuple[str, ...]:
    return (AGENTRL, "serve", str(model), "--port", "0", "--device", "cpu")


def pressed(process: subprocess.Popen[str], signals: Sequence[signal.Signals]) -> str:
    """Send signals in turn, every 10 ms, until the process has ended; return what it wrote to standard error."""
    for number in islice(cycle(signals), 6000):
        process.send_signal(number)
        try:
            process.wait(0.01)
            break
        except subprocess.TimeoutExpired:
            continue
    return ended(process, ())


@pytest.mark.parametrize(
    ("send", "signals", "status", "word"), [*((ended, *end) for end in ENDS[:2]), *((pressed, *end) for end in ENDS[2:])]
)
def test_the_first_signal_ends_the_server_with_its_status_and_one_message_and_further_ones_change_nothing(
    tmp_path: Path, checkpoint: Path, send: Send, signals: list[signal.Signals], status: int, word: str
) -> None:
    with started(tmp_path, *command(checkpoint)) as process:
        read_until(process, "Ctrl-C ends it")
        said = send(process, signals)
    assert (process.returncode, said) == (status, f"\n{SAID.format(word)}\n")


@pytest.mark.parametrize(("signals", "status", "word"), ENDS[:2])
def test_many_signals_while_the_model_is_loaded_end_it_with_one_message(
    tmp_path: Path, checkpoint: Path, signals: list[signal.Signals], status: int, word: str
) -> None:
    model = shutil.copytree(checkpoint, tmp_path / "model")
    (model / "config.json").unlink()
    os.mkfifo(model / "config.json")
    with started(tmp_path, *command(model)) as process, (model / "config.json").open("w"):
        said = pressed(process, signals)  # it has opened the file, of which nothing comes
    assert (process.returncode, said) == (status, f"\n{SAID.format(word)}\n")


def test_an_interrupt_that_was_ignored_when_the_server_began_stays_ignored(tmp_path: Path, checkpoint: Path) -> None:
    background = f"trap '' INT; exec {' '.join(command(checkpoint))}"
    with started(tmp_path, "/bin/sh", "-c", background) as process:
        url = read_until(process, "Ctrl-C ends it").partition(" at ")[2].split()[0]
        process.send_signal(signal.SIGINT)
        with urllib.request.urlopen(f"{url}/model_info", timeout=60) as response:
            assert response.status == 200
        said = ended(process, [signal.SIGTERM])
    assert (process.returncode, said) == (143, f"\n{SAID.format('Ended by SIGTERM')}\n")
