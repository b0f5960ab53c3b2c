"""Graders that a run file can name, such as for `agentrl_workflows.tool_agent`, and a base for workflows that grade math."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from agentrl.types import Task
from agentrl.workflow import RolloutWorkflow
from agentrl_rewards.equivalence import MathGrader
from agentrl_rewards.extract import after, boxed, first_of, last_number
from agentrl_rewards.match import exact_match, numeric_match


class MathGradedWorkflow(RolloutWorkflow):
    """A workflow whose answers one `MathGrader` compares; its processes end with the run."""

    def __init__(self, grader: MathGrader | None) -> None:
        self._grader = grader

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[None]:
        """End the grading processes with the block.

        Cancellation: they are ended.
        """
        try:
            yield
        finally:
            if self._grader is not None:
                self._grader.close()


def number_matches(answer: str, task: Task) -> float:
    r"""Return 1.0 if the number in the last `\boxed{}`, or else the last number, equals `task["answer"]`.

    Example:
        >>> number_matches("That makes 1,200.", Task(id="1", data={"answer": "1200"}))
        1.0
    """
    return float(numeric_match(first_of(boxed, last_number)(answer), str(task["answer"])))


def text_matches(answer: str, task: Task) -> float:
    r"""Return 1.0 if what follows the last `Answer:`, or stands in the last `\boxed{}`, equals `task["answer"]`.

    Example:
        >>> text_matches("Answer: Blue.", Task(id="1", data={"answer": "blue"}))
        1.0
    """
    return float(exact_match(first_of(after("Answer:"), boxed)(answer), str(task["answer"])))
