"""The code stays small: caps on files and functions, and counts that may only fall (docs/adr/0006-what-the-core-is.md)."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHIPPED = ("agentrl", "workflows", "envs", "examples")
MAX_FILE_LINES = 500
SOFT_FILE_LINES = 300
MAX_FUNCTION_LINES = 80
SOFT_FUNCTION_LINES = 50
MAX_CORE_LINES = 10_400
FILES_OVER_SOFT = 0
FUNCTIONS_OVER_SOFT = 1
BESIDE_THE_CORE = (
    "agentrl/algo/gae.py",
    "agentrl/launch/",
    "agentrl/inference/embedded/",
    "agentrl/inference/http",
    "agentrl/inference/serve.py",
    "agentrl/inference/engine.py",
    "agentrl/inference/script",
    "agentrl/inference/performance.py",
    "agentrl/inference/sglang_",
    "agentrl/inference/launch.py",
    "agentrl/inference/process.py",
    "agentrl/inference/status.py",
    "agentrl/client/endpoint",
    "agentrl/engine/evaluate.py",
    "agentrl/observe/progress.py",
    "agentrl/tokens/supervised.py",
    "agentrl/train/sft.py",
    "agentrl/train/scripted",
)


def sources(*roots: str) -> Iterator[Path]:
    for root in roots:
        yield from sorted((ROOT / root).rglob("*.py"))


def line_count(file: Path) -> int:
    return len(file.read_text().splitlines())


def code_lines(file: Path) -> int:
    """Count lines that hold code: not blank, not a comment, not a docstring."""
    text = file.read_text()
    docs: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        for statement in getattr(node, "body", []) if not isinstance(node, (ast.Lambda, ast.IfExp)) else []:
            if (
                isinstance(statement, ast.Expr)
                and isinstance(statement.value, ast.Constant)
                and isinstance(statement.value.value, str)
            ):
                docs.update(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
    silent = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    held: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in silent:
            held.update(range(token.start[0], token.end[0] + 1))
    return len(held - docs)


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


def test_the_core_stays_under_its_cap() -> None:
    core = [file for file in sources("agentrl") if not str(file.relative_to(ROOT)).startswith(BESIDE_THE_CORE)]
    assert sum(code_lines(file) for file in core) < MAX_CORE_LINES


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
