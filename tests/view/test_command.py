"""`agentrl view`: an address until Ctrl-C, or a file with one episode."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import orjson
import pytest

from agentrl.errors import ConfigError
from agentrl_viewer.view.data import RunData
from agentrl_viewer.view.export import write_episode
from tests.support.synthetic_run import HOSTILE

AGENTRL = [sys.executable, "-m", "agentrl", "view"]


def carried(file: Path) -> dict[str, object]:
    [text] = re.findall(r'<script type="application/json" id="embedded">(.*?)</script>', file.read_text(), re.S)
    return orjson.loads(text)


@pytest.mark.starts
def test_the_command_serves_until_it_is_interrupted(run_dir: Path) -> None:
    command = [*AGENTRL, str(run_dir), "--no-open", "--episode", "8.0.0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as viewer:
        assert viewer.stdout is not None
        line = viewer.stdout.readline()
        [url, shown] = re.findall(r"at (http://127\.0\.0\.1:\d+/)\?token=\S+(#/episode/8\.0\.0)$", line)[0]
        assert shown == "#/episode/8.0.0"
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(url, timeout=300)
        assert "Ctrl-C ends the viewer" in viewer.stdout.readline()
        viewer.send_signal(signal.SIGINT)
        _, errors = viewer.communicate(timeout=300)
        assert viewer.returncode == 0, errors
        assert errors == ""


def test_a_file_carries_the_best_episode_of_the_newest_step(run_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "episode.html"
    chosen = write_episode(RunData(run_dir), file)
    assert carried(file)["run"] == {"name": "synthetic"}
    episode = carried(file)["episode"]
    assert isinstance(episode, dict)
    assert episode["summary"]["episode_id"] == chosen
    assert (episode["summary"]["step"], episode["summary"]["episode_return"]) == (4, 1.0)


def test_a_file_carries_hostile_text_as_text(run_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "episode.html"
    write_episode(RunData(run_dir), file, "0.0.0")
    assert HOSTILE not in file.read_text()
    assert HOSTILE in str(carried(file))


def test_an_episode_that_is_not_there_is_refused(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"99\.9\.9"):
        write_episode(RunData(run_dir), tmp_path / "episode.html", "99.9.9")


@pytest.mark.starts
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{run}", "--port", "70000"], "--port: expected 0 to 65535, got 70000"),
        (["{run}/none"], "expected the directory of a run"),
        (["{run}", "--episode", "99.9.9", "--no-open"], "99.9.9"),
    ],
)
def test_bad_input_is_one_message(run_dir: Path, arguments: list[str], message: str) -> None:
    command = [*AGENTRL, *(argument.format(run=run_dir) for argument in arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 2
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr
