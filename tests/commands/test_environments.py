"""`agentrl envs` lists what is installed and lets a person play it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.commands.envs import describe_environments, parse_named_values, play_environment
from agentrl.commands.running import parse_json_object
from agentrl.errors import ConfigError
from tests.support.cli import agentrl

GUESSING = "tests.support.guessing:Guessing"


def install(folder: Path, lines: str) -> None:
    """Write what pip leaves of a package: its entry points."""
    info = folder / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[agentrl.environments]\n{lines}\n")


def test_the_list_says_what_each_environment_is_and_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(
        'class Chess:\n    """Chess against an engine.\n\n    More."""\n    needs_packages = ("no_such_engine",)\n'
        "    extra = 'mine[chess]'\n"
    )
    install(tmp_path, f"guess = {GUESSING}\nchess = mine:Chess\ngone = no_such_module:World")
    monkeypatch.syspath_prepend(tmp_path)
    lines = describe_environments().splitlines()
    assert next(line for line in lines if line.startswith("chess")).endswith(
        " Chess against an engine. [pip install 'mine[chess]']"
    )
    assert next(line for line in lines if line.startswith("gone")).endswith("No module named 'no_such_module'")
    assert "The policy guesses a number" in next(line for line in lines if line.startswith("guess"))


async def test_a_person_plays_line_by_line() -> None:
    written: list[str] = []
    typed = iter(["0\n", "\x1b[2J\n", ""])
    total = await play_environment(
        GUESSING, {"max_guesses": 5}, {"question": "Which \x1b[31mnumber?"}, read=lambda: next(typed), write=written.append
    )
    assert total == pytest.approx(-0.2)
    assert written == [
        "user: Which \\x1b[31mnumber?",
        "user: No.",
        "reward -0.1",
        "user: No.",
        "reward -0.1",
        "left; total reward -0.2",
    ]


async def test_a_person_calls_a_tool() -> None:
    written: list[str] = []
    typed = iter(["/call look {}\n"])
    total = await play_environment("tests.support.guessing:Caller", {}, {}, read=lambda: next(typed), write=written.append)
    assert total == 1.0
    assert written[1].startswith('tool: {"name": "look"')
    assert written[-1] == "terminated; total reward 1"


def test_arguments_are_yaml_and_a_task_is_json() -> None:
    assert parse_named_values(["size=3", "names=[a, b]", "text=x=y"]) == {
        "size": 3,
        "names": ["a", "b"],
        "text": "x=y",
    }
    assert parse_json_object('{"question": "?"}', "--task") == {"question": "?"}
    for words in (["size"], ["=3"], ["size=["]):
        with pytest.raises(ConfigError):
            parse_named_values(words)
    for text in ("{", "[1]"):
        with pytest.raises(ConfigError, match="--task must be a JSON object"):
            parse_json_object(text, "--task")


@pytest.mark.starts
def test_the_command_plays_and_refuses(tmp_path: Path) -> None:
    (tmp_path / "world.py").write_text(
        "from agentrl.env import ChatStart, ChatStep, EpisodeEnd\n\n\n"
        "class World:\n"
        "    async def reset(self, task, *, seed):\n"
        "        return ChatStart(messages=[{'role': 'user', 'content': task['question']}])\n\n"
        "    async def step(self, message):\n"
        "        return ChatStep(reward=1.0, end=EpisodeEnd.TERMINATED)\n\n"
        "    async def close(self):\n"
        "        pass\n"
    )
    command = [sys.executable, "-m", "agentrl", "envs", "play", "world:World", "--task", '{"question": "Well?"}']
    played = subprocess.run(command, cwd=tmp_path, input="yes\n", capture_output=True, text=True, timeout=60, check=False)
    assert (played.returncode, played.stdout) == (0, "user: Well?\nreward 1\nterminated; total reward 1\n"), played.stderr
    refused = agentrl(tmp_path, "envs", "play", "nothing")
    assert refused.returncode == 2
    assert "there is none of that name" in refused.stderr
