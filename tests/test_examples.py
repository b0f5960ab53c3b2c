"""The examples do what they say, against a scripted server."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from agentrl.client.config import SamplingConfig
from agentrl.config import load_config
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.episode import run_policy_episode
from agentrl.servers.scripted.server import ScriptedServer
from agentrl.tokens.renderer import Renderer
from agentrl.tokens.verify import verify
from agentrl.types import StopReason, Task
from examples.calculator_agent import CalculatorAgent

ROOT = Path(__file__).parents[1]
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
