"""An agent on the Anthropic SDK, by Messages: it knows an address and a key, and nothing of agentrl.

    .venv/bin/python examples/dialects/messages.py        # three seconds

What to see: the program asks the door of an episode over HTTP, and its calls are turns with the exact tokens that were
sampled, on one branch. A script answers in the model's place.
"""

from typing import Any

import anyio
from anthropic import AsyncAnthropic

from agentrl import Client, Task
from agentrl_testing import call, play_async

CALC: Any = {
    "name": "multiply",
    "input_schema": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
}


async def agent(base_url: str, key: str, question: str) -> str:
    """Answer a question with a tool; any address of the API will do."""
    messages: list[Any] = [{"role": "user", "content": question}]
    async with AsyncAnthropic(base_url=base_url, api_key=key) as model:
        while True:
            answer = await model.messages.create(model="policy", max_tokens=500, messages=messages, tools=[CALC])
            messages.append({"role": "assistant", "content": answer.content})
            calls: list[Any] = [block for block in answer.content if block.type == "tool_use"]
            if not calls:
                return "".join(block.text for block in answer.content if block.type == "text")
            results = [(each.id, str(each.input["a"] * each.input["b"])) for each in calls]
            blocks = [{"type": "tool_result", "tool_use_id": each, "content": text} for each, text in results]
            messages.append({"role": "user", "content": blocks})


async def workflow(task: Task, client: Client) -> float:
    """Let the agent play the policy of this episode, and grade what it says."""
    async with client.served() as door:
        answer = await agent(door.url, door.key, task["question"])
    return float(task["answer"] in answer)


async def main() -> None:
    task = Task(id="1", data={"question": "What is 6 times 7?", "answer": "42"})
    episode = await play_async(workflow, task, [call("multiply", a=6, b=7), "It is 42."])
    print(f"{len(episode.turns)} turns on {len(episode.branches())} branch, reward {episode.final_reward}")


if __name__ == "__main__":
    anyio.run(main)
