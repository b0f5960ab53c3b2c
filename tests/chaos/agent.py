"""The agent of the runs under test: one model call, and a program of its own in a child process."""

from __future__ import annotations

import sys

import anyio
from anyio.abc import Process

from agentrl import Client, RolloutWorkflow, Task
from tests.chaos.phases import Phase, announcer

CHILD_S = 10.0
"""Deadline of the child's answer, seconds."""
CHILD = "import sys, time\nfor line in sys.stdin: time.sleep(1); print(line.strip()[::-1], flush=True)"
"""Answers after a second, so that there is time to strike it after its episode was announced."""


class Agent(RolloutWorkflow):
    """Rewards the share of one letter in an answer that went through the child."""

    def __init__(self, with_child: bool = False) -> None:
        """Use a child process, or do without."""
        self._with_child = with_child

    async def run(self, task: Task, client: Client) -> float:
        """Ask, let the child turn the answer around, and reward it."""
        phase: Phase = "evaluation" if task["held_out"] else "rollout"
        if self._with_child:
            async with await anyio.open_process([sys.executable, "-S", "-c", CHILD]) as child:
                announcer.announce(phase, child.pid)
                try:
                    text = await _turned(await _answer(task, client), child)
                finally:
                    child.kill()
        else:
            announcer.announce(phase)
            text = await _answer(task, client)
        return text.count("e") / max(len(text), 1)


async def _answer(task: Task, client: Client) -> str:
    completion = await client.chat.completions.create(messages=[{"role": "user", "content": task["question"]}])
    return completion.choices[0].message.content or ""


async def _turned(text: str, child: Process) -> str:
    assert child.stdin is not None
    assert child.stdout is not None
    with anyio.fail_after(CHILD_S):
        await child.stdin.send(repr(text).encode() + b"\n")
        answer = await child.stdout.receive()
    return answer.decode()
