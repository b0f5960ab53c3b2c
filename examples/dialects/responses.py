"""An agent on the OpenAI SDK, by Responses and streamed: it knows an address and a key, and nothing of agentrl.

    .venv/bin/python examples/dialects/responses.py        # three seconds

What to see: the text arrives in pieces, the tool call whole. The calls are turns with the exact tokens that were sampled, on
one branch. A script answers in the model's place.
"""

import json
from typing import Any

import anyio
from openai import AsyncOpenAI

from agentrl import Client, Task
from agentrl_testing import call, play_async

CALC: Any = {
    "type": "function",
    "name": "multiply",
    "strict": False,
    "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
}


async def agent(base_url: str, key: str, question: str) -> str:
    """Answer a question with a tool; any address of the API will do."""
    items: list[Any] = [{"role": "user", "content": question}]
    async with AsyncOpenAI(base_url=base_url, api_key=key) as model:
        while True:
            async with model.responses.stream(model="policy", input=items, tools=[CALC]) as stream:
                async for event in stream:
                    if event.type == "response.output_text.delta":
                        print(event.delta, end="", flush=True)
                response = await stream.get_final_response()
            items += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output]
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                print()
                return response.output_text
            for each in calls:
                given = json.loads(each.arguments)
                result = str(given["a"] * given["b"])
                items.append({"type": "function_call_output", "call_id": each.call_id, "output": result})


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
