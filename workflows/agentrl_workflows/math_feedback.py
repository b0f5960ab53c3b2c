r"""Multi-turn math with feedback: the model answers; if the answer is wrong, it reads that and may try again.

agentrl train examples/bundled/math_feedback.yaml --dry-run
agentrl train examples/bundled/math_feedback.yaml
"""

from __future__ import annotations

from typing import Literal

from agentrl.client import Client, MessageLike
from agentrl.errors import ConfigError
from agentrl.types import Task
from agentrl_rewards.equivalence import MathGrader
from agentrl_rewards.extract import Extractor, boxed, final_answer, first_of, last_number
from agentrl_rewards.match import numeric_match
from agentrl_workflows.graders import MathGradedWorkflow

INSTRUCTION = "Reason step by step, and put your final answer within \\boxed{}."
FEEDBACK = "Your answer is wrong, try again."
extract_number = first_of(boxed, last_number)


class MathFeedback(MathGradedWorkflow):
    r"""Asks `task["question"]` until the answer equals `task["answer"]`, or the attempts are used up.

    Records `correct`, `attempts`, and `repeated` (1 if a wrong answer was given again). A response that a token limit cut is
    wrong.

    Args:
        max_attempts: answers of one episode.
        discount: a right answer is worth 1 at the first attempt, and this much less at each further one.
        compare: `math`: equivalence, such as `\frac{1}{2}` and `0.5`, in worker processes; `number`: value.
        instruction: stands after the question.
        feedback: what the model reads after a wrong answer.
        num_workers: grading processes at most.

    Raises:
        ConfigError: an argument is out of bounds, or math-verify is not installed.
    """

    def __init__(
        self,
        *,
        max_attempts: int = 3,
        discount: float = 0.8,
        compare: Literal["math", "number"] = "math",
        instruction: str = INSTRUCTION,
        feedback: str = FEEDBACK,
        num_workers: int = 2,
    ) -> None:
        if max_attempts < 1 or not 0 < discount <= 1 or compare not in ("math", "number"):
            raise ConfigError(
                "MathFeedback: max_attempts must be at least 1, discount above 0 and at most 1, compare math or number; "
                f"got {max_attempts}, {discount} and {compare!r}"
            )
        self._max_attempts, self._discount = max_attempts, discount
        self._instruction, self._feedback = instruction, feedback
        self._extract: Extractor = final_answer if compare == "math" else extract_number
        super().__init__(MathGrader(num_workers=num_workers) if compare == "math" else None)

    async def run(self, task: Task, client: Client) -> float:
        """Return `discount` to the power of the wrong answers before the right one; 0.0 without a right one.

        Cancellation: the call or the grading is ended.
        """
        question = "\n\n".join(filter(None, (task["question"], self._instruction)))
        messages: list[MessageLike] = [{"role": "user", "content": question}]
        wrong: set[str | None] = set()
        client.record(correct=False, repeated=False)
        for attempt in range(1, self._max_attempts + 1):
            completion = await client.chat.completions.create(messages=messages)
            choice = completion.choices[0]
            client.record(attempts=attempt)
            response = "" if choice.finish_reason == "length" else choice.message.content or ""
            answer = self._extract(response)
            client.final_answer(answer)
            if await self._is_right(response, str(task["answer"])):
                client.record(correct=True)
                return self._discount ** (attempt - 1)
            if answer in wrong:
                client.record(repeated=True)
            wrong.add(answer)
            messages += [choice.message, {"role": "user", "content": self._feedback}]
        return 0.0

    async def _is_right(self, response: str, reference: str) -> bool:
        if self._grader is None:
            return numeric_match(self._extract(response), reference)
        return await self._grader(response, reference) == 1.0
