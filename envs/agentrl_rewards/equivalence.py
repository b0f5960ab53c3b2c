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
from agentrl_rewards.extract import Extractor, final_answer
from agentrl_rewards.match import exact_match, read_number
from agentrl_rewards.notation import choice, clock, has_doubt, parts_numbers, plain, same_but_for_the_comma
from agentrl_rewards.units import units_of, without_units
from agentrl_rewards.words import names_only_functions
from agentrl_rewards.workers import ClosedAtEnd, GraderLimits, GraderPool

_LOADER = "agentrl_rewards.formulas:load"
_MAX_REFERENCES = 50_000
_OTHER = "1.61803"
"""Comparing a reference with it takes the numeric evaluation that comparing it with itself may do without."""
_OPERATOR = re.compile(r"[-+*/^=<>|_(]")
_NEGATION = re.compile(r"\\(?:neq?|neg|lnot|not)(?![a-zA-Z])|[≠¬]|!=")
_BASE = re.compile(r"(?<=\d)_\{?(\d+)")
"""math-verify reads `204_5` as 204."""
_PRIME = re.compile(r"(?<=[a-zA-Z])'+|\\prime")


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
        await self._kind(plain(reference))
        answer = self._extract(response or "")
        if answer is None:
            return MathGrade(outcome=MathOutcome.NO_ANSWER, answer=None)
        if len(answer) > self._max_answer_chars:
            return MathGrade(outcome=MathOutcome.TOO_LONG, answer=answer[: self._max_answer_chars])
        sides = _Sides.of(reference, answer)
        kind = await self._kind(sides.expected)
        decided = _decide(sides, kind)
        if isinstance(decided, tuple):
            reply = await self._pool.call(*decided)
            if reply.limit is not None:
                return MathGrade(outcome=MathOutcome.TOO_EXPENSIVE, answer=answer)
            decided = reply.value is True
        return MathGrade(outcome=MathOutcome.EQUAL if decided else MathOutcome.DIFFERENT, answer=answer)

    async def _kind(self, text: str) -> Literal["math", "text"]:
        """Return how a plain reference is compared; as mathematics only if it is known to equal itself."""
        if text in self._references:
            return self._references[text]
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
        self._references[text] = kind
        if len(self._references) > _MAX_REFERENCES:
            self._references.popitem(last=False)
        return kind


def _is_words(text: str) -> bool:
    """Return whether a reference is words: no digits or operators, and letters in a row that name no function."""
    if any(character.isdigit() for character in text):
        return False
    return not names_only_functions(text) and ("\\text" in text or _OPERATOR.search(text) is None)


@dataclass(frozen=True, slots=True)
class _Sides:
    """A reference and an answer, as they are compared."""

    expected: str
    given: str
    letters: tuple[str | None, str | None]
    """Of choices: where both have one, it must be the same."""
    has_values: bool
    """Whether something but their letters is to be compared."""

    @classmethod
    def of(cls, reference: str, answer: str) -> _Sides:
        """Return the plain texts; of two choices with a value, and of a choice and another answer, the value alone."""
        texts = plain(reference), plain(answer)
        choices = choice(texts[0]), choice(texts[1])
        letters = choices[0][0], choices[1][0]
        if letters == (None, None):
            return cls(*texts, letters, has_values=True)
        if None not in letters:
            values = choices[0][1], choices[1][1]
            return cls(values[0] or texts[0], values[1] or texts[1], letters, has_values=None not in values)
        return cls(choices[0][1] or texts[0], choices[1][1] or texts[1], letters, has_values=True)


def _decide(sides: _Sides, kind: Literal["math", "text"]) -> bool | tuple[str, str]:
    """Return whether an answer is right where the texts alone decide it, else the two formulas to compare."""
    expected, given = sides.expected, sides.given
    if None not in sides.letters and (sides.letters[0] != sides.letters[1] or not sides.has_values):
        return sides.letters[0] == sides.letters[1]
    if kind == "text":
        return exact_match(given, expected)
    time = clock(expected)
    if time is not None:
        return time == clock(given)
    if same_but_for_the_comma(expected, given):
        return True
    if _contradicts_itself(given, expected) or _PRIME.findall(expected) != _PRIME.findall(given):
        return False
    if has_doubt(given) is not has_doubt(expected) or parts_numbers(expected) or parts_numbers(given):
        return expected == given
    bases = [set(_BASE.findall(each)) for each in (expected, given)]
    if all(bases) and bases[0] != bases[1]:
        return False
    if units_of(expected) and units_of(given) and units_of(expected) != units_of(given):
        return False
    pair = without_units(expected, given)
    return False if pair is None else pair


def _contradicts_itself(given: str, expected: str) -> bool:
    r"""Return whether an answer denies a value, or equates different numbers: math-verify reads `43 = 42` as 42."""
    if (_NEGATION.search(given) is None) is not (_NEGATION.search(expected) is None):
        return True
    sides = given.split("=") if "=" not in expected else []
    return len({number for side in sides if (number := read_number(side)) is not None}) > 1
