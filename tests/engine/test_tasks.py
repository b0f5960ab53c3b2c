"""The order of the tasks: shuffled in every pass, or their own."""

from __future__ import annotations

from pathlib import Path

from agentrl.engine.tasks import TaskOrder
from agentrl.tokens.renderer import Renderer
from agentrl.types import Task
from tests.engine.harness import TASKS, episodes, make_engine, run


def test_tasks_that_are_not_shuffled_are_drawn_in_their_own_order_in_every_pass() -> None:
    tasks = [Task(id=str(number), data={}) for number in range(5)]
    own, shuffled = TaskOrder(tasks, 0, shuffle=False), TaskOrder(tasks, 0)
    assert [own[number].id for number in range(10)] == [task.id for task in tasks] * 2
    assert [shuffled[number].id for number in range(5)] != [task.id for task in tasks]


async def test_a_run_that_does_not_shuffle_opens_its_groups_in_the_order_of_the_tasks(
    tmp_path: Path, renderer: Renderer
) -> None:
    await run(make_engine(tmp_path, renderer, shuffle_tasks=False))
    opened = {record["group"]: record["task_id"] for record in episodes(tmp_path)}
    assert [opened[group] for group in sorted(opened)] == [task.id for task in TASKS[: len(opened)]]
