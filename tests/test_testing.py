"""`agentrl_testing.play`: one line plays a workflow on replies that a test writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import anyio
import pytest

from agentrl import Client, RolloutWorkflow, StopReason, Task, tool, verify
from agentrl.errors import ConfigError
from agentrl.types import Message
from agentrl_testing import call, play, play_async

TASK = {"question": "What is 6 * 7?", "answer": "42"}


@tool
def calc(a: int, op: Literal["+", "*"], b: int) -> str:
    """Do one arithmetic operation."""
    return str(a + b if op == "+" else a * b)


class Calculator(RolloutWorkflow):
    max_turns: int = 4

    async def run(self, task: Task, client: Client) -> float:
        messages: list[Any] = [{"role": "user", "content": task["question"]}]
        for _ in range(self.max_turns):
            completion = await client.chat.completions.create(messages=messages, tools=[calc.schema])
            message = completion.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                return float(task["answer"] in (message.content or ""))
            messages += [await calc.reply(each) for each in message.tool_calls]
        return 0.0


def test_texts_and_tool_calls_are_answers_of_the_model() -> None:
    trajectory = play(Calculator, TASK, [call("calc", a=6, op="*", b=7), "It is 42."])
    assert (trajectory.stop_reason, trajectory.final_reward) == (StopReason.COMPLETED, 1.0)
    assert [turn.message["content"] for turn in trajectory.turns] == [None, "It is 42."]
    assert trajectory.turns[1].messages[-1]["content"] == "42"
    verify(trajectory)


def test_one_message_may_hold_text_and_several_calls() -> None:
    trajectory = play(Calculator, TASK, [["Both:", call("calc", a=1, op="+", b=2), call("calc", a=3, op="*", b=4)], "42"])
    assert [message["content"] for message in trajectory.turns[1].messages[-2:]] == ["3", "12"]
    assert trajectory.turns[0].message["content"].strip() == "Both:"


def test_a_reply_may_be_a_function_of_the_messages() -> None:
    def read_result(messages: Sequence[Message]) -> str:
        return f"It is {messages[-1]['content']}."

    assert play(Calculator, TASK, [call("calc", a=6, op="*", b=7), read_result]).final_reward == 1.0


def test_one_function_may_answer_every_call() -> None:
    trajectory = play(Calculator, TASK, lambda messages: "42" if len(messages) > 4 else call("calc", a=1, op="+", b=1))
    assert len(trajectory.turns) == 3


async def test_an_async_test_awaits_the_episode() -> None:
    trajectory = await play_async(Calculator, Task(id="t", data=TASK), ["42"], workflow_args={"max_turns": 1})
    assert (trajectory.task_id, trajectory.final_reward) == ("t", 1.0)


def test_a_call_beyond_the_last_reply_is_a_failed_episode() -> None:
    trajectory = play(Calculator, TASK, [call("calc", a=1, op="+", b=1)])
    assert trajectory.failure is not None
    assert "there are 1 replies; the workflow asked for one more" in trajectory.failure.message


def test_an_episode_that_hangs_ends_at_the_timeout() -> None:
    async def hang(task: Task, client: Client) -> float:
        await anyio.sleep_forever()
        return 0.0

    assert play(hang, TASK, [], timeout=0.01).stop_reason is StopReason.DEADLINE


def test_a_single_text_in_place_of_the_list_is_refused() -> None:
    with pytest.raises(ConfigError, match="replies must be a list with one reply for each call"):
        play(Calculator, TASK, "42")


def test_parallel_calls_take_the_replies_in_the_order_of_the_calls() -> None:
    async def ask_twice(task: Task, client: Client) -> float:
        answers: list[str] = []

        async def ask(text: str) -> None:
            completion = await client.chat.completions.create(messages=[{"role": "user", "content": text}])
            answers.append(completion.choices[0].message.content or "")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, "a")
            tasks.start_soon(ask, "b")
        return float(sorted(answers) == ["one", "two"])

    assert play(ask_twice, TASK, ["one", "two"]).final_reward == 1.0


def test_replies_that_are_left_over_are_an_error() -> None:
    with pytest.raises(AssertionError, match="asked the model 1 times, and there are 2 replies"):
        play(Calculator, TASK, ["42", "42"])


def test_a_cassette_needs_a_workflow_with_a_name(tmp_path: Path) -> None:
    async def local(task: Task, client: Client) -> float:
        return 0.0

    for workflow, expected in ((Calculator(), "Calculator is given as an object"), (local, "is made inside a function")):
        with pytest.raises(ConfigError, match=expected):
            play(workflow, TASK, [], cassette=tmp_path / "one.json")
