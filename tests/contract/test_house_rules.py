"""Rules a linter does not know: annotations and docstrings on everything public, safe bytes only, one vocabulary."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [file for root in ("agentrl", "workflows", "envs") for file in sorted((ROOT / root).rglob("*.py"))]
UNSAFE_CALLS = frozenset({"eval", "exec", "torch.load", "torch.save"})
UNSAFE_MODULES = frozenset({"pickle", "cloudpickle", "marshal", "dill", "shelve"})
Function = ast.FunctionDef | ast.AsyncFunctionDef


def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def public(tree: ast.Module) -> Iterator[Function | ast.ClassDef]:
    """Yield public functions, classes and methods; a class's own nested helpers are private."""
    bodies: list[list[ast.stmt]] = [tree.body]
    while bodies:
        for node in bodies.pop():
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                yield node
                if isinstance(node, ast.ClassDef):
                    bodies.append(node.body)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_every_function_is_fully_annotated(file: Path) -> None:
    missing: list[str] = []
    for node in ast.walk(parse(file)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
            bare = [a.arg for a in arguments if a is not None and a.annotation is None and a.arg not in ("self", "cls")]
            if bare or node.returns is None:
                missing.append(f"{node.lineno} {node.name} {bare or 'return'}")
    assert missing == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_everything_public_has_a_docstring(file: Path) -> None:
    tree = parse(file)
    bare = [f"{node.lineno} {node.name}" for node in public(tree) if ast.get_docstring(node) is None and not overload(node)]
    assert ast.get_docstring(tree), f"{file} has no module docstring"
    assert bare == []


def overload(node: Function | ast.ClassDef) -> bool:
    return any(
        (isinstance(d, ast.Name) and d.id in ("overload", "override"))
        or (isinstance(d, ast.Attribute) and d.attr == "setter")
        for d in node.decorator_list
    )


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_unsafe_bytes_are_read(file: Path) -> None:
    for node in ast.walk(parse(file)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            assert name not in UNSAFE_CALLS, f"{file}:{node.lineno} calls {name}"
        imported = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        assert not UNSAFE_MODULES.intersection(imported), f"{file} imports {imported}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_the_banned_word_is_not_used(file: Path) -> None:
    names = {node.id for node in ast.walk(parse(file)) if isinstance(node, ast.Name)}
    names |= {node.arg for node in ast.walk(parse(file)) if isinstance(node, ast.arg)}
    names |= {node.attr for node in ast.walk(parse(file)) if isinstance(node, ast.Attribute)}
    assert not {name for name in names if name.startswith("old_") or "_old_" in name}
