"""The agent of the demo, on the scripted server: what it records is what the warm start taught, token for token."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from agentrl.client import SamplingConfig
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.episode import run_policy_episode
from agentrl.servers.scripted.server import ScriptedServer
from agentrl.tokens.renderer import Renderer
from agentrl.tokens.verify import verify
from agentrl.types import StopReason, Task, Trajectory
from agentrl.workflow import as_workflow
from agentrl_envs.calculator import CalculatorEpisode, calculator_tasks
from agentrl_workflows.calculator.expert import demonstrate
from agentrl_workflows.calculator.recipe import FULL
from agentrl_workflows.calculator.workflow import Calculator

TASK = calculator_tasks(count=1, seed=0)[0]
SAMPLING = SamplingConfig(max_tokens=40)


def call(a: int, op: str, b: int) -> str:
    return f'<tool_call>\n{{"name": "calc", "arguments": {{"a": {a}, "op": "{op}", "b": {b}}}}}\n</tool_call>'


def server(renderer: Renderer, tokenizer: Tokenizer, texts: Sequence[str]) -> ScriptedServer:
    return ScriptedServer.from_texts(
        lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        texts,
        vocab_size=renderer.vocab_size,
        eos_id=renderer.end_of_turn_id,
    )


async def play(
    renderer: Renderer,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    task: Task = TASK,
    **arguments: object,
) -> Trajectory:
    return await run_policy_episode(
        as_workflow(Calculator, {"p_busy": 0.0, **arguments}),
        task,
        backend=server(renderer, tokenizer, texts),
        renderer=renderer,
        rollout=RolloutConfig(),
        sampling=SAMPLING,
        episode_id="e",
    )


async def test_two_calls_and_a_right_answer_pay_one(renderer: Renderer, tokenizer: Tokenizer):
    assert TASK["question"] == "Compute 37 + (66 - 57)."
    episode = await play(renderer, tokenizer, [call(66, "-", 57), call(37, "+", 9), "The answer is 46."])
    assert episode.stop_reason is StopReason.COMPLETED
    assert episode.final_reward == 1.0
    assert len(episode.turns) == 3
    assert episode.metrics == {"correct": 1.0, "busy": 0.0, "retried": 0.0}
    assert len(episode.branches()) == 1
    verify(episode)


@pytest.mark.parametrize("turns", [1, 2, 3])
async def test_the_turn_limit_ends_the_episode_without_reward(renderer: Renderer, tokenizer: Tokenizer, turns: int):
    texts = [call(66, "-", 57), call(37, "+", 9), "The answer is 46."]
    episode = await play(renderer, tokenizer, texts, max_turns=turns)
    assert len(episode.turns) == turns
    assert episode.final_reward == (1.0 if turns == 3 else 0.0)


async def test_a_busy_error_is_shown_to_the_model_and_recorded(renderer: Renderer, tokenizer: Tokenizer):
    episode = await play(renderer, tokenizer, [call(66, "-", 57), "The answer is 9.", "The answer is 9."], p_busy=1.0)
    assert "error: busy" in renderer.decode(episode.turns[1].context_ids, skip_special=False)
    assert episode.metrics["busy"] == 1.0


async def test_replaying_demonstrations_records_exactly_the_tokens_and_mask_they_teach(
    renderer: Renderer, tokenizer: Tokenizer
):
    demonstrator = replace(FULL.demonstrator, p_guess=0.4, p_bad_call=0.1)
    rng = random.Random(0)
    for task in calculator_tasks(count=25, seed=9):
        messages, episode = demonstrate(task, demonstrator, rng)
        encoded = renderer.encode_conversation(messages, [CalculatorEpisode.schema])
        learnt = renderer.decode(encoded.token_ids[encoded.assistant_mask], skip_special=False)
        texts = learnt.split("<|im_end|>")[:-1]
        played = await play(renderer, tokenizer, texts, task, p_busy=demonstrator.p_busy)
        assert played.final_reward == episode.reward
        [sample] = played.branches()
        np.testing.assert_array_equal(sample.token_ids, encoded.token_ids)
        np.testing.assert_array_equal(sample.loss_mask, encoded.assistant_mask)


def test_the_student_is_small_and_the_same_for_the_same_seed(student: Path, tmp_path: Path, renderer: Renderer):
    import safetensors.numpy

    from agentrl_workflows.demo.model import write_random_model

    weights = safetensors.numpy.load_file(student / "model.safetensors")
    assert 100_000 < sum(array.size for array in weights.values()) < 110_000
    assert weights["model.embed_tokens.weight"].shape[0] == renderer.vocab_size
    (tmp_path / "tokenizer.json").write_bytes((student / "tokenizer.json").read_bytes())
    write_random_model(tmp_path, vocab_size=renderer.vocab_size, seed=0)
    assert (tmp_path / "model.safetensors").read_bytes() == (student / "model.safetensors").read_bytes()
    assert renderer.eos_ids == {renderer.end_of_turn_id}
