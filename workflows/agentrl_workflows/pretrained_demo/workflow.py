"""An agent that calculates by text: it writes `CALC(12 + 5)`, reads `RESULT: 17`, and ends with `ANSWER: 17`."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import ClassVar, Final, cast

from agentrl.client import Client, MessageLike
from agentrl.types import Task, Trajectory
from agentrl.workflow import GroupWorkflow, RolloutWorkflow
from agentrl_workflows.pretrained_demo.problems import Operator, calculate

HOW_TO_WRITE: Final = "Write CALC(a + b) to calculate. Write ANSWER: n at the end."
UNCLEAR: Final = "Write CALC(a + b) or ANSWER: n."
"""Reply to a turn that holds neither a calculation nor an answer."""
EXAMPLES: Final[tuple[MessageLike, ...]] = (
    {"role": "user", "content": "Pat has 25 hats and finds 14 more. How many hats does Pat have now?"},
    {"role": "assistant", "content": "CALC(25 + 14)"},
    {"role": "user", "content": "RESULT: 39"},
    {"role": "assistant", "content": "ANSWER: 39"},
    {"role": "user", "content": "Lou has 62 keys and gives away 8. How many keys does Lou have now?"},
    {"role": "assistant", "content": "CALC(62 - 8)"},
    {"role": "user", "content": "RESULT: 54"},
    {"role": "assistant", "content": "ANSWER: 54"},
)
"""Two worked problems as earlier turns. None multiplies: that the model has to find by itself."""
CONTINUED: Final[tuple[MessageLike, ...]] = (
    {"role": "user", "content": "Then Lou gets 20 more. How many keys does Lou have now?"},
    {"role": "assistant", "content": "CALC(54 + 20)"},
    {"role": "user", "content": "RESULT: 74"},
    {"role": "assistant", "content": "ANSWER: 74"},
)
"""A second part of the second problem, which begins with the answer to the first."""

_CALL = re.compile(r"CALC\((\d{1,9}) ?([-+*]) ?(\d{1,9})\)")
_ANSWER = re.compile(r"ANSWER: (-?\d{1,18})\W*$")


class WrittenCalculator(RolloutWorkflow):
    """Answers each calculation until the model gives its answer; 1 if that is right, else 0.

    Records `success`, `calls` (calculations that were answered) and `unclear` (turns that were neither).
    """

    max_turns: int = 4
    """Model calls of one question; without an answer by then it is not answered."""
    examples: ClassVar[Sequence[MessageLike]] = EXAMPLES
    limit_reward = 0.0

    def reference(self, task: Task) -> str | list[str]:
        """Return the right answers, which need no call."""
        answers = [f"ANSWER: {answer}" for _, answer in self.parts(task)]
        return answers if len(answers) > 1 else answers[0]

    def parts(self, task: Task) -> Sequence[tuple[str, int]]:
        """Return the questions, which are asked one after the other, each with its answer."""
        return [(task["question"], task["answer"])]

    async def run(self, task: Task, client: Client) -> float:
        """Return the share of the questions that were answered right; none is asked after a wrong answer.

        Cancellation: leaves nothing behind.
        """
        messages: list[MessageLike] = [{"role": "system", "content": HOW_TO_WRITE}, *self.examples]
        parts, right, counts = self.parts(task), 0, {"calls": 0, "unclear": 0}
        for question, answer in parts:
            messages.append({"role": "user", "content": question})
            if await self._answer(messages, client, counts) != answer:
                break
            right += 1
        client.record(success=right == len(parts), **counts)
        return right / len(parts)

    async def _answer(self, messages: list[MessageLike], client: Client, counts: dict[str, int]) -> int | None:
        """Return the model's answer to the last message, or None; adds the turns to the messages and to the counts."""
        for _ in range(self.max_turns):
            completion = await client.chat.completions.create(messages=messages)
            message = completion.choices[0].message
            text = message.content or ""
            messages.append(message)
            given = read_answer(text)
            if given is not None:
                return given
            reply = answer_call(text)
            counts["unclear" if reply is None else "calls"] += 1
            messages.append({"role": "user", "content": reply or UNCLEAR})
        return None


class ContinuedCalculator(WrittenCalculator):
    """Tells a problem of two operations in two parts: the second follows the right answer to the first.

    A model that has learned to calculate once never calculates twice before it answers, so no reward would teach it to.
    """

    examples: ClassVar[Sequence[MessageLike]] = (*EXAMPLES, *CONTINUED)

    def parts(self, task: Task) -> Sequence[tuple[str, int]]:
        """Return the parts of the problem."""
        return [(part["question"], part["answer"]) for part in task["parts"]]


class ShuffledRewards(GroupWorkflow, WrittenCalculator):
    """The control: the members of a group get each other's rewards, so they have the same mean and say nothing."""

    async def score_group(self, task: Task, episodes: Sequence[Trajectory]) -> Sequence[float]:
        """Return the rewards in another order, which the task's id and the ids of the members draw."""
        rewards = [episode.final_reward or 0.0 for episode in episodes]
        random.Random(" ".join([task.id, *(episode.episode_id for episode in episodes)])).shuffle(rewards)
        return rewards


def read_answer(text: str) -> int | None:
    r"""Return the number of `ANSWER: n` at the end of a text; None: there is none.

    Example:
        >>> read_answer("So ANSWER: 17."), read_answer("ANSWER: 17\nCALC(1 + 2)")
        (17, None)
    """
    found = _ANSWER.search(text.strip())
    return None if found is None else int(found[1])


def answer_call(text: str) -> str | None:
    """Return `RESULT: n` for the last calculation of a text; None: there is none.

    Example:
        >>> answer_call("CALC(12 * 5)"), answer_call("12 * 5")
        ('RESULT: 60', None)
    """
    calls = _CALL.findall(text)
    if not calls:
        return None
    a, op, b = calls[-1]
    return f"RESULT: {calculate(int(a), cast('Operator', op), int(b))}"
