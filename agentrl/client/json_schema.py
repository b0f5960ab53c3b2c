"""Whether a JSON value fits a JSON schema: the keywords of OpenAI's structured output and of pydantic's schemas.

Invariant: a keyword that constrains values is checked or refused; none is skipped. Annotations such as `title`, `default`
and `format` constrain nothing. A pattern that Python's `re` cannot compile is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard, cast

Schema = Mapping[str, Any]
_ANNOTATIONS = frozenset({
    "$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default", "examples", "example", "format",
    "deprecated", "readOnly", "writeOnly", "discriminator", "strict",
})  # fmt: skip
_CHILDREN = ("properties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties")
_MAX_STEPS = 50_000
"""Pairs of a value and a schema that one check compares; more would block the event loop."""


def schema_problem(schema: object) -> str:
    """Return why values cannot be checked against a schema, and where in it; "" if they can.

    Example:
        >>> schema_problem({"type": "object", "properties": {"a": {"type": "int"}}})
        "at $.properties.a: 'int' is no type of JSON"
        >>> schema_problem({"type": "array", "contains": {}})
        "at $: the keyword 'contains' is not known here"
    """
    try:
        return next(_schema_problems(schema, schema, "$"), "")
    except RecursionError:
        return "at $: the schema is nested too deep"


def misfit(value: object, schema: Schema) -> str:
    """Return why a JSON value does not fit a schema that has no `schema_problem`, and where in it; "" if it fits.

    A value that cannot be compared, because it is nested too deep, a number is too large or the check takes too long, does
    not fit.

    Example:
        >>> misfit({"a": "1"}, {"type": "object", "properties": {"a": {"type": "integer"}}})
        "at $.a: expected integer, got '1'"
    """
    try:
        return next(_misfits(value, schema, _Root(schema), "$"), "")
    except _TooLarge:
        return f"at $: the value is too large to check with this schema: this takes more than {_MAX_STEPS} steps"
    except (RecursionError, OverflowError) as error:
        return f"at $: the value cannot be compared: {error}"


class _TooLarge(Exception):
    """A check takes more than `_MAX_STEPS` steps."""


class _Root:
    """The whole schema of a check, and the steps that are left: references may double the work at each level."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self._left = _MAX_STEPS

    def count_step(self) -> None:
        """Count a step."""
        self._left -= 1
        if self._left < 0:
            raise _TooLarge


def _is_object(value: object) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(value, Mapping)


def _is_array(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, list)


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


_TYPES: Mapping[str, Callable[[object], bool]] = {
    "object": _is_object,
    "array": _is_array,
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "number": _is_number,
    "integer": lambda value: _is_number(value) and (isinstance(value, int) or value.is_integer()),
}
_SIZES = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_SHAPES: Mapping[str, tuple[Callable[[object], bool], str]] = {
    **dict.fromkeys(_CHILDREN, (_is_object, "an object of schemas")),
    **dict.fromkeys((*_LISTS, "enum"), (_is_array, "a list")),
    **dict.fromkeys((*_SIZES, *_NUMBERS), (_is_number, "a number")),
    "type": (lambda value: isinstance(value, (str, list)), "a type or a list of types"),
    "required": (
        lambda value: _is_array(value) and all(isinstance(name, str) for name in value),
        "a list of names",
    ),
    "pattern": (_TYPES["string"], "text"),
    "multipleOf": (lambda value: _is_number(value) and value > 0, "a number above 0"),
}
"""The shape that the value of a keyword must have."""


def _types(schema: Schema) -> list[str]:
    given = schema["type"]
    return [given] if isinstance(given, str) else list(given)


def _schema_problems(schema: object, root: object, at: str) -> Iterator[str]:
    if isinstance(schema, bool):
        return
    if not _is_object(schema):
        yield f"at {at}: expected a schema, got {schema!r:.80}"
        return
    for name in schema:
        if name not in _ANNOTATIONS and name not in _CHECKS and name not in _CHILDREN:
            yield f"at {at}: the keyword {name!r} is not known here"
    for name, (fits, what) in _SHAPES.items():
        if name in schema and not fits(schema[name]):
            yield f"at {at}: {name} must be {what}, got {schema[name]!r:.80}"
            return
    if "type" in schema:
        yield from (f"at {at}: {name!r:.80} is no type of JSON" for name in _types(schema) if str(name) not in _TYPES)
    if "$ref" in schema and _referenced(schema["$ref"], root) is None:
        yield f"at {at}: $ref {schema['$ref']!r:.80} is not found; it must be like '#/$defs/Name'"
    if "pattern" in schema:
        try:
            re.compile(schema["pattern"])
        except re.error as error:
            yield f"at {at}: the pattern {schema['pattern']!r:.80} is no regular expression: {error}"
    for name in _CHILDREN:
        for key, child in cast("Schema", schema.get(name, {})).items():
            yield from _schema_problems(child, root, f"{at}.{name}.{key}")
    for name in _LISTS:
        for index, child in enumerate(cast("Sequence[object]", schema.get(name, ()))):
            yield from _schema_problems(child, root, f"{at}.{name}[{index}]")
    for name in _SINGLE:
        if name in schema:
            yield from _schema_problems(schema[name], root, f"{at}.{name}")


def _referenced(reference: object, root: object) -> Schema | None:
    """Return the schema that a reference within `root` names; None if there is none."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found: object = root
    for step in reference.split("/")[1:]:
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if _is_object(found) else None
    return found if _is_object(found) else None


def _misfits(value: object, schema: object, root: _Root, at: str) -> Iterator[str]:
    root.count_step()
    if schema is False:
        yield f"at {at}: nothing is allowed here, got {value!r:.80}"
    if not _is_object(schema):
        return
    for name, check in _CHECKS.items():
        if name in schema:
            yield from check(value, schema, root, at)


def _check_type(value: object, schema: Schema, root: _Root, at: str) -> Iterator[str]:
    names = _types(schema)
    if not any(_TYPES[name](value) for name in names):
        yield f"at {at}: expected {' or '.join(names)}, got {value!r:.80}"


def _check_constant(value: object, schema: Schema, root: _Root, at: str) -> Iterator[str]:
    allowed = [schema["const"]] if "const" in schema else schema["enum"]
    if not any(type(value) is type(each) and value == each for each in allowed):
        yield f"at {at}: expected one of {allowed!r:.200}, got {value!r:.80}"


def _check_reference(value: object, schema: Schema, root: _Root, at: str) -> Iterator[str]:
    yield from _misfits(value, _referenced(schema["$ref"], root.schema), root, at)


def _check_properties(value: object, schema: Schema, root: _Root, at: str) -> Iterator[str]:
    if _is_object(value):
        for name, child in schema["properties"].items():
            if name in value:
                yield from _misfits(value[name], child, root, f"{at}.{name}")


def _check_required(value: object, schema: Schema, root: _Root, at: str) -> Iterator[str]:
    if _is_object(value):
        yield from (f"at {at}: {name!r} is missing" for name in schema["required"] if name not in value)


def _check_further(value: object, schema: Schema, root: _Root, at: str) -> Iterator[str]:
    if not _is_object(value):
        return
    for name in value.keys() - (schema.get("properties") or {}).keys():
        if schema["additionalProperties"] is False:
            yield f"at {at}: {name!r} is not allowed"
        else:
            yield from _misfits(value[name], schema["additionalProperties"], root, f"{at}.{name}")


def _check_items(value: object, schema: Schema, root: _Root, at: str) -> Iterator[str]:
    if _is_array(value):
        first = schema.get("prefixItems") or ()
        for index, item in enumerate(value):
            child = first[index] if index < len(first) else schema.get("items", True)
            yield from _misfits(item, child, root, f"{at}[{index}]")


def _check_pattern(value: object, schema: Schema, root: _Root, at: str) -> Iterator[str]:
    if isinstance(value, str) and re.search(schema["pattern"], value) is None:
        yield f"at {at}: expected text that matches {schema['pattern']!r}, got {value!r:.80}"


def _check_alternatives(value: object, schema: Schema, root: _Root, at: str) -> Iterator[str]:
    for name in ("anyOf", "oneOf"):
        if name in schema:
            problems = [next(_misfits(value, child, root, at), "") for child in schema[name]]
            fitting = problems.count("")
            if not fitting:
                yield problems[0]
            elif name == "oneOf" and fitting > 1:
                yield f"at {at}: {value!r:.80} fits {fitting} of the schemas of which it must fit one"


def _check_all(value: object, schema: Schema, root: _Root, at: str) -> Iterator[str]:
    for child in schema["allOf"]:
        yield from _misfits(value, child, root, at)


def _check_multiple(value: object, schema: Schema, root: _Root, at: str) -> Iterator[str]:
    if _is_number(value) and not float(value / schema["multipleOf"]).is_integer():
        yield f"at {at}: expected a multiple of {schema['multipleOf']}, got {value!r}"


Check = Callable[[object, Schema, _Root, str], Iterator[str]]


def _bound(name: str, applies: Callable[[object], bool], measure: Callable[[Any], float], *, least: bool) -> Check:
    """Return the check of a keyword that bounds a number, a length or a count."""

    def check(value: object, schema: Schema, root: _Root, at: str) -> Iterator[str]:
        if applies(value):
            number, limit = measure(value), schema[name]
            strict = name.startswith("exclusive")
            holds = number >= limit if least else number <= limit
            if not holds or (strict and number == limit):
                yield f"at {at}: {name} is {limit}, got {value!r:.80}"

    return check


def _itself(value: float) -> float:
    return value


_CHECKS: Mapping[str, Check] = {
    "type": _check_type,
    "const": _check_constant,
    "enum": _check_constant,
    "$ref": _check_reference,
    "properties": _check_properties,
    "required": _check_required,
    "additionalProperties": _check_further,
    "items": _check_items,
    "prefixItems": _check_items,
    "pattern": _check_pattern,
    "anyOf": _check_alternatives,
    "oneOf": _check_alternatives,
    "allOf": _check_all,
    "multipleOf": _check_multiple,
    "minimum": _bound("minimum", _is_number, _itself, least=True),
    "exclusiveMinimum": _bound("exclusiveMinimum", _is_number, _itself, least=True),
    "maximum": _bound("maximum", _is_number, _itself, least=False),
    "exclusiveMaximum": _bound("exclusiveMaximum", _is_number, _itself, least=False),
    "minLength": _bound("minLength", _TYPES["string"], len, least=True),
    "maxLength": _bound("maxLength", _TYPES["string"], len, least=False),
    "minItems": _bound("minItems", _is_array, len, least=True),
    "maxItems": _bound("maxItems", _is_array, len, least=False),
    "minProperties": _bound("minProperties", _is_object, len, least=True),
    "maxProperties": _bound("maxProperties", _is_object, len, least=False),
}
