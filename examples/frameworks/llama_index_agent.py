"""LlamaIndex: its OpenAI-like model takes the client of the episode.

    .frameworks-venv/openai2/bin/python examples/frameworks/llama_index_agent.py

What to see: two model calls and one tool call make one training sample, which the policy sampled token by token.
"""

from typing import Literal

import anyio
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.workflow import WorkflowRuntimeError
from llama_index.llms.openai_like import OpenAILike

from agentrl import Client, RolloutWorkflow, Task, run_episode

TASK = Task(id="1", data={"question": "What is 6 * 7?", "answer": "42"})
REPLIES = ['<tool_call>{"name": "calc", "arguments": {"a": 6, "op": "*", "b": 7}}</tool_call>', "The answer is 42."]


def calc(a: int, op: Literal["+", "-", "*"], b: int) -> str:
    """Do one arithmetic operation."""
    return str({"+": a + b, "-": a - b, "*": a * b}[op])


class Calculator(RolloutWorkflow):
    """Answers an arithmetic question with a tool."""

    async def run(self, task: Task, client: Client) -> float:
        model = OpenAILike(model="policy", is_chat_model=True, is_function_calling_model=True, async_openai_client=client)
        agent = FunctionAgent(tools=[calc], llm=model, system_prompt="Use the tool.")
        try:
            result = await agent.run(task["question"], max_iterations=6)
        except WorkflowRuntimeError:
            return 0.0  # a policy that never answers has not solved the task
        return float(task["answer"] in str(result))


async def main() -> None:
    trajectory = await run_episode(Calculator(), TASK, replies=REPLIES)
    if trajectory.failure is not None:
        raise SystemExit(f"the episode failed: {trajectory.failure.message}")
    print(f"{len(trajectory.turns)} turns, {len(trajectory.branches())} sample, reward {trajectory.final_reward:g}")


if __name__ == "__main__":
    anyio.run(main)
