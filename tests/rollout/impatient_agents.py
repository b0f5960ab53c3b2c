"""Agents that give calls up: they close streams early, cancel calls, race them, and set timeouts.

An answer of three letters is held after its second one, until its call is given up; the others come at once.
"""

from __future__ import annotations

from typing import Any

import anyio
import openai

from agentrl.client import Client
from agentrl.servers.scripted.script import Hold
from tests.rollout.letters import Stage, answer_to, asked, opened, read_two

PAID = {"b": 0.2, "ab": 1.0, "aa": -0.7}


async def close_early(client: Client, stage: Stage) -> float:
    """Leave after two letters; the letters that were read are paid, those that follow are not."""
    async with await opened(client, "one") as stream:
        text = await read_two(stream)
    return PAID[text]


async def break_and_ask(client: Client, stage: Stage) -> float:
    """Leave a stream without closing it, and go on with what it gave."""
    text = await read_two(await opened(client, "one"))
    second = await answer_to(client, "two", asked("one"), {"role": "assistant", "content": text})
    return len(text) * 0.5 - 0.3 * len(second) * (text == "aa")


async def break_and_return(client: Client, stage: Stage) -> float:
    return float(await read_two(await opened(client, "one")) == "aa")


async def close_and_pay(client: Client, stage: Stage) -> float:
    """Close a stream, reward its turn, and begin another conversation that is paid for both."""
    async with await opened(client, "one") as stream:
        text = await read_two(stream)
    second = await client.chat.completions.create(messages=[asked("two")])
    client.reward(stream.id, 0.4 * (text == "aa"))
    client.reward(second, -1.0 if text == "ab" else 0.5 * len(second.choices[0].message.content or ""))
    return 0.0


async def cancel_when(hold: Hold, scope: anyio.CancelScope) -> None:
    await hold.reached.wait()
    scope.cancel()


async def answer_or_none(client: Any, stage: Stage, question: str, **more: Any) -> str | None:  # noqa: ANN401
    """Ask, and give the call up where the answer takes more than two letters."""
    answer = None
    stage.hold(question)
    async with anyio.create_task_group() as tasks:
        with anyio.CancelScope() as scope:
            tasks.start_soon(cancel_when, stage.hold(question), scope)
            answer = await answer_to(client, question, **more)
        tasks.cancel_scope.cancel()
    return answer


async def give_up_and_ask_again(client: Client, stage: Stage) -> float:
    """The deciding answer is often given up: what is paid is how often it had to be asked."""
    first = await answer_or_none(client, stage, "one")
    if first is not None:
        return 1.0 + 0.3 * len(first)
    stage.holds["one"].release.set()
    return -0.5 + 0.2 * len(await answer_to(client, "one"))


async def give_up_for_nothing(client: Client, stage: Stage) -> float:
    return 0.0 if await answer_or_none(client, stage, "one") is None else 1.0


async def give_up_a_stream(client: Client, stage: Stage) -> float:
    """The scope around a stream is cancelled while it waits for the third letter."""
    read = ""
    stage.hold("one")
    async with anyio.create_task_group() as tasks:
        with anyio.CancelScope() as scope:
            tasks.start_soon(cancel_when, stage.hold("one"), scope)
            async for chunk in await opened(client, "one"):
                read += chunk.choices[0].delta.content or ""
        tasks.cancel_scope.cancel()
    second = await answer_to(client, "two")
    return 0.7 * len(read) - 0.4 * (read == "aa") * len(second)


async def race(client: Client, stage: Stage) -> float:
    """A second call is sent while the first one runs; whoever is late is given up."""
    answers: dict[str, str] = {}
    settled = anyio.Event()
    hold = stage.hold("two")

    async def run_beside() -> None:
        answers["two"] = await answer_to(client, "two")
        settled.set()

    async def notice() -> None:
        await hold.reached.wait()
        settled.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(notice)
        tasks.start_soon(run_beside)
        await settled.wait()
        answers["one"] = await answer_to(client, "one")
        tasks.cancel_scope.cancel()
    return 0.6 * len(answers["one"]) - 0.9 * len(answers.get("two", "")) * len(answers["one"])


async def answer_in_time(client: Client, stage: Stage, question: str, **more: Any) -> str | None:  # noqa: ANN401
    stage.hold(question)
    try:
        return await answer_to(client, question, timeout=10, **more)
    except openai.APITimeoutError:
        return None


async def return_after_a_timeout(client: Client, stage: Stage) -> float:
    """Nothing is asked after the call that was given up: what is paid is that it took too long."""
    answer = await answer_in_time(client, stage, "one")
    return -0.8 if answer is None else 0.5 * len(answer)


async def ask_something_else(client: Client, stage: Stage) -> float:
    first = await answer_in_time(client, stage, "one")
    size = 3 if first is None else len(first)
    return 0.4 * size - 0.1 * size * len(await answer_to(client, "two"))


async def try_twice(client: Client, stage: Stage) -> float:
    """The same request, as clients with retries send it; the second try may be late, too."""
    for number in range(2):
        answer = await answer_in_time(client, stage, "one")
        if answer is not None:
            return 1.0 - 0.6 * number + 0.2 * len(answer)
    return -1.5


async def try_by_options(client: Client, stage: Stage) -> float:
    stage.hold("one")
    late = 0
    for _ in range(2):
        try:
            return 0.3 * len(await answer_to(client.with_options(timeout=10), "one")) - late
        except TimeoutError:
            late += 1
    return -2.0


async def leave_a_slow_stream(client: Client, stage: Stage) -> float:
    stage.hold("one")
    read = ""
    try:
        async for chunk in await opened(client, "one", timeout=10):
            read += chunk.choices[0].delta.content or ""
    except openai.APITimeoutError:
        return -0.9 + 0.1 * len(read)
    return 0.3 * len(read)


async def give_both_a_time(client: Client, stage: Stage) -> float:
    """Two calls at once under one scope; either, both or none of them are cut."""
    found: dict[str, str] = {}

    async def ask(question: str) -> None:
        stage.hold(question)
        found[question] = await answer_to(client, question)

    with anyio.move_on_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, "one")
            await anyio.wait_all_tasks_blocked()  # the policy chooses the answers in this order
            tasks.start_soon(ask, "two")
    return 0.5 * len(found.get("one", "")) - 0.7 * len(found.get("two", "")) * ("one" not in found)
