"""The workflow and the tasks of a run file that names none, since an online run gets its episodes from its clients."""

from __future__ import annotations

from typing import Final

from agentrl.client import Client
from agentrl.errors import ConfigError
from agentrl.types import Task
from agentrl.workflow import RolloutWorkflow

ONLINE_DEFAULTS: Final = {
    "workflow": f"{__name__}:NoWorkflow",
    "tasks": {"factory": f"{__name__}:no_tasks"},
}
"""The fields of a run file that only evaluations need."""


class NoWorkflow(RolloutWorkflow):
    """Plays nothing."""

    async def run(self, task: Task, client: Client) -> float:
        """Refuse to play."""
        raise ConfigError("this run file names no workflow, so it plays no task; set workflow and tasks, or serve it online")


def no_tasks() -> list[Task]:
    """Return the one task that stands for none."""
    return [Task(id="traffic", data={})]
