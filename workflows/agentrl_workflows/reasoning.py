r"""Single-turn reasoning: one question, one answer in `\boxed{...}`, graded in worker processes.

agentrl train examples/bundled/reasoning.yaml --dry-run
agentrl train examples/bundled/reasoning.yaml
"""

from __future__ import annotations

from typing import Literal

from agentrl.client import Client
from agentrl.types import Task
from agentrl_rewards.equivalence import MathGrader
from agentrl_rewards.extract import boxed, first_of, last_number
from agentrl_rewards.match import exact_match, numeric_match
from agentrl_rewards.rubric import Rubric
from agentrl_rewards.shaping import has_one_box
from agentrl_workflows.graders import MathGradedWorkflow

SYSTEM = r"Reason step by step, then give the final answer in \boxed{}."


class Reasoning(MathGradedWorkflow):
    r"""Asks `task["question"]` once and compares the answer with `task["answer"]`.

    Records `correct`, `format` (exactly one box) and `truncated`; a response that a token limit cut is wrong.

    Args:
        compare: `math`: equivalence, such as `\frac{1}{2}` and `0.5`; `number`: value; `text`: without case and punctuation.
        format_weight: reward of an answer in exactly one box, beside 1.0 for a right answer.
        system: the system message.
        num_workers: grading processes at most.
    """

    def __init__(
        self,
        *,
        compare: Literal["math", "number", "text"] = "math",
        format_weight: float = 0.1,
        system: str = SYSTEM,
        num_workers: int = 2,
    ) -> None:
        super().__init__(MathGrader(num_workers=num_workers) if compare == "math" else None)
        self._compare, self._system = compare, system
        self._rubric = Rubric(correct=(1.0, self._is_correct), format=(format_weight, self._has_format))

    async def run(self, task: Task, client: Client) -> None:
        """Set the weighted sum of `correct` and `format` as the final reward, with its parts.

        Cancellation: the call or the grading is ended.
        """
        messages = [{"role": "system", "content": self._system}, {"role": "user", "content": task["question"]}]
        completion = await client.chat.completions.create(messages=messages)
        truncated = completion.choices[0].finish_reason == "length"
        client.record(truncated=truncated)
        response = "" if truncated else completion.choices[0].message.content or ""
        client.final_answer(boxed(response) if self._compare == "text" else first_of(boxed, last_number)(response))
        client.reward_final(await self._rubric.weighted(response, task, record=client.record))

    async def _is_correct(self, response: str, task: Task) -> float:
        reference = str(task["answer"])
        if self._grader is not None:
            return await self._grader(response, reference)
        if self._compare == "number":
            return float(numeric_match(first_of(boxed, last_number)(response), reference))
        return float(exact_match(boxed(response), reference))

    def _has_format(self, response: str, task: Task) -> float:
        del task
        return float(has_one_box(response))
