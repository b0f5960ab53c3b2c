"""Runs a chat template on texts that notice what is done with them.

A *traced* text takes part in a rendering in the place of a message's text. It answers for the real text, but what gets
written is a mark, and everything the template learns about it is noted: a *test* has an answer that another text must give
too; a *change* (stripping) makes one more traced text. Whatever else would look at a traced text, or at a text it was joined
to, ends the run with `Untraceable`.

Invariant: a rendering of messages with the same keys and roles, whose texts give the noted answers, writes the same text,
with its own texts in the places of the marks.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable
from functools import reduce, wraps
from typing import NamedTuple, NoReturn, cast

import jinja2
import jinja2.nodes
import jinja2.runtime
from jinja2.visitor import NodeTransformer

from agentrl.tokens.template.environment import SafeNamespace, TemplateEnvironment


class Untraceable(Exception):
    """The template does something with a message's text that tracing does not follow."""


class Step(NamedTuple):
    """A test or a change the template made."""

    text: int
    """Of what: the number of a text of the messages, or of the result of an earlier change."""
    function: Callable[..., object]
    arguments: tuple[object, ...]
    answer: bool | None
    """Of a test; None for a change, whose result has the next number."""


class Trace:
    """One run of a template on traced texts."""

    def __init__(self) -> None:
        """Start without texts."""
        self._nonce = str(10**27 + secrets.randbelow(9 * 10**27))
        self._values: list[str] = []
        self.steps: list[Step] = []

    def text(self, value: str) -> str:
        """Return the next text, traced."""
        traced = _Traced(f"{self._nonce}{len(self._values):06d}")
        traced.trace, traced.number = self, len(self._values)
        self._values.append(value)
        return traced

    def split(self, written: str) -> list[str | int]:
        """Return what the template wrote, with the number of a text in the place of its mark: every other piece."""
        pieces = re.split(f"{self._nonce}([0-9]{{6}})", written)
        return [int(piece) if at & 1 else piece for at, piece in enumerate(pieces)]

    def test(self, number: int, function: Callable[..., object], arguments: tuple[object, ...]) -> bool:
        """Return the answer of the real text, and note it."""
        answer = bool(function(self._values[number], *arguments))
        self.steps.append(Step(number, function, arguments, answer))
        return answer

    def change(self, number: int, function: Callable[..., object], arguments: tuple[object, ...]) -> str:
        """Return a traced text for the changed real text, and note the change."""
        self.steps.append(Step(number, function, arguments, None))
        return self.text(str(function(self._values[number], *arguments)))


class _Traced(str):
    """A mark that stands for a text; without a trace: several texts joined, with a mark among them."""

    trace: Trace | None = None
    number = -1

    def __add__(self, other: object) -> str:
        return _Traced(str.__add__(self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: object) -> str:
        return _Traced(str.__add__(other, self)) if isinstance(other, str) else NotImplemented

    def __str__(self) -> str:
        return self

    def __bool__(self) -> bool:
        return self._test(bool)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and self._test(str.__eq__, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __contains__(self, part: object) -> bool:
        return self._test(str.__contains__, part)

    def startswith(self, *arguments: object) -> bool:
        return self._test(str.startswith, *arguments)

    def endswith(self, *arguments: object) -> bool:
        return self._test(str.endswith, *arguments)

    def strip(self, *arguments: object) -> str:
        return self._change(str.strip, *arguments)

    def lstrip(self, *arguments: object) -> str:
        return self._change(str.lstrip, *arguments)

    def rstrip(self, *arguments: object) -> str:
        return self._change(str.rstrip, *arguments)

    def _test(self, function: Callable[..., object], *arguments: object) -> bool:
        if self.trace is None or _holds(arguments):
            raise Untraceable
        return self.trace.test(self.number, function, arguments)

    def _change(self, function: Callable[..., object], *arguments: object) -> str:
        if self.trace is None or _holds(arguments):
            raise Untraceable
        return self.trace.change(self.number, function, arguments)


def _refuse(*arguments: object, **options: object) -> NoReturn:
    raise Untraceable


_READING = {"__hash__", "__format__", "__repr__", "__lt__", "__le__", "__gt__", "__ge__"}
for _name in set(dir(str)) - set(vars(_Traced)) - set(dir(object)) | _READING:
    setattr(_Traced, _name, _refuse)

_OWN = (jinja2.Undefined, jinja2.Environment, jinja2.runtime.Context, jinja2.nodes.EvalContext)
_PLAIN = (str, int, float, type(None), *_OWN)


def _holds(value: object) -> bool:
    """Return whether a traced text is within a value, or could be."""
    if isinstance(value, dict):
        return any(_holds(key) or _holds(item) for key, item in cast("dict[object, object]", value).items())
    if isinstance(value, (list, tuple)):
        return any(map(_holds, cast("Iterable[object]", value)))
    return isinstance(value, _Traced) or not isinstance(value, _PLAIN)


_FILTERS = frozenset({
    TemplateEnvironment.DEADLINE, "trim", "string", "default", "d", "length", "count", "first", "last", "list", "reverse",
    "items", "selectattr", "rejectattr",
})  # fmt: skip
"""Filters that give their argument back or use it by methods a traced text watches."""
_TESTS = frozenset({
    "string", "defined", "undefined", "none", "mapping", "number", "boolean", "eq", "equalto", "==", "ne", "!=",
})  # fmt: skip
"""Tests that depend on the type only, or use a method a traced text watches."""


def _watched(function: Callable[..., object]) -> Callable[..., object]:
    @wraps(function)
    def watched(*arguments: object, **options: object) -> object:
        if _holds(arguments) or _holds(options):
            raise Untraceable
        return function(*arguments, **options)

    return watched


def _join(parts: Iterable[str]) -> str:
    pieces = [*parts]
    joined = "".join(pieces)
    return _Traced(joined) if _holds(pieces) else joined


class _Explicit(NodeTransformer):
    """Replaces operators that would read a traced text in C by ones that are watched."""

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        self.generic_visit(node)
        texts = [jinja2.nodes.Filter(part, "string", [], [], None, None) for part in node.nodes]
        return reduce(jinja2.nodes.Add, cast("list[jinja2.nodes.Expr]", texts))

    def visit_Compare(self, node: jinja2.nodes.Compare) -> jinja2.nodes.Node:
        self.generic_visit(node)
        if isinstance(node.expr, jinja2.nodes.Const) or all(part.op not in ("in", "notin") for part in node.ops):
            return node
        if len(node.ops) > 1:
            raise Untraceable
        found = jinja2.nodes.Test(node.expr, "in", [node.ops[0].expr], [], None, None)
        return found if node.ops[0].op == "in" else jinja2.nodes.Not(found)


class TracingEnvironment(TemplateEnvironment):
    """A template environment in which no operation sees a traced text but those that note what they see."""

    intercepted_binops = TemplateEnvironment.intercepted_binops | {"%"}
    concat = staticmethod(_join)

    def __init__(self) -> None:
        """Watch all filters and tests; leave out what differs from one rendering to the next."""
        super().__init__()
        self.filters = {name: f if name in _FILTERS else _watched(f) for name, f in self.filters.items() if name != "random"}
        self.tests = {name: test if name in _TESTS else _watched(test) for name, test in self.tests.items()}
        self.globals = {**self.globals, "strftime_now": self._now}
        del self.globals["lipsum"]
        self.passing = str(10**27 + secrets.randbelow(9 * 10**27))
        """Written in the place of the present time."""

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree = cast("jinja2.nodes.Template", _Explicit().visit(super()._parse(source, name, filename)))
        tree.set_environment(self)
        return tree

    def _now(self, form: str) -> str:
        return _Traced(self.passing)

    def getitem(self, obj: object, argument: object) -> object:
        """Return `obj[argument]`."""
        if isinstance(obj, _Traced) or isinstance(argument, _Traced):
            raise Untraceable
        return super().getitem(obj, argument)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: object, right: object) -> object:
        """Return the result of an intercepted operator."""
        return _watched(super().call_binop)(context, operator, left, right)

    def call(self, context: jinja2.runtime.Context, obj: object, /, *args: object, **kwargs: object) -> object:
        """Call a macro with any arguments, anything else without traced ones."""
        if not isinstance(obj, jinja2.runtime.Macro) and obj is not SafeNamespace and (_holds(args) or _holds(kwargs)):
            raise Untraceable
        return super().call(context, obj, *args, **kwargs)
