"""`run_episode` with replies plays a workflow without a model."""

from __future__ import annotations

import gc
from typing import Any

import pytest

import agentrl
from agentrl import ConfigError, StopReason, Task
from examples.calculator_agent import CalculatorAgent

CALL = '<tool_call>\n{"name": "calc", "arguments": {"a": 6, "op": "*", "b": 7}}\n</tool_call>'
TASK = Task(id="t", data={"question": "What is 6 * 7?", "answer": "42"})


async def test_replies_are_played_in_order_and_recorded_as_turns() -> None:
    trajectory = await agentrl.run_episode(CalculatorAgent(), TASK, replies=[CALL, "The answer is 42."])
    assert trajectory.failure is None
    assert (trajectory.stop_reason, trajectory.final_reward) == (StopReason.COMPLETED, 1.0)
    assert [turn.reward for turn in trajectory.turns] == [-0.02, None]
    assert trajectory.turns[1].message["content"] == "The answer is 42."
    agentrl.verify(trajectory)


async def test_a_call_beyond_the_last_reply_fails_the_episode_with_the_reason() -> None:
    trajectory = await agentrl.run_episode(CalculatorAgent(), TASK, replies=[CALL])
    assert trajectory.final_reward is None
    assert trajectory.failure is not None
    assert "the script has 1 replies; the workflow asked for one more" in trajectory.failure.message


async def test_a_model_and_replies_exclude_each_other_and_one_is_needed() -> None:
    for model, replies in ((None, None), ("model", ["a"])):
        with pytest.raises(ConfigError, match="pass either model, a local checkpoint, or replies"):
            await agentrl.run_episode(CalculatorAgent(), TASK, model=model, replies=replies)


async def test_a_forgotten_await_is_named_with_the_line_that_lacks_it() -> None:
    async def forgets(task: Task, client: agentrl.Client) -> float:
        completion: Any = client.chat.completions.create(messages=[{"role": "user", "content": "Hi"}])
        return float(completion.choices[0].message.content == "3")

    with pytest.warns(RuntimeWarning, match=r"(?s)was never awaited.*test_episode\.py"):  # noqa: PT031
        trajectory = await agentrl.run_episode(forgets, TASK, replies=["3"])
        gc.collect()
    assert trajectory.failure is not None
    assert "an await is missing" in trajectory.failure.message
