"""smolagents: a model of its own calls the client of the episode from the agent's thread.

    .frameworks-venv/openai3/bin/python examples/frameworks/smolagents_agent.py

What to see: two model calls and one tool call. smolagents writes a tool call back into the history as text of its own, so
the second call does not continue the first: the calls are two samples, each trained in the context in which it was sampled.
"""

from functools import partial
from typing import Any, Literal

import anyio
import anyio.from_thread
import anyio.to_thread
from smolagents import ChatMessage, Model, ToolCallingAgent, tool

from agentrl import Client, RolloutWorkflow, Task, run_episode

TASK = Task(id="1", data={"question": "What is 6 * 7?", "answer": "42"})
CALL = '<tool_call>{"name": "calc", "arguments": {"a": 6, "op": "*", "b": 7}}</tool_call>'
REPLIES = [CALL, '<tool_call>{"name": "final_answer", "arguments": {"answer": "42"}}</tool_call>']


class EpisodeModel(Model):
    """The policy, for agents that call their model from a thread."""

    def __init__(self, client: Client) -> None:
        super().__init__(model_id="policy")
        self.client = client

    def generate(self, messages: list[ChatMessage], **options: Any) -> ChatMessage:  # noqa: ANN401 - as the base class
        """Return the policy's answer."""
        # smolagents asks for a forced call, which free decoding cannot promise
        arguments = self._prepare_completion_kwargs(messages, **{**options, "tool_choice": "auto"})
        completion = anyio.from_thread.run(partial(self.client.chat.completions.create, **arguments))
        message = completion.choices[0].message
        return ChatMessage.from_dict(message.model_dump(include={"role", "content", "tool_calls"}), raw=completion)


@tool
def calc(a: int, op: Literal["+", "-", "*"], b: int) -> str:
    """Do one arithmetic operation.

    Args:
        a: the first number
        op: the operation
        b: the second number
    """
    return str({"+": a + b, "-": a - b, "*": a * b}[op])


class Calculator(RolloutWorkflow):
    """Answers an arithmetic question with a tool."""

    async def run(self, task: Task, client: Client) -> float:
        agent = ToolCallingAgent(tools=[calc], model=EpisodeModel(client), max_steps=6, verbosity_level=0)
        # A thread of its own for each episode: anyio's shared limit of 40 would let the others wait beyond their deadline.
        # A cancelled episode ends its thread at the next model call.
        limiter = anyio.CapacityLimiter(1)
        answer = await anyio.to_thread.run_sync(agent.run, task["question"], limiter=limiter)
        return float(task["answer"] in str(answer))


async def main() -> None:
    trajectory = await run_episode(Calculator(), TASK, replies=REPLIES)
    if trajectory.failure is not None:
        raise SystemExit(f"the episode failed: {trajectory.failure.message}")
    print(f"{len(trajectory.turns)} turns, {len(trajectory.branches())} samples, reward {trajectory.final_reward:g}")


if __name__ == "__main__":
    anyio.run(main)
