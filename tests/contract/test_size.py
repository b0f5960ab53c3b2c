"""Files, functions and folders stay small enough to read (docs/adr/0012-rooms-by-job.md)."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHIPPED = ("agentrl", "workflows", "envs", "examples")
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_FOLDER_FILES = 20


def sources() -> Iterator[Path]:
    for root in SHIPPED:
        yield from sorted((ROOT / root).rglob("*.py"))


def functions(file: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield f"{file.relative_to(ROOT)}:{node.lineno} {node.name}", (node.end_lineno or node.lineno) - node.lineno + 1


def test_no_file_is_too_long() -> None:
    counted = [(str(file.relative_to(ROOT)), len(file.read_text().splitlines())) for file in sources()]
    assert [(name, lines) for name, lines in counted if lines > MAX_FILE_LINES] == []


def test_no_function_is_too_long() -> None:
    counted = [found for file in sources() for found in functions(file)]
    assert [(name, lines) for name, lines in counted if lines > MAX_FUNCTION_LINES] == []


def test_no_folder_holds_too_many_files() -> None:
    counted = Counter(str(file.parent.relative_to(ROOT)) for file in sources() if file.name != "__init__.py")
    assert [(folder, count) for folder, count in counted.items() if count > MAX_FOLDER_FILES] == []
