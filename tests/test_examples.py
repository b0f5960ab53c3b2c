"""The examples do what they say: the ladder as it stands, and the agent of the README against a scripted server."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from agentrl.client.config import SamplingConfig
from agentrl.config import load_config
from agentrl.data.load import load_tasks
from agentrl.plan.checks import missing_here
from agentrl.plan.plan import plan_run
from agentrl.plan.text import describe_plan
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.episode import run_policy_episode
from agentrl.servers.scripted.server import ScriptedServer
from agentrl.tokens.renderer import Renderer
from agentrl.tokens.verify import verify
from agentrl.types import StopReason, Task
from examples.calculator_agent import CalculatorAgent
from tests.support.sandboxes import usable_host

ROOT = Path(__file__).parents[1]
LADDER = sorted((ROOT / "examples").glob("[0-9]*.py"))
EXTERNAL = ("05_mcp_tools",)  # imports a package that takes seconds
STEPS = [pytest.param(path, marks=pytest.mark.external) if path.stem in EXTERNAL else path for path in LADDER]
DIALECTS = sorted((ROOT / "examples" / "dialects").glob("*.py"))
LADDER_RUNS = sorted((ROOT / "examples").glob("[0-9]*.yaml"))
SHOWS = {
    "01_hello": "'Hello, Ada!': 12 tokens, reward 1.0",
    "02_math_feedback": "reward 0.8",
    "03_code_with_tests": "2 attempts, reward 1.0, solved 1",
    "04_own_environment": "return 0.8, ended by itself: 1",
    "05_mcp_tools": "3 turns, return 1",
    "06_gymnasium": "6 steps, return 1",
    "07_own_reward": "'PARIS': reward 0.70 (right 1.00, short 1.00, shouting 1.00)",
    "08_judge": "the judge was asked 3 times, the cache answered 1",
    "09_two_players": "2 conversations, {'first.return': 1.0, 'second.return': -1.0}",
}
"""A line that each step of the ladder prints."""
TASK = Task(id="t", data={"question": "Compute 2 + (3 * 4).", "answer": "14"})
CALL = '<tool_call>\n{"name": "calc", "arguments": {"a": %s, "op": "%s", "b": %s}}\n</tool_call>'


@pytest.mark.parametrize(
    ("texts", "final", "turns"),
    [
        ([CALL % (3, "*", 4), CALL % (2, "+", 12), "The answer is 14."], 1.0, [-0.02, -0.02, None]),
        ([CALL % ('"x"', "*", 4), CALL % (2, "+", 12), "The answer is 14."], 1.0, [-0.02, -0.02, None]),
        (["The answer is 15."], 0.0, [None]),
        ([CALL % (3, "*", 4)] * 6, 0.0, [-0.02] * 6),
    ],
)
async def test_the_agent_is_rewarded_by_turn_and_by_answer(
    checkpoint: Path, texts: list[str], final: float, turns: list[float | None]
) -> None:
    renderer = Renderer.load(checkpoint)
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    server = ScriptedServer.from_texts(
        lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        texts,
        vocab_size=renderer.vocab_size,
        eos_id=tokenizer.token_to_id("<|im_end|>"),
    )
    episode = await run_policy_episode(
        CalculatorAgent(), TASK, backend=server, renderer=renderer, rollout=RolloutConfig(), sampling=SamplingConfig()
    )
    assert episode.failure is None
    assert episode.stop_reason == StopReason.COMPLETED
    assert episode.final_reward == final
    assert [turn.reward for turn in episode.turns] == turns
    verify(episode)


def test_the_run_file_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    run = load_config("examples/calculator_agent.yaml")
    assert run.algorithm.advantage == "turn"


def test_the_agent_is_at_most_thirty_lines() -> None:
    text = (ROOT / "examples" / "calculator_agent.py").read_text()
    body = text[text.index("from typing") :].splitlines()
    assert len([line for line in body if line.strip()]) <= 30


@pytest.mark.starts
@pytest.mark.parametrize("path", STEPS, ids=lambda path: path.stem)
def test_a_step_of_the_ladder_runs_offline_and_shows_what_it_says(
    path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if "sandbox" in path.read_text():
        usable_host()
    monkeypatch.chdir(ROOT)
    runpy.run_path(str(path), run_name="__main__")
    assert SHOWS[path.stem] in capfd.readouterr().out


@pytest.mark.parametrize("path", DIALECTS, ids=lambda path: path.stem)
def test_an_agent_of_each_dialect_plays_an_episode_on_one_branch(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(path), run_name="__main__")
    assert capfd.readouterr().out.splitlines()[-1] == "2 turns on 1 branch, reward 1.0"
    assert f".venv/bin/python examples/dialects/{path.name}" in path.read_text()


@pytest.mark.parametrize("path", LADDER, ids=lambda path: path.stem)
def test_a_step_says_what_to_run_how_long_it_takes_and_what_to_see(path: Path) -> None:
    text = path.read_text().split('"""')[1]
    assert f".venv/bin/python examples/{path.name}" in text
    assert "seconds" in text
    assert "What to see:" in text
    for command, file in re.findall(r"agentrl (train|validate) (\S+)", text):
        assert (ROOT / file).is_file(), command


def test_the_readme_of_the_examples_lists_every_step_and_run_file() -> None:
    text = (ROOT / "examples" / "README.md").read_text()
    assert [path.name for path in (*LADDER, *LADDER_RUNS) if f"({path.name})" not in text] == []


@pytest.mark.parametrize("path", LADDER_RUNS, ids=lambda path: path.stem)
def test_a_run_file_of_the_ladder_plans_and_lacks_the_model_only(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    run = load_config(path)
    assert run.workflow in describe_plan(plan_run(run))
    assert [lack for lack in missing_here(plan_run(run)) if not lack.startswith("model.path")] == []
    tasks = load_tasks(run.tasks)
    assert {task.id for task in tasks.train.finite}.isdisjoint(task.id for task in tasks.evaluation)
