"""No six lines of code stand in two files of the package: what two files need lives in a third."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "agentrl"
LINES = 6


def code_lines(source: str) -> list[tuple[int, str]]:
    """Return the lines of code with their numbers, without indentation, imports, comments and docstrings."""
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.stmt) and (is_docstring or isinstance(node, (ast.Import, ast.ImportFrom))):
            skipped.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = [(number, " ".join(line.split())) for number, line in enumerate(source.splitlines(), 1)]
    return [(number, line) for number, line in lines if line and not line.startswith("#") and number not in skipped]


def shared_runs(sources: dict[str, str]) -> list[str]:
    """Return the places of the runs of `LINES` lines that stand in more than one file."""
    places: defaultdict[tuple[str, ...], dict[str, int]] = defaultdict(dict)
    for file, source in sources.items():
        lines = code_lines(source)
        for at in range(len(lines) - LINES + 1):
            run = tuple(line for _, line in lines[at : at + LINES])
            places[run].setdefault(file, lines[at][0])
    found = [where for where in places.values() if len(where) > 1]
    return sorted(" = ".join(f"{file}:{number}" for file, number in where.items()) for where in found)


def test_no_six_lines_of_one_file_stand_in_another() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    assert shared_runs({str(file.relative_to(PACKAGE.parent)): file.read_text() for file in files}) == []


def test_the_search_sees_a_run_that_is_indented_and_cut_by_comments() -> None:
    lines = [f"value_{number} = {number}" for number in range(LINES)]
    inside = ["def f():", *(f"    {line}" for line in lines)]
    apart = [*inside[:3], "    # a reason", "", *inside[3:]]
    assert shared_runs({"one": "\n".join(lines), "other": "\n".join(apart)}) == ["one:1 = other:2"]
    assert shared_runs({"one": "\n".join(lines[1:]), "other": "\n".join(apart)}) == []
    assert shared_runs({"one": "\n".join(lines)}) == []
