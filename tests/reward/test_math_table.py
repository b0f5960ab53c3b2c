"""The grader agrees with the tables of other graders, and refuses each right answer that is changed a little.

The rows of `math_table.jsonl` are facts (reference, response, verdict) from the tests of Math-Verify 0.9.0, NeMo-Skills,
Hendrycks' MATH, Qwen2.5-Math and ToRA, and our own. A row with a `reason` has another verdict in its table.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio
import pytest

from agentrl_rewards.equivalence import MathGrader
from agentrl_rewards.extract import final_answer
from agentrl_rewards.workers import GraderLimits

pytest.importorskip("math_verify", reason="the extra agentrl[math]")
pytestmark = pytest.mark.long  # thousands of comparisons, about a minute

TABLE = Path(__file__).with_name("math_table.jsonl")
MAX_FALSE_NEGATIVES = 0.03
MAX_REASONS = 5
NO_SIGN = re.compile(
    r"[=<>,%]|\\(?:le|ge|lt|gt|ne|in|cup|pm|text|mathrm|begin|\{)(?![a-z])|^\$?0\$?$|[a-z]{2}", re.IGNORECASE
)
LETTER = re.compile(r"(?<![\\a-zA-Z{])[a-z](?![a-zA-Z}])")
NAMED = re.compile(r"(?:[a-zA-Z]|\([a-z, ]+\))\s*(?:=|\\in|\\approx|\\l[et]|<)")
FREE = re.compile(r"^[A-J][.]|=.*=|binom|approx|\\[a-z]*matrix|0\d{15}")
"""Other numbers in them may be right: a choice's text, an intermediate step, the mirrored binomial coefficient."""


@dataclass(frozen=True, slots=True)
class Row:
    source: str
    reference: str
    response: str
    equal: bool
    reason: str | None = None


@pytest.fixture
def anyio_backend() -> str:
    """What depends on the event loop is tested with the workers; these compare formulas."""
    return "asyncio"


def rows() -> list[Row]:
    return [Row(**json.loads(line)) for line in TABLE.read_text().splitlines()]


async def accepted(pairs: Sequence[tuple[str, str]]) -> list[bool]:
    """Return for each response and reference whether it is right."""
    verdicts = [False] * len(pairs)

    async def grade(grader: MathGrader, place: int) -> None:
        async with turns:
            verdicts[place] = await grader(*pairs[place]) == 1.0

    turns = anyio.Semaphore(4)
    async with MathGrader(limits=GraderLimits(cpu_s=20)) as grader, anyio.create_task_group() as tasks:
        for place in range(len(pairs)):
            tasks.start_soon(grade, grader, place)
    return verdicts


def perturbed(row: Row) -> Iterator[str]:
    """Return wrong answers near the right one: other numbers, the other sign, another unit or letter, and hedges."""
    answer = (final_answer(row.response) or "").strip("$")
    numbers = [] if FREE.search(answer) else list(re.finditer(r"\d+", answer))
    for number in numbers[:1] + numbers[-1:]:
        yield f"{answer[: number.start()]}{int(number[0]) + 1}{answer[number.end() :]}"
        yield f"{answer[: number.end()]}7{answer[number.end() :]}"
    if answer and NO_SIGN.search(answer) is None:
        yield f"-({answer})"
    if "cm" in answer and "cm" in row.reference:
        yield answer.replace("cm", "mm")
    letter = LETTER.search(answer)
    is_free = letter is not None and letter[0] not in LETTER.findall(row.reference)  # the row itself renames it
    if letter is not None and not is_free and (NAMED.search(answer) is None or NAMED.search(row.reference) is not None):
        yield answer.replace(letter[0], "q" if letter[0] != "q" else "u")
    if re.fullmatch(r"[-+]?\d*[1-9]\d*(?:\.\d+)?", answer):
        yield from (rf"{answer} \text{{ or }} 977", f"{answer}, 977", rf"\pm {answer}", rf"\neg {answer}", f"{answer}x")
        yield rf"{answer} \approx {answer}977"


@pytest.mark.starts
async def test_the_tables_of_others_have_no_false_positive_and_at_most_three_percent_false_negatives() -> None:
    table = rows()
    verdicts = await accepted([(row.response, row.reference) for row in table])
    wrong = [row for row, verdict in zip(table, verdicts, strict=True) if verdict is not row.equal]
    assert [row for row in wrong if not row.equal or row.source == "our own"] == []
    positives = [row for row in table if row.equal and row.source != "our own"]
    assert len(positives) > 250
    assert len(wrong) / len(positives) <= MAX_FALSE_NEGATIVES, wrong
    assert sum(row.reason is not None for row in table) <= MAX_REASONS


@pytest.mark.starts
async def test_a_right_answer_that_is_changed_a_little_is_refused() -> None:
    pairs = {(f"\\boxed{{{answer}}}", row.reference) for row in rows() if row.equal for answer in perturbed(row)}
    listed = sorted(pairs - {(row.response, row.reference) for row in rows() if row.equal})
    assert len(listed) > 1_000
    assert [pair for pair, verdict in zip(listed, await accepted(listed), strict=True) if verdict] == []
