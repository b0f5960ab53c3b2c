"""DSPy: an engine of its own calls the client of the episode.

    .frameworks-venv/openai2/bin/python examples/frameworks/dspy_agent.py

What to see: three model calls, one of which answers. `dspy.ReAct` writes all earlier steps into one new user message, so no
call continues another: the calls are three samples, each trained in the context in which it was sampled.
"""

from typing import Literal, NoReturn

import anyio
import dspy
from dspy.lm15 import Request, Response, response_from_openai_chat
from dspy.utils.exceptions import AdapterParseError

from agentrl import Client, RolloutWorkflow, Task, run_episode

TASK = Task(id="1", data={"question": "What is 6 * 7?", "answer": "42"})
STEP = "[[ ## next_thought ## ]]\n{}\n\n[[ ## next_tool_name ## ]]\n{}\n\n[[ ## next_tool_args ## ]]\n{}"
REPLIES = [
    STEP.format("I multiply.", "calc", '{"a": 6, "op": "*", "b": 7}'),
    STEP.format("I know it.", "finish", "{}"),
    "[[ ## reasoning ## ]]\nThe tool said so.\n\n[[ ## answer ## ]]\n42\n\n[[ ## completed ## ]]",
]


class SyncEngine:
    """Refuses: an episode is asynchronous."""

    def complete(self, request: Request) -> NoReturn:
        raise TypeError("call the module with acall: the client of an episode is asynchronous")


class EpisodeEngine:
    """The policy, as DSPy asks it: text in, text out."""

    def __init__(self, client: Client) -> None:
        self.client = client

    async def complete(self, request: Request) -> Response:
        """Return the policy's answer."""
        system = [{"role": "system", "content": request.system}] if request.system else []
        messages = [*system, *({"role": message.role, "content": message.text} for message in request.messages)]
        completion = await self.client.chat.completions.create(
            messages=messages, temperature=request.config.temperature, max_tokens=request.config.max_tokens
        )
        return response_from_openai_chat(completion.model_dump(), model=request.model)


def calc(a: int, op: Literal["+", "-", "*"], b: int) -> str:
    """Do one arithmetic operation."""
    return str({"+": a + b, "-": a - b, "*": a * b}[op])


class Calculator(RolloutWorkflow):
    """Answers an arithmetic question with a tool."""

    async def run(self, task: Task, client: Client) -> float:
        # A cache would return one answer to all episodes of a group, and the JSON adapter needs constrained decoding.
        lm = dspy.LM("policy", engine=SyncEngine(), async_engine=EpisodeEngine(client), cache=False, num_retries=0)
        with dspy.context(lm=lm, adapter=dspy.ChatAdapter(use_json_adapter_fallback=False)):
            try:
                result = await dspy.ReAct("question -> answer", tools=[calc], max_iters=6).acall(question=task["question"])
            except AdapterParseError:
                return 0.0  # a policy that never answers has not solved the task
        return float(task["answer"] in result.answer)


async def main() -> None:
    trajectory = await run_episode(Calculator(), TASK, replies=REPLIES)
    if trajectory.failure is not None:
        raise SystemExit(f"the episode failed: {trajectory.failure.message}")
    print(f"{len(trajectory.turns)} turns, {len(trajectory.branches())} samples, reward {trajectory.final_reward:g}")


if __name__ == "__main__":
    anyio.run(main)
