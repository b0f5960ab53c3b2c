"""litellm: `acompletion` takes the client of the episode.

    .frameworks-venv/openai2/bin/python examples/frameworks/litellm_agent.py

What to see: two model calls and one tool call make one training sample, which the policy sampled token by token.
"""

from typing import Literal

import anyio
import litellm

from agentrl import Client, RolloutWorkflow, Task, run_episode, tool

TASK = Task(id="1", data={"question": "What is 6 * 7?", "answer": "42"})
REPLIES = ['<tool_call>{"name": "calc", "arguments": {"a": 6, "op": "*", "b": 7}}</tool_call>', "The answer is 42."]


@tool
def calc(a: int, op: Literal["+", "-", "*"], b: int) -> str:
    """Do one arithmetic operation."""
    return str({"+": a + b, "-": a - b, "*": a * b}[op])


class Calculator(RolloutWorkflow):
    """Answers an arithmetic question with a tool."""

    async def run(self, task: Task, client: Client) -> float:
        messages = [{"role": "user", "content": task["question"]}]
        for _ in range(6):
            completion = await litellm.acompletion(
                model="openai/policy", messages=messages, tools=[calc.schema], client=client
            )
            message = completion.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                return float(task["answer"] in (message.content or ""))
            messages += [await calc.reply(call) for call in message.tool_calls]
        return 0.0


async def main() -> None:
    trajectory = await run_episode(Calculator(), TASK, replies=REPLIES)
    if trajectory.failure is not None:
        raise SystemExit(f"the episode failed: {trajectory.failure.message}")
    print(f"{len(trajectory.turns)} turns, {len(trajectory.branches())} sample, reward {trajectory.final_reward:g}")


if __name__ == "__main__":
    anyio.run(main)
