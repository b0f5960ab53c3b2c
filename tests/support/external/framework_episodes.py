"""Play the agent of an example under `examples/frameworks` in several ways, and print what was recorded as JSON.

Run by the Python of a virtual environment in which the framework is installed, with the path of the example.
"""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Sequence

import anyio

import agentrl
from agentrl.rollout.scripted_policy import plain_tokenizer


async def play(workflow: object, task: agentrl.Task, replies: Sequence[str]) -> dict[str, object]:
    """Return what an episode recorded; its trajectory is verified."""
    trajectory = await agentrl.run_episode(workflow, task, replies=replies)
    agentrl.verify(trajectory)
    decode = plain_tokenizer().tokenizer.decode
    return {
        "final_reward": trajectory.final_reward,
        "failure": trajectory.failure and trajectory.failure.message,
        "samples": len(trajectory.branches()),
        "parents": [turn.parent for turn in trajectory.turns],
        "forks": [turn.fork for turn in trajectory.turns],
        "added": [decode(turn.context_ids.tolist(), skip_special_tokens=False) for turn in trajectory.turns],
    }


async def play_at_once(workflow: object, task: agentrl.Task, replies: Sequence[str], count: int) -> list[dict[str, object]]:
    """Return what `count` episodes recorded that ran at the same time."""
    played: list[dict[str, object]] = []

    async def one() -> None:
        played.append(await play(workflow, task, replies))

    async with anyio.create_task_group() as tasks:
        for _ in range(count):
            tasks.start_soon(one)
    return played


async def main() -> None:
    example = runpy.run_path(sys.argv[1])
    workflow, task, replies = example["Calculator"], example["TASK"], example["REPLIES"]
    result = {
        "scripted": await play(workflow, task, replies),
        "endless": await play(workflow, task, [replies[0]] * 20),
        "broken": await play(workflow, task, replies[:1]),
        "at_once": await play_at_once(workflow, task, replies, count=8),
    }
    sys.stdout.write(json.dumps(result) + "\n")


anyio.run(main)
