"""Hidden tests: calls of a function and their values, runs of a program and its outputs, or a test file.

Invariant: tests are data. Nothing of them is executed outside the sandbox, and what is expected never enters it.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias, cast

from agentrl.errors import ConfigError
from agentrl.types import JsonValue
from agentrl_rewards.code.compare import Comparison, output_matches, value_matches
from agentrl_rewards.code.loose import VIEWS, apply_views
from agentrl_rewards.code.module_tests import ModuleTests
from agentrl_rewards.code.runner import SOLUTION
from agentrl_rewards.code.values import encode_value, read_value_tree, tree_text

_CONSTANTS: Final[tuple[object, ...]] = (None, 0, 1, -1, True, False, "", [], {})


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCase:
    """One call of the function, and the value that it returns; of built-in types, or it is a ConfigError."""

    arguments: tuple[object, ...] = ()
    keywords: Mapping[str, object] = field(default_factory=dict[str, object])
    expected: object
    views: tuple[str, ...] = ()
    """Functions such as `set` that are applied to the result, the first one first, before it is compared."""

    def __post_init__(self) -> None:
        if unknown := set(self.views) - set(VIEWS):
            raise ConfigError(f"test case: expected views of {sorted(VIEWS)}, got {sorted(unknown)}")
        try:
            encode_value([self.arguments, dict(self.keywords), self.expected])
        except TypeError as error:
            raise ConfigError(f"test case {self!r:.200}: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class StdinCase:
    """One run of the program: its standard input, and the standard output that it must write."""

    stdin: str
    expected: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionTests:
    """Tests of a function; every case is one call in a process of its own.

    Example:
        >>> tests = call_tests([("add(1, 2)", "3"), ("add(-1, 1)", "0")])
        >>> tests.entry, tests.cases[0].arguments, tests.cases[0].expected
        ('add', (1, 2), 3)
    """

    entry: str
    """Name of the function, or `Class.method`, which is called on an instance made without arguments."""
    cases: tuple[CallCase, ...]
    tolerance: float | None = None
    """Share of an expected float, or distance from it, that a number may be off; None: types and values must be the same."""
    comparison: Comparison = "exact"

    def __post_init__(self) -> None:
        _check_tests(self.cases, self.tolerance)
        if not all(name.isidentifier() for name in self.entry.split(".")):
            raise ConfigError(f"tests: the entry must be a name such as 'f' or 'Solution.f', got {self.entry!r:.100}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramTests:
    """Tests of a program; every case is one run. White space at the end of lines and of the output does not count."""

    cases: tuple[StdinCase, ...]
    tolerance: float | None = None
    """As in `FunctionTests`, for a text that is compared word by word; None: the text must be the same."""
    comparison: Comparison = "exact"

    def __post_init__(self) -> None:
        _check_tests(self.cases, self.tolerance)


HiddenTests: TypeAlias = FunctionTests | ProgramTests | ModuleTests


def _check_tests(cases: Sequence[object], tolerance: float | None) -> None:
    if not cases:
        raise ConfigError("tests: expected at least one case; a submission without a test cannot be graded")
    if tolerance is not None and not (math.isfinite(tolerance) and tolerance >= 0):
        raise ConfigError(f"tests: the tolerance must be a number of at least 0, got {tolerance}")


def call_tests(
    cases: Sequence[tuple[str, str]], *, tolerance: float | None = None, comparison: Comparison = "exact"
) -> FunctionTests:
    """Return tests from calls and values written in Python, such as `("add(1, b=[2])", "[1, 2]")`.

    A call may stand in `set`, `sorted` or another view of the result. It is a ConfigError if a text is no call with literal
    arguments, no literal, or names another function than the first.
    """
    entries: list[str] = []
    parsed: list[CallCase] = []
    for call, expected in cases:
        tree = _parsed_expression(call)
        if not isinstance(tree, ast.Call):
            raise ConfigError(f"test case {call!r:.200}: expected a call such as 'add(1, 2)'")
        tree, views = without_views(tree)
        entries.append(ast.unparse(tree.func))
        parsed.append(_call_case(tree, _parsed_expression(expected), views))
    if len(set(entries)) > 1:
        raise ConfigError(f"tests: expected calls of one function, got {sorted(set(entries))}")
    entry = entries[0] if entries else ""
    return FunctionTests(entry=entry, cases=tuple(parsed), tolerance=tolerance, comparison=comparison)


def without_views(call: ast.Call) -> tuple[ast.Call, tuple[str, ...]]:
    """Return the call inside `set(...)` and its like, and their names from the inside out."""
    views: list[str] = []
    while isinstance(call.func, ast.Name) and call.func.id in VIEWS and len(call.args) == 1 and not call.keywords:
        inner = call.args[0]
        if not isinstance(inner, ast.Call):
            break
        views.append(call.func.id)
        call = inner
    return call, tuple(reversed(views))


def assert_tests(
    asserts: Sequence[str], *, tolerance: float | None = None, comparison: Comparison = "exact"
) -> FunctionTests:
    """Return tests from lines such as `assert add(1, 2) == 3`, `assert f(1)` (True) and `assert not f(1)` (False)."""
    pairs = [_pair(line) for line in asserts]
    texts = [(ast.unparse(call), ast.unparse(expected)) for call, expected in pairs]
    return call_tests(texts, tolerance=tolerance, comparison=comparison)


def read_tests(data: JsonValue) -> HiddenTests:
    r"""Return tests from the data of a task; anything but these forms is a ConfigError.

    `{"calls": [["add(1, 2)", "3"], ...]}` for a function, `{"runs": [["1 2\n", "3\n"], ...]}` for a program that reads the
    first and writes the second, or `{"asserts": ["assert add(1, 2) == 3", ...]}`; each with an optional `tolerance`, and
    `comparison` (`exact`, the default, or `python`). Or `{"test_file": "..."}`, the text of a test file, with an optional
    `module`, the name by which it imports the submission (`solution`, the default).

    Example:
        >>> read_tests({"runs": [["1 2", "3"]]})
        ProgramTests(cases=(StdinCase(stdin='1 2', expected='3'),), tolerance=None, comparison='exact')
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"tests: expected a mapping with calls, runs, asserts or test_file, got {data!r:.200}")
    if "test_file" in data:
        return _test_file(data)
    kinds = sorted(set(data) - {"tolerance", "comparison"})
    comparison = _comparison(data.get("comparison", "exact"))
    tolerance = data.get("tolerance")
    if tolerance is not None and (isinstance(tolerance, bool) or not isinstance(tolerance, (int, float))):
        raise ConfigError(f"tests: the tolerance must be a number, got {tolerance!r:.100}")
    if kinds == ["asserts"]:
        return assert_tests(_texts(data["asserts"], "asserts"), tolerance=tolerance, comparison=comparison)
    if kinds not in (["calls"], ["runs"]):
        raise ConfigError(f"tests: expected one of calls, runs, asserts and test_file, got {kinds}")
    kind: Literal["calls", "runs"] = "calls" if kinds == ["calls"] else "runs"
    pairs: list[tuple[str, str]] = []
    for each in _case_items(data[kind], kind):
        texts = _texts(each, kind)
        if len(texts) != 2:
            raise ConfigError(f"tests.{kind}: expected pairs of texts, got {each!r:.200}")
        pairs.append((texts[0], texts[1]))
    if kind == "calls":
        return call_tests(pairs, tolerance=tolerance, comparison=comparison)
    runs = tuple(StdinCase(stdin=given, expected=text) for given, text in pairs)
    return ProgramTests(cases=runs, tolerance=tolerance, comparison=comparison)


def _test_file(data: Mapping[str, JsonValue]) -> ModuleTests:
    source, module = data["test_file"], data.get("module", SOLUTION)
    if unknown := sorted(set(data) - {"test_file", "module"}):
        raise ConfigError(f"tests: expected only test_file and module, since a test file compares by itself, got {unknown}")
    if not isinstance(source, str) or not isinstance(module, str):
        raise ConfigError(f"tests: expected texts in test_file and module, got {source!r:.100} and {module!r:.100}")
    return ModuleTests(source=source, module=module)


def _comparison(value: JsonValue) -> Comparison:
    if value not in ("exact", "python"):
        raise ConfigError(f"tests: expected the comparison exact or python, got {value!r:.100}")
    return "exact" if value == "exact" else "python"


def _case_items(data: JsonValue, where: str) -> Sequence[JsonValue]:
    if isinstance(data, str) or not isinstance(data, Sequence):
        raise ConfigError(f"tests.{where}: expected a list, got {data!r:.200}")
    return data


def _texts(data: JsonValue, where: str) -> Sequence[str]:
    items = _case_items(data, where)
    if not all(isinstance(item, str) for item in items):
        raise ConfigError(f"tests.{where}: expected texts, got {data!r:.200}")
    return cast("Sequence[str]", items)


def _parsed_expression(text: str) -> ast.expr:
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"test case {text!r:.200}: expected a Python expression: {error}") from None


def _pair(line: str) -> tuple[ast.expr, ast.expr]:
    """Return the call of an assertion and the expression that it must equal."""
    try:
        statement = ast.parse(line.strip()).body[0]
    except (SyntaxError, ValueError, RecursionError, MemoryError, IndexError) as error:
        raise ConfigError(f"test case {line!r:.200}: expected an assertion: {error}") from None
    test = statement.test if isinstance(statement, ast.Assert) else None
    if isinstance(test, ast.Call):
        return test, ast.Constant(True)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return test.operand, ast.Constant(False)
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], (ast.Eq, ast.Is)):
        return test.left, test.comparators[0]
    raise ConfigError(f"test case {line!r:.200}: expected an assertion such as 'assert add(1, 2) == 3'")


def _call_case(call: ast.Call, expected: ast.expr, views: tuple[str, ...]) -> CallCase:
    try:
        return CallCase(
            arguments=tuple(ast.literal_eval(each) for each in call.args),
            keywords={str(each.arg): ast.literal_eval(each.value) for each in call.keywords},
            expected=ast.literal_eval(expected),
            views=views,
        )
    except (ValueError, TypeError) as error:
        raise ConfigError(f"test case {ast.unparse(call)!r:.200}: expected literal values: {error}") from None


def best_constant(tests: HiddenTests) -> tuple[str, float] | None:
    r"""Return the program whose constant answer passes the most tests, and their share.

    None: no constant passes one, or the tests are a file, which would have to run.
    """
    if isinstance(tests, ModuleTests):
        return None
    if isinstance(tests, ProgramTests):
        texts = dict.fromkeys(["", *(case.expected for case in tests.cases)])
        scored = [(f"print({text!r}, end='')\n", _share_of_output(text, tests)) for text in texts]
    else:
        expected = {encode_value(case.expected): case.expected for case in tests.cases}
        constants = {encode_value(each): each for each in _CONSTANTS} | expected
        scored = [(_program(tests.entry, value), _share_of_value(text, tests)) for text, value in constants.items()]
    best = max(scored, key=lambda pair: pair[1])
    return best if best[1] > 0 else None


def _program(entry: str, value: object) -> str:
    *outer, name = entry.split(".")
    pad = "    " * len(outer)
    body = f"{pad}def {name}(*_, **__):\n{pad}    return {value!r}\n"
    return "".join(f"{'    ' * at}class {each}:\n" for at, each in enumerate(outer)) + body


def _share_of_output(text: str, tests: ProgramTests) -> float:
    output = text.encode(errors="surrogatepass")
    passed = [output_matches(case.expected, output, tests.tolerance, tests.comparison) for case in tests.cases]
    return sum(passed) / len(passed)


def _share_of_value(text: str, tests: FunctionTests) -> float:
    return sum(_passes(text, case, tests) for case in tests.cases) / len(tests.cases)


def _passes(text: str, case: CallCase, tests: FunctionTests) -> bool:
    seen = apply_views(case.views, read_value_tree(text))
    if seen is None:
        return False
    return value_matches(encode_value(case.expected), tree_text(seen[0]), tests.tolerance, tests.comparison)
