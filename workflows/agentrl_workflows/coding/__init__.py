"""Thousands of programming tasks, made by families at four levels, with hidden tests and solutions."""

from __future__ import annotations

from agentrl_workflows.coding.tasks import LEVELS, CodingTask, coding_tasks, make_coding_tasks

__all__ = ["LEVELS", "CodingTask", "coding_tasks", "make_coding_tasks"]
