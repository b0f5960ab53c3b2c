"""Turns the assertions of code data sets into hidden tests, without running any of them.

Invariant: an assertion that says more than "this call returns this value" is refused, never weakened. Values are compared as
`==` compares them (`comparison: python`), and a tuple equals a list. One difference remains: a tolerance of one assertion
holds for all floats of its task.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from agentrl.errors import ConfigError
from agentrl.types import JsonValue
from agentrl_rewards.code.cases import without_views
from agentrl_rewards.code.loose import VIEWS
from agentrl_workflows.tasks.folding import FOLDED_FUNCTIONS, folded

_EQUAL = (ast.Eq, ast.Is)
_BELOW = (ast.Lt, ast.LtE)


def asserted_calls(lines: Iterable[str]) -> dict[str, JsonValue]:
    """Return hidden tests, in the form that `read_tests` reads, of lines such as `assert add(1, 2) == 3`.

    `abs(f(1) - 0.5) < 1e-6` and `math.isclose(f(1), 0.5, rel_tol=...)` give a tolerance.

    Raises:
        ConfigError: a line is something else, or a value is no literal.

    Example:
        >>> asserted_calls(["assert half(1) == 0.5", "assert abs(half(3) - 1.5) <= 1e-6"])
        {'calls': [['half(1)', '0.5'], ['half(3)', '1.5']], 'comparison': 'python', 'tolerance': 1e-06}
    """
    return _tests([_statement(line) for line in lines])


def checked_calls(source: str, entry: str) -> dict[str, JsonValue]:
    r"""Return hidden tests of a `def check(candidate):` that consists of assertions, as HumanEval has it.

    Args:
        source: Python with that function; what is around it is ignored.
        entry: the function that takes the place of `candidate`.

    Raises:
        ConfigError: there is no such function, or it does more than call `candidate` and compare with literals.

    Example:
        >>> checked_calls("def check(candidate):\n    assert candidate(1) == 2\n    assert True", "inc")
        {'calls': [['inc(1)', '2']], 'comparison': 'python'}
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"expected Python with a function check(candidate): {error}") from None
    checks = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "check"]
    if len(checks) != 1 or len(checks[0].args.args) != 1:
        raise ConfigError("expected one function check(candidate)")
    body = [node for node in checks[0].body if not _says_nothing(node)]
    return _tests([Renamed(checks[0].args.args[0].arg, entry).visit(node) for node in body])


class Renamed(ast.NodeTransformer):
    """Gives a variable another name."""

    def __init__(self, name: str, new_name: str) -> None:
        self._name, self._new_name = name, new_name

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(self._new_name, node.ctx) if node.id == self._name else node


def _says_nothing(node: ast.stmt) -> bool:
    """Return whether it is `pass`, a text, a name, `import math`, or `assert True`."""
    if isinstance(node, ast.Import):
        return all(alias.name == "math" and alias.asname is None for alias in node.names)
    if isinstance(node, (ast.Assert, ast.Expr)):
        value = node.test if isinstance(node, ast.Assert) else node.value
        if isinstance(node, ast.Expr) and isinstance(value, ast.Name):
            return True
        return isinstance(value, ast.Constant) and bool(value.value)
    return isinstance(node, ast.Pass)


def _statement(line: str) -> ast.stmt:
    try:
        body = ast.parse(line.strip()).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"expected an assertion, got {line!r:.200}: {error}") from None
    if len(body) != 1:
        raise ConfigError(f"expected one assertion, got {line!r:.200}")
    return body[0]


def _tests(statements: Iterable[ast.stmt]) -> dict[str, JsonValue]:
    found = [case for statement in statements for case in _cases(statement)]
    if not found:
        raise ConfigError("expected at least one assertion")
    names = {ast.unparse(without_views(call)[0].func) for call, _, _ in found}
    if len(names) > 1:
        raise ConfigError(f"expected assertions about one function, got {sorted(names)}")
    tolerances = [tolerance for _, _, tolerance in found if tolerance is not None]
    calls: list[JsonValue] = [[ast.unparse(call), ast.unparse(value)] for call, value, _ in found]
    tests: dict[str, JsonValue] = {"calls": calls, "comparison": "python"}
    return tests | ({"tolerance": min(tolerances)} if tolerances else {})


def _cases(statement: ast.stmt) -> Iterator[tuple[ast.Call, ast.expr, float | None]]:
    """Yield the calls of an assertion, the literals that they must equal, and the tolerance."""
    test = statement.test if isinstance(statement, ast.Assert) else None
    parts = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]
    for part in parts:
        call, value, tolerance = _compared_sides(part) or (None, None, None)
        inner = without_views(call)[0] if isinstance(call, ast.Call) else None
        if not isinstance(call, ast.Call) or inner is None or value is None:
            raise _not_a_test(statement)
        is_named = isinstance(inner.func, (ast.Name, ast.Attribute))
        if not is_named or not all(keyword.arg is not None for keyword in inner.keywords):
            raise _not_a_test(statement)
        try:
            inner.args = [folded(each) for each in inner.args]
            inner.keywords = [ast.keyword(each.arg, folded(each.value)) for each in inner.keywords]
            yield call, folded(value), tolerance
        except ConfigError as error:
            raise _not_a_test(statement, error) from None


def _compared_sides(test: ast.expr | None) -> tuple[ast.expr, ast.expr, float | None] | None:
    if isinstance(test, ast.Call):
        return _isclose(test) or ((test, ast.Constant(True), None) if _is_tested(test) else None)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return (test.operand, ast.Constant(False), None) if _is_tested(test.operand) else None
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:
        return None
    left, right = test.left, test.comparators[0]
    if isinstance(test.ops[0], _EQUAL):
        return (left, right, None) if _has_tested(left) or not _has_tested(right) else (right, left, None)
    distance = _distance(left)
    limit = _constant_number(right)
    return (*distance, limit) if distance and limit is not None and isinstance(test.ops[0], _BELOW) else None


def _distance(node: ast.expr) -> tuple[ast.expr, ast.expr] | None:
    """Return both sides of `abs(call - value)`."""
    if not (isinstance(node, ast.Call) and ast.unparse(node.func) in ("abs", "math.fabs") and len(node.args) == 1):
        return None
    inner = node.args[0]
    if not (isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Sub)):
        return None
    return (inner.left, inner.right) if _is_tested(inner.left) else (inner.right, inner.left)


def _isclose(call: ast.Call) -> tuple[ast.expr, ast.expr, float] | None:
    if ast.unparse(call.func) not in ("math.isclose", "isclose") or len(call.args) != 2:
        return None
    limits = [_constant_number(keyword.value) for keyword in call.keywords if keyword.arg in ("rel_tol", "abs_tol")]
    known = [limit for limit in limits if limit]
    return (call.args[0], call.args[1], min(known, default=1e-9))


def _has_tested(node: ast.expr) -> bool:
    """Return whether it calls the function under test, perhaps inside of a view such as `set`."""
    return isinstance(node, ast.Call) and _is_tested(without_views(node)[0])


def _is_tested(node: ast.expr) -> bool:
    """Return whether it calls the function under test, and not a built-in one that a constant may use."""
    return isinstance(node, ast.Call) and ast.unparse(node.func) not in {*VIEWS, *FOLDED_FUNCTIONS}


def _constant_number(node: ast.expr) -> float | None:
    try:
        value = ast.literal_eval(folded(node))
    except ConfigError:
        return None
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _not_a_test(statement: ast.stmt, error: ConfigError | None = None) -> ConfigError:
    return ConfigError(
        f"{ast.unparse(statement)[:200]!r} cannot be a hidden test: expected 'assert f(1, [2]) == 3', with one call and "
        f"constant values{'; ' if error else ''}{error or ''}"
    )
