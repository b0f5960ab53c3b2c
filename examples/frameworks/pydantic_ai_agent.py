"""pydantic-ai: its OpenAI provider takes the client of the episode.

    .frameworks-venv/openai3/bin/python examples/frameworks/pydantic_ai_agent.py

What to see: two model calls and one tool call make one training sample, which the policy sampled token by token.
"""

from typing import Literal

import anyio
from pydantic_ai import Agent, UnexpectedModelBehavior, UsageLimitExceeded, UsageLimits
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from agentrl import Client, RolloutWorkflow, Task, run_episode

TASK = Task(id="1", data={"question": "What is 6 * 7?", "answer": "42"})
REPLIES = ['<tool_call>{"name": "calc", "arguments": {"a": 6, "op": "*", "b": 7}}</tool_call>', "The answer is 42."]


def calc(a: int, op: Literal["+", "-", "*"], b: int) -> str:
    """Do one arithmetic operation."""
    return str({"+": a + b, "-": a - b, "*": a * b}[op])


class Calculator(RolloutWorkflow):
    """Answers an arithmetic question with a tool."""

    async def run(self, task: Task, client: Client) -> float:
        model = OpenAIChatModel("policy", provider=OpenAIProvider(openai_client=client))
        agent = Agent(model, instructions="Use the tool.", tools=[calc])
        try:
            result = await agent.run(task["question"], usage_limits=UsageLimits(request_limit=6))
        except (UsageLimitExceeded, UnexpectedModelBehavior):
            return 0.0  # a policy that never answers, or repeats a wrong call, has not solved the task
        return float(task["answer"] in result.output)


async def main() -> None:
    trajectory = await run_episode(Calculator(), TASK, replies=REPLIES)
    if trajectory.failure is not None:
        raise SystemExit(f"the episode failed: {trajectory.failure.message}")
    print(f"{len(trajectory.turns)} turns, {len(trajectory.branches())} sample, reward {trajectory.final_reward:g}")


if __name__ == "__main__":
    anyio.run(main)
