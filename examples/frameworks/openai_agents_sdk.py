"""OpenAI Agents SDK: its chat-completions model takes the client of the episode.

    .frameworks-venv/openai3/bin/python examples/frameworks/openai_agents_sdk.py

What to see: two model calls and one tool call make one training sample, which the policy sampled token by token.
"""

from typing import Literal

import anyio
from agents import Agent, MaxTurnsExceeded, OpenAIChatCompletionsModel, RunConfig, Runner, function_tool

from agentrl import Client, RolloutWorkflow, Task, run_episode

TASK = Task(id="1", data={"question": "What is 6 * 7?", "answer": "42"})
REPLIES = ['<tool_call>{"name": "calc", "arguments": {"a": 6, "op": "*", "b": 7}}</tool_call>', "The answer is 42."]


@function_tool
def calc(a: int, op: Literal["+", "-", "*"], b: int) -> str:
    """Do one arithmetic operation."""
    return str({"+": a + b, "-": a - b, "*": a * b}[op])


class Calculator(RolloutWorkflow):
    """Answers an arithmetic question with a tool."""

    async def run(self, task: Task, client: Client) -> float:
        model = OpenAIChatCompletionsModel(model="policy", openai_client=client)
        agent = Agent(name="calculator", instructions="Use the tool.", model=model, tools=[calc])
        try:
            result = await Runner.run(agent, task["question"], max_turns=6, run_config=RunConfig(tracing_disabled=True))
        except MaxTurnsExceeded:
            return 0.0  # a policy that never answers has not solved the task
        return float(task["answer"] in str(result.final_output))


async def main() -> None:
    trajectory = await run_episode(Calculator(), TASK, replies=REPLIES)
    if trajectory.failure is not None:
        raise SystemExit(f"the episode failed: {trajectory.failure.message}")
    print(f"{len(trajectory.turns)} turns, {len(trajectory.branches())} sample, reward {trajectory.final_reward:g}")


if __name__ == "__main__":
    anyio.run(main)
