"""Whether a JSON value fits a JSON schema: the keywords of drafts 4 to 2020-12, as pydantic and zod write them.

Invariant: a keyword that constrains values is checked; `schema_problem` refuses what cannot be. Annotations such as `title`
and `format`, and keywords of others, constrain nothing, as JSON Schema says. A check ends within `_MAX_STEPS`, whatever the
value and the schema.

The `jsonschema` package does not bound its work: `uniqueItems` over 1,500 objects that a model wrote takes it 20 seconds, in
which no other episode moves. Nor does it check a schema that mixes drafts, as those of pydantic and zod do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeGuard
from urllib.parse import unquote

from agentrl.errors import TokenError
from agentrl.tokens.messages import canonical_arguments

Schema = Mapping[str, Any]
_MAX_STEPS = 50_000
"""Pairs of a value and a schema that one check compares; more would block the event loop."""


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
    except (RecursionError, OverflowError, TokenError) as error:
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


def is_object(value: object) -> TypeGuard[Mapping[str, Any]]:
    """Return whether a JSON value is an object."""
    return isinstance(value, Mapping)


def is_array(value: object) -> TypeGuard[Sequence[Any]]:
    """Return whether a JSON value is an array."""
    return isinstance(value, list)


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a JSON value is a number; true and false are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


JSON_TYPES: Mapping[str, Callable[[object], bool]] = {
    "object": is_object,
    "array": is_array,
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "number": is_number,
    "integer": lambda value: is_number(value) and (isinstance(value, int) or value.is_integer()),
}


def schema_types(schema: Schema) -> list[str]:
    """Return the types that a schema names."""
    given = schema["type"]
    return [given] if isinstance(given, str) else list(given)


def referenced_schema(reference: object, root: object) -> Schema | None:
    """Return the schema that a reference within `root` names; None if there is none."""
    if not isinstance(reference, str):
        return None
    if reference != "#" and not reference.startswith("#/"):
        return None
    found: object = root
    for step in reference.split("/")[1:]:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if is_array(found):
            found = found[int(name)] if name.isdecimal() and int(name) < len(found) else None
        else:
            found = found.get(name) if is_object(found) else None
    return {} if found is True else {"not": {}} if found is False else found if is_object(found) else None


def _misfits(value: object, schema: object, root: _Root, at: str) -> Iterator[str]:
    root.count_step()
    if schema is False:
        yield f"at {at}: nothing is allowed here, got {value!r:.80}"
    if not is_object(schema):
        return
    for name, check in _CHECKS.items():
        if name in schema:
            yield from check(value, schema, root, at)


def _check_type(value: object, schema: Schema, root: _Root, at: str) -> Iterator[str]:
    names = schema_types(schema)
    if value is None and schema.get("nullable") is True:
        return
    if not any(JSON_TYPES[name](value) for name in names):
        yield f"at {at}: expected {' or '.join(names)}, got {value!r:.80}"


def _check_constant(value: object, schema: Schema, root: _Root, at: str) -> Iterator[str]:
    if value is None and schema.get("nullable") is True:
        return
    for allowed in ([schema["const"]] if "const" in schema else None, schema.get("enum")):
        if allowed is not None and not any(_is_equal(value, each) for each in allowed):
            yield f"at {at}: expected one of {allowed!r:.200}, got {value!r:.80}"


def _is_equal(value: object, other: object) -> bool:
    """Return whether two values are equal in JSON: 1.0 is 1, and true is not."""
    return _text_of_value(value) == _text_of_value(other)


def _text_of_value(value: object) -> str:
    return f"text {value}" if isinstance(value, str) else canonical_arguments([value])


def _check_reference(value: object, schema: Schema, root: _Root, at: str) -> Iterator[str]:
    yield from _misfits(value, referenced_schema(schema["$ref"], root.schema), root, at)


def _check_properties(value: object, schema: Schema, root: _Root, at: str) -> Iterator[str]:
    if is_object(value):
        for name, child in schema["properties"].items():
            if name in value:
                yield from _misfits(value[name], child, root, f"{at}.{name}")


def _check_required(value: object, schema: Schema, root: _Root, at: str) -> Iterator[str]:
    if is_object(value):
        yield from (f"at {at}: {name!r} is missing" for name in schema["required"] if name not in value)


def _check_patterns(value: object, schema: Schema, root: _Root, at: str) -> Iterator[str]:
    for name, item in value.items() if is_object(value) else ():
        for pattern, child in schema["patternProperties"].items():
            if re.search(pattern, name):
                yield from _misfits(item, child, root, f"{at}.{name}")


def _check_property_names(value: object, schema: Schema, root: _Root, at: str) -> Iterator[str]:
    for name in value if is_object(value) else ():
        yield from _misfits(name, schema["propertyNames"], root, f"{at} (the name {name!r:.80})")


def _check_further(value: object, schema: Schema, root: _Root, at: str) -> Iterator[str]:
    if is_object(value):
        yield from _others(value, value.keys() - _named(value, schema), schema["additionalProperties"], root, at)


def _check_unevaluated(value: object, schema: Schema, root: _Root, at: str) -> Iterator[str]:
    if is_object(value):
        seen = _evaluated_parts(value, {**schema, "unevaluatedProperties": None}, root, at)
        yield from _others(value, value.keys() - seen, schema["unevaluatedProperties"], root, at)


def _check_unevaluated_items(value: object, schema: Schema, root: _Root, at: str) -> Iterator[str]:
    if is_array(value):
        seen = _evaluated_parts(value, {**schema, "unevaluatedItems": None}, root, at)
        rest = {f"{index}": item for index, item in enumerate(value) if f"{index}" not in seen}
        yield from _others(rest, rest.keys(), schema["unevaluatedItems"], root, at)


def _others(value: Schema, names: Iterable[str], child: object, root: _Root, at: str) -> Iterator[str]:
    for name in sorted(names):
        if child is False:
            yield f"at {at}: {name!r} is not allowed"
        else:
            yield from _misfits(value[name], child, root, f"{at}.{name}")


def _named(value: Schema, schema: Schema) -> set[str]:
    """Return the fields of an object that `properties` and `patternProperties` describe."""
    patterns = list(schema.get("patternProperties") or ())
    names = schema.get("properties") or {}
    return {name for name in value if name in names or any(re.search(pattern, name) for pattern in patterns)}


def _evaluated_parts(value: object, schema: object, root: _Root, at: str) -> set[str]:
    """Return the names of fields, or the indices of items, that a schema or one that applies beside it describes."""
    root.count_step()
    if not is_object(schema):
        return set()
    found: set[str] = set()
    if is_object(value):
        is_open = "additionalProperties" in schema or schema.get("unevaluatedProperties") is not None
        found |= set(value) if is_open else _named(value, schema)
    elif is_array(value):
        first, rest = _items_of(schema)
        is_open = rest is not None or schema.get("unevaluatedItems") is not None
        for index, item in enumerate(value):
            is_known = is_open or index < len(first)
            if is_known or ("contains" in schema and not _first_misfit(item, schema["contains"], root, at)):
                found.add(f"{index}")
    for child in _schemas_beside(value, schema, root, at):
        found |= _evaluated_parts(value, child, root, at)
    return found


def _schemas_beside(value: object, schema: Schema, root: _Root, at: str) -> Iterator[object]:
    """Yield the schemas that apply to the same value as `schema` does."""
    if "$ref" in schema:
        yield referenced_schema(schema["$ref"], root.schema)
    yield from schema.get("allOf") or ()
    for name in ("anyOf", "oneOf"):
        yield from (child for child in schema.get(name) or () if not _first_misfit(value, child, root, at))
    if "if" in schema:
        if not _first_misfit(value, schema["if"], root, at):
            yield schema["if"]
        yield _chosen_branch(value, schema, root, at)
    for name in ("dependentSchemas", "dependencies"):
        for field, child in (schema.get(name) or {}).items():
            if is_object(value) and field in value and not is_array(child):
                yield child


def _items_of(schema: Schema) -> tuple[Sequence[object], object]:
    """Return the schemas of the first items, and the one of the others; None if there is none."""
    items = schema.get("items")
    if is_array(items):  # of older drafts
        return items, schema.get("additionalItems")
    return schema.get("prefixItems") or (), items


def _check_items(value: object, schema: Schema, root: _Root, at: str) -> Iterator[str]:
    if is_array(value):
        first, rest = _items_of(schema)
        for index, item in enumerate(value):
            child = first[index] if index < len(first) else True if rest is None else rest
            yield from _misfits(item, child, root, f"{at}[{index}]")


def _check_contains(value: object, schema: Schema, root: _Root, at: str) -> Iterator[str]:
    if is_array(value):
        count = sum(not _first_misfit(item, schema["contains"], root, at) for item in value)
        least, most = schema.get("minContains", 1), schema.get("maxContains", len(value))
        if not least <= count <= most:
            yield f"at {at}: {count} items fit `contains`, of which there must be {least} to {most}"


def _check_unique(value: object, schema: Schema, root: _Root, at: str) -> Iterator[str]:
    if is_array(value) and schema["uniqueItems"]:
        seen: set[str] = set()
        for index, item in enumerate(value):
            root.count_step()
            text = _text_of_value(item)
            if text in seen:
                yield f"at {at}[{index}]: {item!r:.80} is there twice"
            seen.add(text)


def _check_not(value: object, schema: Schema, root: _Root, at: str) -> Iterator[str]:
    if not _first_misfit(value, schema["not"], root, at):
        yield f"at {at}: {value!r:.80} fits a schema that it must not fit"


def _check_condition(value: object, schema: Schema, root: _Root, at: str) -> Iterator[str]:
    yield from _misfits(value, _chosen_branch(value, schema, root, at), root, at)


def _chosen_branch(value: object, schema: Schema, root: _Root, at: str) -> object:
    return schema.get("else" if _first_misfit(value, schema["if"], root, at) else "then", True)


def _check_dependent(value: object, schema: Schema, root: _Root, at: str) -> Iterator[str]:
    for name in ("dependentRequired", "dependentSchemas", "dependencies"):
        for field, child in (schema.get(name) or {}).items():
            if not is_object(value) or field not in value:
                continue
            if is_array(child):
                yield from (f"at {at}: {each!r} is missing beside {field!r}" for each in child if each not in value)
            else:
                yield from _misfits(value, child, root, at)


def _first_misfit(value: object, schema: object, root: _Root, at: str) -> str:
    return next(_misfits(value, schema, root, at), "")


def _check_pattern(value: object, schema: Schema, root: _Root, at: str) -> Iterator[str]:
    if isinstance(value, str) and re.search(schema["pattern"], value) is None:
        yield f"at {at}: expected text that matches {schema['pattern']!r}, got {value!r:.80}"


def _check_alternatives(value: object, schema: Schema, root: _Root, at: str) -> Iterator[str]:
    for name in ("anyOf", "oneOf"):
        if name in schema:
            problems = [_first_misfit(value, child, root, at) for child in schema[name]]
            fitting = problems.count("")
            if not fitting:
                yield problems[0]
            elif name == "oneOf" and fitting > 1:
                yield f"at {at}: {value!r:.80} fits {fitting} of the schemas of which it must fit one"


def _check_all(value: object, schema: Schema, root: _Root, at: str) -> Iterator[str]:
    for child in schema["allOf"]:
        yield from _misfits(value, child, root, at)


def _check_multiple(value: object, schema: Schema, root: _Root, at: str) -> Iterator[str]:
    if is_number(value) and not float(value / schema["multipleOf"]).is_integer():
        yield f"at {at}: expected a multiple of {schema['multipleOf']}, got {value!r}"


Check = Callable[[object, Schema, _Root, str], Iterator[str]]


def _bound(name: str, applies: Callable[[object], bool], measure: Callable[[Any], float], *, least: bool) -> Check:
    """Return the check of a keyword that bounds a number, a length or a count."""

    def check(value: object, schema: Schema, root: _Root, at: str) -> Iterator[str]:
        if applies(value) and not isinstance(schema[name], bool):  # true is of draft 4, and of the other bound
            number, limit = measure(value), schema[name]
            strict = name.startswith("exclusive") or schema.get(f"exclusive{name[0].upper()}{name[1:]}") is True
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
    "patternProperties": _check_patterns,
    "propertyNames": _check_property_names,
    "additionalProperties": _check_further,
    "items": _check_items,
    "prefixItems": _check_items,
    "contains": _check_contains,
    "uniqueItems": _check_unique,
    "pattern": _check_pattern,
    "anyOf": _check_alternatives,
    "oneOf": _check_alternatives,
    "allOf": _check_all,
    "not": _check_not,
    "if": _check_condition,
    "dependentRequired": _check_dependent,
    "dependentSchemas": _check_dependent,
    "dependencies": _check_dependent,
    "unevaluatedProperties": _check_unevaluated,
    "unevaluatedItems": _check_unevaluated_items,
    "multipleOf": _check_multiple,
    "minimum": _bound("minimum", is_number, _itself, least=True),
    "exclusiveMinimum": _bound("exclusiveMinimum", is_number, _itself, least=True),
    "maximum": _bound("maximum", is_number, _itself, least=False),
    "exclusiveMaximum": _bound("exclusiveMaximum", is_number, _itself, least=False),
    "minLength": _bound("minLength", JSON_TYPES["string"], len, least=True),
    "maxLength": _bound("maxLength", JSON_TYPES["string"], len, least=False),
    "minItems": _bound("minItems", is_array, len, least=True),
    "maxItems": _bound("maxItems", is_array, len, least=False),
    "minProperties": _bound("minProperties", is_object, len, least=True),
    "maxProperties": _bound("maxProperties", is_object, len, least=False),
}
CONSTRAINTS: Final = frozenset({*_CHECKS, "additionalItems", "minContains", "maxContains", "then", "else", "nullable"})
"""The keywords that constrain values, each of which `misfit` checks."""
