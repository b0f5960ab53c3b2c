"""Workflows to record and to play again: a tool that acts on the world, one with state, the clock and an environment."""

from __future__ import annotations

from typing import Any

from agentrl import Client, RolloutWorkflow, Task, reply_to, tool
from agentrl.env import ChatStart, ChatStep, EnvironmentPool, EpisodeEnd
from agentrl.episode.tape import now
from agentrl.types import Message

ORDERS: list[str] = []
"""What `order` did to the world."""
MADE: list[Corridor] = []
"""The environments that were made."""


@tool
def order(item: str) -> str:
    """Order an item."""
    ORDERS.append(item)
    return f"order {len(ORDERS)}: {item}"


class Basket:
    """The state of one episode."""

    def __init__(self) -> None:
        self.items: list[str] = []

    def put(self, item: str) -> int:
        """Put an item into the basket."""
        self.items.append(item)
        return len(self.items)


class Shop(RolloutWorkflow):
    """Pays `price` for each item in the basket and 0.5 for an order; asks again with other words if `polite`."""

    price: float = 1.0
    polite: bool = False
    max_turns: int = 4

    async def run(self, task: Task, client: Client) -> float:
        basket, started = Basket(), now()
        tools: list[Any] = [order, tool(basket.put)]
        question = f"Please {task['question']}" if self.polite else task["question"]
        messages: list[Any] = [{"role": "user", "content": question}]
        for _ in range(self.max_turns):
            completion = await client.chat.completions.create(messages=messages, tools=[each.schema for each in tools])
            message = completion.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                break
            messages += [await reply_to(call, tools) for call in message.tool_calls]
            client.reward(completion, 0.5 if message.tool_calls[0].model_dump()["function"]["name"] == "order" else 0.0)
        client.record(started=started, items=len(basket.items))
        return self.price * len(basket.items)


class Corridor:
    """An environment: two steps to the right."""

    def __init__(self) -> None:
        MADE.append(self)
        self.at = 0

    async def reset(self, task: Task, *, seed: int) -> ChatStart:
        self.at = 0
        return ChatStart(messages=[{"role": "user", "content": f"{task['question']} {seed}"}])

    async def step(self, message: Message) -> ChatStep:
        self.at += str(message["content"]) == "right"
        end = EpisodeEnd.TERMINATED if self.at == 2 else None
        return ChatStep(messages=[{"role": "user", "content": f"at {self.at}"}], reward=0.25, end=end)

    async def close(self) -> None: ...


async def walk(task: Task, client: Client) -> float:
    pool = EnvironmentPool(Corridor, name="corridor")
    total = 0.0
    async with pool.episode(task, seed=7) as episode:
        messages = [*episode.start.messages]
        while episode.end is None:
            completion = await client.chat.completions.create(messages=messages)
            step = await episode.step(completion.choices[0].message.model_dump())
            messages += [completion.choices[0].message.model_dump(exclude_none=True), *step.messages]
            total += step.reward or 0.0
    return total


async def streams(task: Task, client: Client) -> float:
    messages: list[Any] = [{"role": "user", "content": task["question"]}]
    text = ""
    async for chunk in await client.chat.completions.create(messages=messages, stream=True):
        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
    return float(text == "streamed")


async def token_level(task: Task, client: Client) -> float:
    first = await client.generate([5, 6, 7], max_tokens=8)
    second = await client.generate([5, 6, 7, *first.output_ids.tolist(), 8], max_tokens=8)
    return float(len(second.output_ids))


async def _duel(task: Task, client: Client, players: list[str]) -> float:
    messages: list[Any] = [{"role": "user", "content": task["question"]}]
    for player in players:
        await client.as_player(player).chat.completions.create(messages=messages)
    return 0.5


async def duel(task: Task, client: Client) -> float:
    return await _duel(task, client, ["white", "black"])


async def swapped_duel(task: Task, client: Client) -> float:
    return await _duel(task, client, ["gray", "black"])
