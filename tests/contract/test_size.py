"""The code stays small: caps on files and functions, and a count of large files that may only fall."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHIPPED = ("agentrl", "workflows", "envs", "examples")
MAX_FILE_LINES = 500
SOFT_FILE_LINES = 300
MAX_FUNCTION_LINES = 80
SOFT_FUNCTION_LINES = 50
MAX_CORE_LINES = 10_000
FILES_OVER_SOFT = 0
FUNCTIONS_OVER_SOFT = 0


def sources(*roots: str) -> Iterator[Path]:
    for root in roots:
        yield from sorted((ROOT / root).rglob("*.py"))


def line_count(file: Path) -> int:
    return len(file.read_text().splitlines())


def functions(file: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield f"{file.relative_to(ROOT)}:{node.lineno} {node.name}", (node.end_lineno or node.lineno) - node.lineno + 1


def test_no_file_is_over_the_hard_cap() -> None:
    assert [f"{file}: {line_count(file)}" for file in sources(*SHIPPED) if line_count(file) > MAX_FILE_LINES] == []


def test_no_function_is_over_the_hard_cap() -> None:
    long = [
        f"{name}: {lines}" for file in sources(*SHIPPED) for name, lines in functions(file) if lines > MAX_FUNCTION_LINES
    ]
    assert long == []


def test_the_core_stays_under_ten_thousand_lines() -> None:
    assert sum(line_count(file) for file in sources("agentrl")) < MAX_CORE_LINES


def test_the_number_of_large_files_only_falls() -> None:
    large = [
        f"{file.relative_to(ROOT)}: {line_count(file)}" for file in sources(*SHIPPED) if line_count(file) > SOFT_FILE_LINES
    ]
    assert len(large) == FILES_OVER_SOFT, f"set FILES_OVER_SOFT to {len(large)} only if that is lower: {large}"


def test_the_number_of_long_functions_only_falls() -> None:
    long = [
        f"{name}: {lines}" for file in sources(*SHIPPED) for name, lines in functions(file) if lines > SOFT_FUNCTION_LINES
    ]
    assert len(long) == FUNCTIONS_OVER_SOFT, f"set FUNCTIONS_OVER_SOFT to {len(long)} only if that is lower: {long}"
