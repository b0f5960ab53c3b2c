r"""Mathematical equivalence of a model's answer and a reference, with math-verify in worker processes.

Whether an answer is right follows from the two texts alone. A worker that hangs without spending its CPU time, or dies, is
an `EnvironmentFault`, never a wrong answer.

A reference of words (`\text{Evelyn}`, `even`) is compared as text: as mathematics, `even` would equal `neve`.
"""

from __future__ import annotations

import importlib.util
import re
from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from agentrl.errors import ConfigError, EnvironmentFault
from agentrl.reward.extract import Extractor, final_answer
from agentrl.reward.match import exact_match, read_number
from agentrl.reward.notation import choice, clock, has_doubt, parts_numbers, plain, same_but_for_the_comma, units_of
from agentrl.reward.workers import ClosedAtEnd, GraderLimits, GraderPool

_LOADER = "agentrl.reward.formulas:load"
_MAX_REFERENCES = 50_000
_OTHER = "1.61803"
"""Comparing a reference with it takes the numeric evaluation that comparing it with itself may do without."""
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_WORD = re.compile(r"[^\W\d_]{3,}|(?i:\bno\b)")
_OPERATOR = re.compile(r"[-+*/^=<>|_(]")
_NEGATION = re.compile(r"\\(?:neq?|neg|lnot|not)(?![a-zA-Z])|[≠¬]|!=")
_BASE = re.compile(r"(?<=\d)_\{?(\d+)")
"""math-verify reads `204_5` as 204."""
_PRIME = re.compile(r"(?<=[a-zA-Z])'+|\\prime")
_FUNCTIONS = re.compile(
    r"(arc)?(sin|cos|tan|cot|sec|csc)h?|ln|log|lg|exp|sqrt|pi|det|min|max|gcd|lcm|mod|inf|sup|lim|d[xyt]|abs|deg|or|and"
)


class MathOutcome(StrEnum):
    """The reason for which an answer is right or wrong."""

    EQUAL = "equal"
    DIFFERENT = "different"
    NO_ANSWER = "no_answer"
    """Nothing was found in the response."""
    TOO_LONG = "too_long"
    """The answer is longer than `max_answer_chars`; it was not compared."""
    TOO_EXPENSIVE = "too_expensive"
    """Reading or comparing the answer has spent the CPU time or memory of a job, such as `9^{9^{9^9}}`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MathGrade:
    """The grade of one response."""

    outcome: MathOutcome
    answer: str | None

    @property
    def reward(self) -> float:
        """1.0 for a right answer, else 0.0."""
        return float(self.outcome is MathOutcome.EQUAL)


class MathGrader(ClosedAtEnd):
    r"""Grades responses to mathematical questions; the workers start with the first one and are kept.

    Args:
        extract: finds the answer in a response; by default `final_answer`.
        num_workers: processes at most.
        max_answer_chars: an answer that is longer is wrong.
        limits: of one comparison.

    Example:
        grader = MathGrader()
        reward = await grader(completion.choices[0].message.content, task["answer"])
    """

    def __init__(
        self,
        *,
        extract: Extractor = final_answer,
        num_workers: int = 2,
        max_answer_chars: int = 1_000,
        limits: GraderLimits | None = None,
    ) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError("MathGrader needs math-verify, which is not installed; run `pip install 'agentrl[math]'`")
        self._extract = extract
        self._max_answer_chars = max_answer_chars
        self._pool = GraderPool(_LOADER, num_workers=num_workers, limits=limits)
        self._references: OrderedDict[str, Literal["math", "text"]] = OrderedDict()

    def close(self) -> None:
        """End the workers."""
        self._pool.close()

    async def __call__(self, response: str | None, reference: str) -> float:
        """Return 1.0 if the response's answer equals the reference, else 0.0; `grade` also says why."""
        return (await self.grade(response, reference)).reward

    async def grade(self, response: str | None, reference: str) -> MathGrade:
        """Return the grade of a response; a reference that is empty or spends a job's limits is an EnvironmentFault."""
        kind = await self._kind(reference)
        answer = self._extract(response or "")
        if answer is None:
            return MathGrade(outcome=MathOutcome.NO_ANSWER, answer=None)
        if len(answer) > self._max_answer_chars:
            return MathGrade(outcome=MathOutcome.TOO_LONG, answer=answer[: self._max_answer_chars])
        decided = _decide(reference, answer, kind)
        if decided is None:
            reply = await self._pool.call(plain(reference), plain(answer))
            if reply.limit is not None:
                return MathGrade(outcome=MathOutcome.TOO_EXPENSIVE, answer=answer)
            decided = reply.value is True
        return MathGrade(outcome=MathOutcome.EQUAL if decided else MathOutcome.DIFFERENT, answer=answer)

    async def _kind(self, reference: str) -> Literal["math", "text"]:
        """Return how a reference is compared; as mathematics only if it is known to equal itself."""
        if reference in self._references:
            return self._references[reference]
        text = plain(reference)
        if not text:
            raise EnvironmentFault("the reference answer of the task is empty; give each task one, or leave the task out")
        kind: Literal["math", "text"] = "text"
        if not _is_words(text):
            itself, other = await self._pool.call(text, text), await self._pool.call(text, _OTHER)
            if limit := itself.limit or other.limit:
                raise EnvironmentFault(
                    f"comparing the reference answer {text[:80]!r} with itself and with {_OTHER} spends the {limit} of a "
                    "job; simplify the reference, or raise GraderLimits"
                )
            kind = "math" if itself.value is True else "text"
        self._references[reference] = kind
        if len(self._references) > _MAX_REFERENCES:
            self._references.popitem(last=False)
        return kind


def _is_words(text: str) -> bool:
    """Return whether a reference is words: no digits or operators, and letters in a row that name no function."""
    if any(character.isdigit() for character in text):
        return False
    words = [word.lower() for word in _WORD.findall(_COMMAND.sub(" ", text))]
    return any(_FUNCTIONS.fullmatch(word) is None for word in words) and ("\\text" in text or _OPERATOR.search(text) is None)


def _decide(reference: str, answer: str, kind: Literal["math", "text"]) -> bool | None:
    """Return whether an answer is right where its text alone decides it, else None."""
    expected, given = plain(reference), plain(answer)
    letter = choice(expected)
    if letter is not None and letter == choice(given):
        return True
    if kind == "text":
        return exact_match(answer, expected)
    time = clock(expected)
    if time is not None:
        return time == clock(given)
    if same_but_for_the_comma(expected, given):
        return True
    if _contradicts_itself(answer, reference) or _PRIME.findall(expected) != _PRIME.findall(given):
        return False
    if has_doubt(answer) is not has_doubt(reference) or parts_numbers(expected) or parts_numbers(given):
        return expected == given
    bases = [set(_BASE.findall(each)) for each in (expected, given)]
    if all(bases) and bases[0] != bases[1]:
        return False
    return False if units_of(expected) and units_of(given) and units_of(expected) != units_of(given) else None


def _contradicts_itself(answer: str, reference: str) -> bool:
    r"""Return whether an answer denies a value, or equates different numbers: math-verify reads `43 = 42` as 42."""
    if (_NEGATION.search(answer) is None) is not (_NEGATION.search(reference) is None):
        return True
    sides = plain(answer).split("=") if "=" not in reference else []
    return len({number for side in sides if (number := read_number(side)) is not None}) > 1
