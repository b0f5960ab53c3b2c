"""Thousands of programming tasks, made by families at four levels, with hidden tests and solutions."""

from __future__ import annotations

from agentrl_workflows.coding.tasks import CODING_LEVELS, CodingTask, coding_tasks, make_coding_tasks

__all__ = ["CODING_LEVELS", "CodingTask", "coding_tasks", "make_coding_tasks"]
