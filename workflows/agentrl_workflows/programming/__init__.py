"""Small programming tasks with hidden tests, at four levels of difficulty."""

from __future__ import annotations

from agentrl_workflows.programming.tasks import (
    PROGRAMMING_LEVELS,
    ProgrammingTask,
    load_programming_tasks,
    programming_tasks,
)

__all__ = ["PROGRAMMING_LEVELS", "ProgrammingTask", "load_programming_tasks", "programming_tasks"]
