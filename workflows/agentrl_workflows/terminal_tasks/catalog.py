"""The bundled terminal tasks: by level, as tasks of a run file, or as folders on disk."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.errors import ConfigError
from agentrl.types import Task
from agentrl_sandbox.harbor.task import harbor_tasks
from agentrl_workflows.terminal_tasks.problem import Problem, cached_folder
from agentrl_workflows.terminal_tasks.problems_1 import easy_problems
from agentrl_workflows.terminal_tasks.problems_2 import medium_problems
from agentrl_workflows.terminal_tasks.problems_3 import hard_problems
from agentrl_workflows.terminal_tasks.problems_4 import expert_problems


def bundled_problems() -> list[Problem]:
    """Return all problems, the easy ones first."""
    return [*easy_problems(), *medium_problems(), *hard_problems(), *expert_problems()]


def terminal_tasks(levels: Sequence[int] = (1, 2, 3, 4)) -> list[Task]:
    """Return the bundled tasks of some levels; their folders are written to the cache of this user.

    Raises:
        ConfigError: there is no such level.
    """
    if not levels or not set(levels) <= {1, 2, 3, 4}:
        raise ConfigError(f"terminal_tasks: expected levels of 1 to 4, got {levels!r}")
    folder = cached_folder(bundled_problems(), "bundled")
    return [task for task in harbor_tasks(str(folder)) if task["level"] in levels]
