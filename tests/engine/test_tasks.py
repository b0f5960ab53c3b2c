"""The order of the groups of a run is that of its tasks."""

from __future__ import annotations

from pathlib import Path

from agentrl.tokens.renderer import Renderer
from tests.engine.harness import TASKS, episodes, make_engine, run


async def test_a_run_that_does_not_shuffle_opens_its_groups_in_the_order_of_the_tasks(
    tmp_path: Path, renderer: Renderer
) -> None:
    await run(make_engine(tmp_path, renderer, shuffle_tasks=False))
    opened = {record["group"]: record["task_id"] for record in episodes(tmp_path)}
    assert [opened[group] for group in sorted(opened)] == [task.id for task in TASKS[: len(opened)]]
