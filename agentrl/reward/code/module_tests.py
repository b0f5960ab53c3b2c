"""Hidden tests in a test file: plain functions `test_*` with `assert`, which import the submission as a module.

Invariant: outside the sandbox the file is only parsed. It uses nothing of the submission but calls of its functions.

The program that runs one test function in the sandbox has a stand-in in place of the submission, none of whose code runs
there. The job holds the answers to the first calls; the next call is sent, and ends the program. Calls are the same each
time, so that a later run with one more answer comes one call further.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType, TracebackType
from typing import Any, Final, cast

from agentrl.errors import ConfigError
from agentrl.reward.code.runner import SOLUTION

TEST_FILE: Final = "hidden_tests"
_FROM_PYTEST: Final = frozenset({"raises", "approx", "mark"})
_HOOKS: Final = frozenset({"setup_module", "teardown_module", "setup_function", "teardown_function", "pytest_plugins"})
_RESERVED: Final = frozenset({"agentrl", "pytest", TEST_FILE}) | sys.stdlib_module_names


class _OwnError(Exception):
    """Stands for an exception of a class that the submission defines."""


class _RecordedCalls:
    """Answers calls in turn, as recorded; it sends the first one that has no answer."""

    def __init__(self, channel: Any, answers: list[list[str]]) -> None:  # noqa: ANN401 - a module that comes later
        self._channel, self._answers, self.num_answered = channel, answers, 0
        self.raised: BaseException | None = None

    def answer(self, entry: str, arguments: tuple[object, ...], keywords: dict[str, object]) -> object:
        from agentrl.reward.code.values import decode_value, encode_arguments

        try:
            call = json.dumps([entry, encode_arguments(list(arguments)), encode_arguments(keywords)])
        except TypeError as error:
            self._channel.end("unsupported", json.dumps(f"{entry}: {error}"))
            raise
        if self.num_answered == len(self._answers):
            self._channel.end("call", call)
        recorded, kind, text = self._answers[self.num_answered]
        if recorded != call:
            self._channel.end("changed", json.dumps(entry))
        self.num_answered += 1
        if kind == "raised":
            self.raised = _error(*cast("list[str]", json.loads(text))[:2])
            raise self.raised
        return decode_value(text)


class _Function:
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, calls: _RecordedCalls, entry: str) -> None:
        self._calls, self._entry = calls, entry

    def __call__(self, *arguments: object, **keywords: object) -> object:
        return self._calls.answer(self._entry, arguments, keywords)

    def __eq__(self, other: object) -> bool:
        raise TypeError(f"{self._entry} of the submission can only be called")

    def __bool__(self) -> bool:
        raise TypeError(f"{self._entry} of the submission can only be called")


def _error(name: str, message: str) -> BaseException:
    found = getattr(builtins, name, None)
    if isinstance(found, type) and issubclass(found, BaseException):
        try:
            return found(message)
        except TypeError:  # it takes other arguments
            pass
    return _OwnError(message)


class _Raises:
    def __init__(self, expected: type[BaseException] | tuple[type[BaseException], ...], *, match: str | None = None) -> None:
        self._expected, self._match = expected, match
        self.value: BaseException | None = None
        self.type: type[BaseException] | None = None

    def __enter__(self) -> _Raises:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if error is None:
            raise AssertionError("nothing was raised")
        if not isinstance(error, self._expected):
            return False
        if self._match is not None and not re.search(self._match, str(error)):
            raise AssertionError("the error has another text")
        self.value, self.type = error, type(error)
        return True


class _Approx:
    """`pytest.approx` for numbers, and for lists, tuples and dicts of them."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, expected: object, rel: float | None = None, abs: float | None = None) -> None:
        self._expected = expected
        self._rel = (1e-6 if abs is None else 0.0) if rel is None else rel
        self._abs = 1e-12 if abs is None else abs

    def __eq__(self, found: object) -> bool:
        return self._is_near(self._expected, found)

    def _is_near(self, expected: Any, found: Any) -> bool:  # noqa: ANN401 - whatever the tests expect
        if isinstance(expected, Mapping):
            is_like = isinstance(found, Mapping) and found.keys() == expected.keys()
            return is_like and all(self._is_near(expected[key], found[key]) for key in expected)
        if isinstance(expected, (list, tuple)):
            is_like = isinstance(found, (list, tuple)) and len(found) == len(expected)
            return is_like and all(map(self._is_near, expected, found))
        if expected == found:
            return True
        if not isinstance(expected, (int, float, complex)) or not isinstance(found, (int, float, complex)):
            return False
        distance = abs(expected - found)
        return distance <= max(self._abs, self._rel * abs(expected)) and distance != float("inf")


class _Mark:
    @staticmethod
    def parametrize(names: str, values: Sequence[Any]) -> Any:  # noqa: ANN401 - a decorator
        keys = [name.strip() for name in names.split(",")]

        def marked(function: Any) -> Any:  # noqa: ANN401 - a test function
            rows = [dict(zip(keys, [row] if len(keys) == 1 else row, strict=True)) for row in values]
            function.parameters = [{**each, **row} for each in getattr(function, "parameters", [{}]) for row in rows]
            return function

        return marked


def _modules(calls: _RecordedCalls, name: str) -> Iterator[tuple[str, ModuleType]]:
    shim = ModuleType("pytest")
    shim.raises, shim.approx, shim.mark = _Raises, _Approx, _Mark  # type: ignore[attr-defined]
    yield "pytest", shim
    stand_in = ModuleType(name)
    stand_in.__getattr__ = lambda entry: _Function(calls, entry)  # type: ignore[method-assign]
    yield name, stand_in


def run_test() -> None:
    """Read the job from standard input, run the test function, and send how it ended."""
    from agentrl.reward.code.runner import READY_WIDTH, Channel

    job = cast("dict[str, Any]", json.loads(sys.stdin.buffer.read()))
    channel = Channel(job["nonce"])
    channel.send("ready", " " * READY_WIDTH)
    calls = _RecordedCalls(channel, job["answers"])
    sys.modules.update(_modules(calls, job["module"]))
    try:
        test = getattr(importlib.import_module(TEST_FILE), job["test"])
        for parameters in getattr(test, "parameters", [{}]):
            if test(**parameters) is not None:
                raise TypeError("a test function returns nothing")
    except BaseException as error:  # noqa: BLE001 - any error fails the test
        kind = "raised" if error is calls.raised else "failed"
        name = type(error).__name__ if kind == "failed" else ""
        channel.end(kind, json.dumps([name, calls.num_answered]))
        return
    channel.end("passed", json.dumps(["", calls.num_answered]))


if __name__ == "__main__":
    run_test()


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
