"""An agent on the OpenAI SDK, by chat completions: it knows an address and a key, and nothing of agentrl.

    .venv/bin/python examples/dialects/chat_completions.py        # three seconds

What to see: the program asks the door of an episode over HTTP, and its calls are turns with the exact tokens that were
sampled, on one branch. A script answers in the model's place.
"""

import json
from typing import Any, cast

import anyio
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageFunctionToolCall

from agentrl import Client, Task
from agentrl_testing import call, play_async

CALC: Any = {
    "type": "function",
    "function": {
        "name": "multiply",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
}


async def agent(base_url: str, key: str, question: str) -> str:
    """Answer a question with a tool; any address of the API will do."""
    messages: list[Any] = [{"role": "user", "content": question}]
    async with AsyncOpenAI(base_url=base_url, api_key=key) as model:
        while True:
            completion = await model.chat.completions.create(model="policy", messages=messages, tools=[CALC])
            message = completion.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                return message.content or ""
            for each in cast("list[ChatCompletionMessageFunctionToolCall]", message.tool_calls):
                given = json.loads(each.function.arguments)
                messages.append({"role": "tool", "tool_call_id": each.id, "content": str(given["a"] * given["b"])})


async def workflow(task: Task, client: Client) -> float:
    """Let the agent play the policy of this episode, and grade what it says."""
    async with client.served() as door:
        answer = await agent(door.base_url, door.key, task["question"])
    return float(task["answer"] in answer)


async def main() -> None:
    task = Task(id="1", data={"question": "What is 6 times 7?", "answer": "42"})
    episode = await play_async(workflow, task, [call("multiply", a=6, b=7), "It is 42."])
    print(f"{len(episode.turns)} turns on {len(episode.branches())} branch, reward {episode.final_reward}")


if __name__ == "__main__":
    anyio.run(main)
