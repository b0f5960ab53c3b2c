"""Makes coding tasks: drafts of all families, with answers, of which only sound ones are kept.

Invariant: of every task the reference returns the hidden values, at least three wrong solutions each fail a hidden test, no
constant passes all, and no two tasks of a family behave alike. The same arguments give the same tasks.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from itertools import count as counting
from random import Random
from typing import Final, Literal

from agentrl.errors import ConfigError, WorkflowError
from agentrl.types import Task
from agentrl_rewards.code.values import decode_value, encode_value
from agentrl_workflows.coding import (
    level_1,
    level_2,
    level_3_numbers,
    level_3_structures,
    level_4_machines,
    level_4_records,
)
from agentrl_workflows.coding.answers import LATE, compute_answers
from agentrl_workflows.coding.parts import Draft, Family, Inputs

CODING_LEVELS: Final = (1, 2, 3, 4)
"""One expression or rule; one loop with a state; an algorithm; a simulation or a small language."""
FAMILIES: Final[Mapping[int, tuple[Family, ...]]] = {
    1: level_1.LEVEL_1_FAMILIES,
    2: level_2.LEVEL_2_FAMILIES,
    3: level_3_numbers.LEVEL_3_NUMBERS_FAMILIES + level_3_structures.LEVEL_3_STRUCTURES_FAMILIES,
    4: level_4_machines.LEVEL_4_MACHINES_FAMILIES + level_4_records.LEVEL_4_RECORDS_FAMILIES,
}
_FORMAT: Final = "Answer with the whole function in one block of Python code."
_HELD_OUT_SHARE: Final = 8
_MAX_TRIES: Final = 12
"""Drafts of a family for each task that it should give."""
_MAX_CONSTANT_SHARE: Final = 0.7
"""Share of the hidden tests that one constant may pass; the grader pays nothing for a share."""
_MIN_HIDDEN: Final = 5
_MIN_WRONG: Final = 3
_SPARE: Final = 2
"""Drafts of a level for each task that it should give: some are not sound, and some families run out."""
_PROBES: Final = 2
"""Drafts of a family whose inputs tell its references apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodingTask:
    """One function to write, with its solutions."""

    level: int
    family: str
    draft: Draft
    answers: tuple[str, ...]
    """What the reference returns for each input, as text of `encode_value`."""

    @property
    def calls(self) -> list[tuple[str, str]]:
        """Pairs of a call and its value, in Python; the first is the example."""
        name = self.draft.name
        shown = [", ".join(map(repr, arguments)) for arguments in self.draft.inputs]
        return [(f"{name}({text})", repr(decode_value(value))) for text, value in zip(shown, self.answers, strict=True)]

    @property
    def question(self) -> str:
        """The task as the policy reads it."""
        draft, (call, value) = self.draft, self.calls[0]
        return (
            f"Write a Python function `{draft.name}({draft.arguments})`. {draft.statement}\n\n"
            f"Example: `{call}` returns `{value}`.\n\n{_FORMAT}"
        )

    @property
    def is_held_out(self) -> bool:
        """Whether it is held out: one task in eight, by its statement."""
        return zlib.crc32(self.draft.statement.encode()) % _HELD_OUT_SHARE == 0

    def as_task(self) -> Task:
        """Return the task for a workflow, with tests for `agentrl_rewards.code.read_tests`. Its id follows from both."""
        calls = [[call, value] for call, value in self.calls]
        digest = hashlib.sha256(json.dumps([self.question, calls]).encode()).hexdigest()
        return Task(
            id=f"coding-{self.level}-{self.family}-{digest[:12]}",
            data={
                "question": self.question,
                "examples": {"calls": calls[:1]},
                "tests": {"calls": calls[1:]},
                "level": self.level,
                "family": self.family,
                "reference": f"```python\n{self.draft.reference}```",
            },
        )


def coding_tasks(
    count: int = 2400,
    *,
    seed: int = 0,
    levels: Sequence[int] = CODING_LEVELS,
    split: Literal["train", "held_out"] | None = None,
) -> list[Task]:
    """Return about `count` different programming tasks, as many at each level, for `agentrl_workflows.code_feedback`.

    The fields are `question`, `examples` (the one in the question), `tests` (hidden), `level`, `family` and `reference`.

    Args:
        count: of both splits together.
        seed: picks the tasks and their order.
        levels: of 1 to 4.
        split: None: all tasks. One task in eight is held out; tasks of both splits may belong to one family.

    Raises:
        ConfigError: there are not so many tasks, or an argument cannot be used.
    """
    if split not in (None, "train", "held_out"):
        raise ConfigError(f"coding tasks: expected the split train or held_out, got {split!r}")
    made = _made_once(count, seed, tuple(levels))
    return [each.as_task() for each in made if split is None or each.is_held_out == (split == "held_out")]


@lru_cache(maxsize=2)
def _made_once(count: int, seed: int, levels: tuple[int, ...]) -> tuple[CodingTask, ...]:
    """Return the tasks; both splits of a run come from one set, which takes half a minute."""
    return tuple(make_coding_tasks(count, seed=seed, levels=levels))


def make_coding_tasks(count: int, *, seed: int = 0, levels: Sequence[int] = CODING_LEVELS) -> list[CodingTask]:
    """Return `count` tasks with their solutions, wrong ones too, as `coding_tasks` does.

    Raises:
        ConfigError: there are not so many tasks, or an argument cannot be used.
    """
    if count < len(levels) or not levels or not set(levels) <= set(CODING_LEVELS):
        raise ConfigError(
            f"coding tasks: expected levels of {CODING_LEVELS} and a task for each, got {levels} and count {count}"
        )
    shares = {level: -(-count // len(levels)) for level in levels}
    drafts = {
        (level, family): _drafts(family, 1 + shares[level] * _SPARE // len(FAMILIES[level]), seed)
        for level in levels
        for family in FAMILIES[level]
    }
    sound = _sound_tasks(drafts)
    tasks: list[CodingTask] = []
    for level in levels:
        found = [*_in_turn([iter(sound[level, family]) for family in FAMILIES[level]])]
        if len(found) < shares[level]:
            raise ConfigError(f"coding tasks: level {level} has {len(found)} tasks, expected {shares[level]}; lower count")
        tasks += found[: shares[level]]
    Random(f"coding {seed}").shuffle(tasks)
    return tasks[:count]


def _in_turn(queues: list[Iterator[CodingTask]]) -> Iterator[CodingTask]:
    while queues:
        for queue in [*queues]:
            task = next(queue, None)
            if task is None:
                queues.remove(queue)
            else:
                yield task


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A sound task, and what its reference returns for the probes of its family."""

    task: CodingTask
    behavior: tuple[str, ...]


def _sound_tasks(drafts: Mapping[tuple[int, Family], Sequence[Draft]]) -> dict[tuple[int, Family], list[CodingTask]]:
    """Return the sound tasks of each family, of which no two behave alike."""
    jobs: list[tuple[str, str, Inputs]] = []
    for some in drafts.values():
        probes = [arguments for draft in some[:_PROBES] for arguments in draft.inputs]
        for draft in some:
            jobs.append((draft.reference, draft.name, [*draft.inputs, *probes]))
            jobs += [(wrong, draft.name, draft.inputs) for wrong in draft.wrong]
    answers = iter(compute_answers(jobs))
    found: dict[tuple[int, Family], list[_Candidate]] = {}
    for (level, family), some in drafts.items():
        found[level, family] = []
        for draft in some:
            right = _in_time(next(answers), draft)
            own, behavior = right[: len(draft.inputs)], tuple(right[len(draft.inputs) :])
            wrong = [source for source in draft.wrong if next(answers)[1:] != own[1:]]
            draft = replace(draft, wrong=tuple(wrong))
            if _is_sound(draft, own):
                task = CodingTask(level=level, family=family.__name__, draft=draft, answers=tuple(own))
                found[level, family].append(_Candidate(task=task, behavior=behavior))
    return _without_twins(found)


def _in_time(answers: list[str], reference: Draft) -> list[str]:
    """Return the answers of a reference: a task that is left out for its time would depend on the machine."""
    if LATE in answers:
        raise WorkflowError(
            f"coding tasks: expected the reference of {reference.name} to end in its CPU time, got a late one; correct the "
            f"family, or report this: {reference.statement:.200}"
        )
    return answers


def _without_twins(
    found: Mapping[tuple[int, Family], Sequence[_Candidate]],
) -> dict[tuple[int, Family], list[CodingTask]]:
    """Leave out tasks whose reference behaves as that of an earlier one: on the probes, and on their own inputs."""
    pairs = [
        (first.task, second.task)
        for some in found.values()
        for first, second in combinations(some, 2)
        if first.behavior == second.behavior
    ]
    jobs = [(first.draft.reference, first.draft.name, second.draft.inputs) for first, second in pairs]
    twins = {
        second.draft.statement
        for (first, second), found in zip(pairs, compute_answers(jobs), strict=True)
        if tuple(_in_time(found, first.draft)) == second.answers
    }
    return {key: [each.task for each in some if each.task.draft.statement not in twins] for key, some in found.items()}


def _drafts(family: Family, count: int, seed: int) -> list[Draft]:
    rng = Random(f"coding {seed} {family.__name__}")
    drafts: dict[str, Draft] = {}
    for tried in counting():
        if len(drafts) >= count or tried >= count * _MAX_TRIES:
            return [*drafts.values()]
        draft = _without_repeats(family(rng))
        drafts.setdefault(draft.statement, draft)
    raise AssertionError("unreachable")


def _without_repeats(draft: Draft) -> Draft:
    """Return the draft without inputs that come twice."""
    unique = {encode_value(list(arguments)): arguments for arguments in draft.inputs}
    return replace(draft, inputs=tuple(unique.values()))


def _is_sound(draft: Draft, answers: Sequence[str]) -> bool:
    hidden = answers[1:]
    if len(hidden) < _MIN_HIDDEN or any(answer.startswith("!") for answer in answers) or len(draft.wrong) < _MIN_WRONG:
        return False
    return max(Counter(hidden).values()) <= _MAX_CONSTANT_SHARE * len(hidden)
