"""Hidden tests in a test file: plain functions `test_*` with `assert`, which import the submission as a module.

Invariant: outside the sandbox the file is only parsed. It uses nothing of the submission but calls of its functions.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from agentrl.errors import ConfigError
from agentrl_rewards.code.module_program import TEST_FILE
from agentrl_rewards.code.runner import SOLUTION

_FROM_PYTEST: Final = frozenset({"raises", "approx", "mark"})
_HOOKS: Final = frozenset({"setup_module", "teardown_module", "setup_function", "teardown_function", "pytest_plugins"})
_RESERVED: Final = frozenset({"agentrl", "pytest", TEST_FILE}) | sys.stdlib_module_names


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTests:
    r"""The text of a test file; every case is one test function. Unsupported files are a ConfigError.

    Example:
        >>> ModuleTests(source="from solution import add\ndef test_add():\n    assert add(1, 2) == 3\n").cases
        ('test_add',)
    """

    source: str
    module: str = SOLUTION
    """The name by which the file imports the submission."""
    cases: tuple[str, ...] = ()
    """Names of the test functions, in the order of the file; they follow from `source`."""

    def __post_init__(self) -> None:
        if not self.module.isidentifier() or self.module in _RESERVED:
            raise ConfigError(
                f"tests: expected a module name such as 'solution' that no other module has, got {self.module!r:.100}"
            )
        try:
            tree = ast.parse(self.source)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ConfigError(f"tests: expected the text of a Python test file: {error}") from None
        _check_file(tree, self.module)
        names = [each.name for each in tree.body if isinstance(each, ast.FunctionDef) and each.name.startswith("test_")]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"tests: expected functions such as 'def test_add()', each of another name, got {names}")
        object.__setattr__(self, "cases", tuple(names))


def _check_file(tree: ast.Module, module: str) -> None:
    for problem in (*_layout_problems(tree), *_import_problems(tree, module), *_use_problems(tree, module)):
        line, text = problem
        raise ConfigError(f"tests, line {line}: the grader does not support {text}")


def _layout_problems(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for each in ast.walk(tree):
        if isinstance(each, ast.ClassDef) and each.name.startswith("Test"):
            yield each.lineno, f"the test class {each.name}; write plain functions"
        if isinstance(each, ast.AsyncFunctionDef) and each.name.startswith("test_"):
            yield each.lineno, f"the async test {each.name}; write plain functions"
    for each in tree.body:
        if isinstance(each, ast.FunctionDef):
            if each.name in _HOOKS:
                yield each.lineno, f"the hook {each.name}"
            if each.name.startswith("test_"):
                yield from _function_problems(each)


def _function_problems(test: ast.FunctionDef) -> Iterator[tuple[int, str]]:
    given: set[str] = set()
    for mark in test.decorator_list:
        if not isinstance(mark, ast.Call) or ast.unparse(mark.func) != "pytest.mark.parametrize" or len(mark.args) != 2:
            yield mark.lineno, f"the decorator {ast.unparse(mark):.60}; use pytest.mark.parametrize(names, values)"
            return
        names = mark.args[0]
        if mark.keywords or not isinstance(names, ast.Constant) or not isinstance(names.value, str):
            yield mark.lineno, "parametrize other than with one text of names and a list of values"
            return
        given |= {name.strip() for name in names.value.split(",")}
    arguments = test.args
    if arguments.vararg or arguments.kwarg or arguments.kwonlyargs or arguments.posonlyargs or arguments.defaults:
        yield test.lineno, f"other than plain parameters of {test.name}"
    named = {each.arg for each in arguments.args}
    for name in sorted(named - given):
        yield test.lineno, f"the fixture {name!r} of {test.name}"
    for name in sorted(given - named):
        yield test.lineno, f"values for {name!r}, which {test.name} does not take"


def _import_problems(tree: ast.Module, module: str) -> Iterator[tuple[int, str]]:
    for each in ast.walk(tree):
        if isinstance(each, ast.Import):
            names = [one.name for one in each.names]
            if any(one.name == "pytest" and one.asname for one in each.names):
                yield each.lineno, "pytest under another name"
        elif isinstance(each, ast.ImportFrom):
            names = [each.module or "."]
            if each.module == "pytest" or (each.module == module and any(one.name == "*" for one in each.names)):
                yield each.lineno, f"`{ast.unparse(each)}`; write `import pytest` and `from {module} import f`"
        else:
            continue
        for name in names:
            top = name.partition(".")[0]
            if name not in ("pytest", module) and (top not in sys.stdlib_module_names or top == "unittest"):
                yield each.lineno, f"the import of {name!r}; use the standard library, pytest and {module!r}"


def _use_problems(tree: ast.Module, module: str) -> Iterator[tuple[int, str]]:
    """Look for uses of the submission that are no calls, and for parts of pytest that the sandbox has not."""
    functions, modules = _names_of_submission(tree, module)
    called = {id(each.func) for each in ast.walk(tree) if isinstance(each, ast.Call)}
    owners = {id(each.value): each for each in ast.walk(tree) if isinstance(each, ast.Attribute)}
    for each in ast.walk(tree):
        if not isinstance(each, ast.Name) or not isinstance(each.ctx, ast.Load):
            continue
        owner = owners.get(id(each))
        if each.id == "pytest" and (owner is None or owner.attr not in _FROM_PYTEST):
            yield each.lineno, f"pytest.{owner.attr}" if owner else "pytest as a value"
        used, name = (owner, owner.attr) if each.id in modules and owner else (each, functions.get(each.id))
        if name is None and each.id not in modules:
            continue
        if id(used) not in called or not name:
            yield each.lineno, f"{ast.unparse(used)} of the submission other than as a function that is called"
        elif name[0].isupper():
            yield each.lineno, f"{name} of the submission, a class; its objects do not travel to the tests"


def _names_of_submission(tree: ast.Module, module: str) -> tuple[dict[str, str], set[str]]:
    """Return the functions of the submission by the names that the file gives them, and the names of its module."""
    functions: dict[str, str] = {}
    modules: set[str] = set()
    for each in ast.walk(tree):
        if isinstance(each, ast.ImportFrom) and each.module == module:
            functions |= {one.asname or one.name: one.name for one in each.names}
        if isinstance(each, ast.Import):
            modules |= {one.asname or one.name for one in each.names if one.name == module}
    return functions, modules
