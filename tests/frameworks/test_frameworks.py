"""Agents of other frameworks drive the client of an episode; a script answers in the model's place."""

from __future__ import annotations

import json
import os
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted([*(ROOT / "examples" / "frameworks").glob("*.py"), *(ROOT / "examples" / "gateway").glob("*.py")])
KEEP_HISTORY = [path for path in EXAMPLES if path.stem not in ("dspy_agent", "smolagents_agent")]
"""Examples whose framework sends the history back as the model wrote it."""
pytestmark = pytest.mark.frameworks


@cache
def episodes(example: Path) -> dict[str, Any]:
    """Return what the episodes of an example recorded, played in the virtual environment that the example names."""
    [venv] = re.findall(r"\.frameworks-venv/\w+/bin/python", example.read_text())
    python = ROOT / venv
    assert python.exists(), (
        f"{python} is missing; run `make frameworks-install`, or all such tests with `make test-frameworks`"
    )
    script = ROOT / "tests" / "support" / "external" / "framework_episodes.py"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = subprocess.run(
        [python, script, example], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def without_call_ids(episode: dict[str, Any]) -> dict[str, Any]:
    """Return an episode without the random ids of tool calls, which smolagents writes into the context."""
    return episode | {"added": [re.sub(r"'id': '\w+'", "'id': ...", text) for text in episode["added"]]}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_agent_calls_its_tool_and_answers(example: Path) -> None:
    played = episodes(example)["scripted"]
    assert (played["failure"], played["final_reward"]) == (None, 1.0)
    assert "42" in played["added"][1]


@pytest.mark.parametrize("example", KEEP_HISTORY, ids=lambda path: path.stem)
def test_a_framework_that_keeps_the_history_makes_one_sample(example: Path) -> None:
    played = episodes(example)["scripted"]
    assert (played["samples"], played["parents"], played["forks"]) == (1, [None, 0], [None, None])
    assert played["added"][1].startswith("\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>")


def test_dspy_starts_a_conversation_with_every_call() -> None:
    played = episodes(ROOT / "examples" / "frameworks" / "dspy_agent.py")["scripted"]
    assert (played["samples"], played["parents"]) == (3, [None, None, None])


def test_smolagents_rewrites_the_tool_call_in_its_history() -> None:
    played = episodes(ROOT / "examples" / "frameworks" / "smolagents_agent.py")["scripted"]
    assert (played["samples"], len(played["parents"])) == (2, 2)
    assert "Calling tools:" in played["added"][1]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_episodes_that_run_at_once_do_not_mix(example: Path) -> None:
    played = episodes(example)
    alone, at_once = without_call_ids(played["scripted"]), [without_call_ids(each) for each in played["at_once"]]
    assert [each == alone for each in at_once] == [True] * 8


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_a_policy_that_never_answers_earns_nothing_and_is_no_failure(example: Path) -> None:
    played = episodes(example)["endless"]
    assert (played["failure"], played["final_reward"]) == (None, 0.0)
    assert 6 <= len(played["parents"]) <= 8


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_a_server_that_refuses_a_call_fails_the_episode(example: Path) -> None:
    played = episodes(example)["broken"]
    assert played["final_reward"] is None
    assert "asked for one more" in played["failure"]
