"""Compare `MathGrader` and plain math-verify on tables of answers: false positives, false negatives, and where it is worse.

    python benchmarks/math_tables.py tests/reward/math_table.jsonl Math-Verify/tests/test_all.py

A table is JSON lines with `reference`, `response` and `equal`, or a test file with rows such as `("$9$", "Answer $9$", 1)`.
"""

from __future__ import annotations

import ast
import json
import logging
import sys
from pathlib import Path

import anyio

from agentrl_rewards.equivalence import MathGrader
from agentrl_rewards.workers import GraderLimits

Row = tuple[str, str, bool]
NUM_FIELDS = 3


def read_table(path: Path) -> list[Row]:
    """Return the rows of a table: reference, response, and whether they are equal."""
    if path.suffix == ".py":
        tuples = [each for each in ast.walk(ast.parse(path.read_text())) if isinstance(each, ast.Tuple)]
        return [row for each in tuples if (row := literal_row(each)) is not None]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [(line["reference"], line["response"], line["equal"]) for line in lines]


def literal_row(node: ast.Tuple) -> Row | None:
    """Return the row that a tuple of a test file is, None for other tuples."""
    values = [each.value for each in node.elts if isinstance(each, ast.Constant)]
    if len(values) != NUM_FIELDS or len(node.elts) != NUM_FIELDS or values[2] not in (0, 1):
        return None
    return (values[0], values[1], bool(values[2])) if isinstance(values[0], str) and isinstance(values[1], str) else None


def plain_verdict(reference: str, response: str) -> bool:
    """Return the verdict of math-verify with its own extraction."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    targets = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    given = parse(response, targets)
    return any(verify(parse(each, targets), given) for each in (reference, f"${reference}$"))


async def compare(path: Path) -> None:
    """Print the figures of one table, and the rows on which `MathGrader` is wrong."""
    rows = read_table(path)
    counts = {"false positives": 0, "false negatives": 0, "worse than math-verify": 0, "better": 0}
    async with MathGrader(limits=GraderLimits(cpu_s=20)) as grader:
        for reference, response, is_equal in rows:
            ours, plain = await grader(response, reference) == 1.0, plain_verdict(reference, response)
            counts["better"] += ours is is_equal and plain is not is_equal
            if ours is not is_equal:
                counts["false positives" if ours else "false negatives"] += 1
                counts["worse than math-verify"] += plain is is_equal
                print(f"  {reference[-60:]!r} {response[-60:]!r} ours {ours}, math-verify {plain}, table {is_equal}")
    print(f"{path}: {len(rows)} rows, {sum(row[2] for row in rows)} equal; {counts}")


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    for name in sys.argv[1:]:
        anyio.run(compare, Path(name))
