"""AutoGen: the base class of its OpenAI client takes the client of the episode.

    .frameworks-venv/openai3/bin/python examples/frameworks/autogen_agent.py

What to see: two model calls and one tool call make one training sample, which the policy sampled token by token.
"""

from typing import Literal

import anyio
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.messages import TextMessage
from autogen_core.models import ModelInfo
from autogen_ext.models.openai import BaseOpenAIChatCompletionClient

from agentrl import Client, RolloutWorkflow, Task, run_episode

TASK = Task(id="1", data={"question": "What is 6 * 7?", "answer": "42"})
POLICY = ModelInfo(vision=False, function_calling=True, json_output=False, structured_output=False, family="unknown")
REPLIES = ['<tool_call>{"name": "calc", "arguments": {"a": 6, "op": "*", "b": 7}}</tool_call>', "The answer is 42."]


def calc(a: int, op: Literal["+", "-", "*"], b: int) -> str:
    """Do one arithmetic operation."""
    return str({"+": a + b, "-": a - b, "*": a * b}[op])


class Calculator(RolloutWorkflow):
    """Answers an arithmetic question with a tool."""

    async def run(self, task: Task, client: Client) -> float:
        model = BaseOpenAIChatCompletionClient(client, create_args={"model": "policy"}, model_info=POLICY)
        agent = AssistantAgent("calculator", model, tools=[calc], system_message="Use the tool.", max_tool_iterations=6)
        result = await agent.run(task=task["question"])
        last = result.messages[-1]  # without an answer in time it is the result of a tool, which is no TextMessage
        return float(isinstance(last, TextMessage) and task["answer"] in last.content)


async def main() -> None:
    trajectory = await run_episode(Calculator(), TASK, replies=REPLIES)
    if trajectory.failure is not None:
        raise SystemExit(f"the episode failed: {trajectory.failure.message}")
    print(f"{len(trajectory.turns)} turns, {len(trajectory.branches())} sample, reward {trajectory.final_reward:g}")


if __name__ == "__main__":
    anyio.run(main)
