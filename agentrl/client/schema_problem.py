"""Whether values can be checked against a JSON schema: what is wrong with it is said before anything is sampled.

Invariant: after an empty `schema_problem`, each keyword that constrains values has a shape that `misfit` can check.
Keywords that JSON Schema does not know constrain nothing, except one that looks like a known one: it is misspelt.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Final, cast

from agentrl.client.json_schema import (
    CONSTRAINTS,
    JSON_TYPES,
    Schema,
    is_array,
    is_number,
    is_object,
    referenced_schema,
    schema_types,
)

_OBJECTS: Final = ("properties", "$defs", "definitions", "patternProperties", "dependentSchemas")
_LISTS: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE: Final = (
    "items", "additionalItems", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else",
    "unevaluatedProperties", "unevaluatedItems",
)  # fmt: skip
_UNCHECKED: Final = ("$dynamicRef", "$recursiveRef")
"""What constrains values and is not checked."""
_ANNOTATIONS: Final = frozenset({
    "$anchor", "$comment", "$id", "$schema", "$vocabulary", "default", "deprecated", "description", "discriminator",
    "example", "examples", "format", "id", "readOnly", "strict", "title", "writeOnly",
})  # fmt: skip
_SIZES: Final = (
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "minContains",
    "maxContains",
)
_NUMBERS: Final = ("minimum", "maximum")
_LIMITS: Final = ("exclusiveMinimum", "exclusiveMaximum")
_SPELLING: Final = 0.85
"""The share of letters from which on a keyword that is not known is a misspelt one."""


def _is_names(value: object) -> bool:
    return is_array(value) and all(isinstance(name, str) for name in value)


_SHAPES: Final[Mapping[str, tuple[Callable[[object], bool], str]]] = {
    **dict.fromkeys((*_OBJECTS, "dependencies"), (is_object, "an object of schemas")),
    **dict.fromkeys((*_LISTS, "enum"), (is_array, "a list")),
    **dict.fromkeys((*_SIZES, *_NUMBERS), (is_number, "a number")),
    **dict.fromkeys(_LIMITS, (lambda value: is_number(value) or isinstance(value, bool), "a number")),
    **dict.fromkeys(("uniqueItems", "nullable"), (JSON_TYPES["boolean"], "true or false")),
    "dependentRequired": (
        lambda value: is_object(value) and all(_is_names(names) for names in value.values()),
        "an object of lists of names",
    ),
    "type": (lambda value: isinstance(value, (str, list)), "a type or a list of types"),
    "required": (_is_names, "a list of names"),
    "pattern": (JSON_TYPES["string"], "text"),
    "multipleOf": (lambda value: is_number(value) and value > 0, "a number above 0"),
}
"""The shape that the value of a keyword must have."""


def schema_problem(schema: object) -> str:
    """Return why values cannot be checked against a schema, and where in it; "" if they can.

    Example:
        >>> schema_problem({"type": "object", "properties": {"a": {"type": "int"}}})
        "at $.properties.a: 'int' is no type of JSON"
        >>> schema_problem({"type": "string", "minLenght": 1})
        "at $: the keyword 'minLenght' is not known; is it 'minLength'?"
    """
    try:
        return next(_keyword_problems(schema, schema, "$"), "")
    except RecursionError:
        return "at $: the schema is nested too deep"


def _keyword_problems(schema: object, root: object, at: str) -> Iterator[str]:
    if isinstance(schema, bool):
        return
    if not is_object(schema):
        yield f"at {at}: expected a schema, got {schema!r:.80}"
        return
    yield from (f"at {at}: {problem}" for name in schema if (problem := _name_problem(name)))
    for name, (fits, what) in _SHAPES.items():
        if name in schema and not fits(schema[name]):
            yield f"at {at}: {name} must be {what}, got {schema[name]!r:.80}"
            return
    if "type" in schema:
        yield from (
            f"at {at}: {name!r:.80} is no type of JSON" for name in schema_types(schema) if str(name) not in JSON_TYPES
        )
    if "$ref" in schema and referenced_schema(schema["$ref"], root) is None:
        yield f"at {at}: $ref {schema['$ref']!r:.80} is not found; it must be like '#/$defs/Name'"
    for pattern in (*([schema["pattern"]] if "pattern" in schema else ()), *(schema.get("patternProperties") or ())):
        try:
            re.compile(pattern)
        except re.error as error:
            yield f"at {at}: the pattern {pattern!r:.80} is no regular expression: {error}"
    for place, child in _child_schemas(schema):
        yield from _keyword_problems(child, root, f"{at}.{place}")


def _child_schemas(schema: Schema) -> Iterator[tuple[str, object]]:
    """Yield the schemas that a schema holds, and where they stand."""
    for name in _OBJECTS:
        yield from ((f"{name}.{key}", child) for key, child in schema.get(name, {}).items())
    for key, child in schema.get("dependencies", {}).items():
        if not _is_names(child):
            yield f"dependencies.{key}", child
    for name in (*_LISTS, *_SINGLE):
        if is_array(schema.get(name)) and (name in _LISTS or name == "items"):
            yield from ((f"{name}[{index}]", child) for index, child in enumerate(cast("Sequence[object]", schema[name])))
        elif name in schema:
            yield name, schema[name]


def _name_problem(name: str) -> str:
    if name in _UNCHECKED:
        return f"the keyword {name!r} is not checked here; use '$ref'"
    if name in CONSTRAINTS or name in _OBJECTS or name in _ANNOTATIONS or name.lower().startswith("x-"):
        return ""
    close = get_close_matches(name, CONSTRAINTS, n=1, cutoff=_SPELLING)
    return f"the keyword {name!r} is not known; is it {close[0]!r}?" if close else ""
