"""Plain Python values as text that is the same for equal values of the same type, and different for all others.

Invariant: this module imports nothing of agentrl, because a copy of it runs in the sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import TypeAlias, cast

ValueTree: TypeAlias = "bool | int | str | list[ValueTree] | None"
"""A value in JSON: None, booleans, small integers and strings as they are, all else as a list that starts with its kind."""
SCALARS = frozenset({"int", "float", "complex", "bytes", "bytearray"})
"""Kinds of lists that stand for one number or for bytes."""
_MAX_JSON_INT = 2**53


def encode_value(value: object) -> str:
    """Return the text of a value of built-in types; a TypeError for others, a RecursionError for one nested too deeply.

    Example:
        >>> encode_value([1, True, (2.0, "a")]), encode_value({1, 2}) == encode_value({2, 1})
        ('["list",1,true,["tuple",["float","0x1.0000000000000p+1"],"a"]]', True)
    """
    return tree_text(_tree(value, in_order=False))


def encode_arguments(value: object) -> str:
    """Return the text of a value whose dicts keep their order, as the arguments of a call must."""
    return tree_text(_tree(value, in_order=True))


def decode_value(text: str) -> object:
    """Return the value that `encode_value` has written."""
    return _value(json.loads(text))


def read_value_tree(text: str) -> ValueTree:
    """Return the tree of a text that `encode_value` has written."""
    return cast("ValueTree", json.loads(text))


def tree_text(tree: ValueTree) -> str:
    """Return the tree as text."""
    return json.dumps(tree, separators=(",", ":"))


def _tree(value: object, *, in_order: bool) -> ValueTree:
    kind = type(value)
    if value is None or kind is bool:
        return cast("bool | None", value)
    if issubclass(kind, int):
        number = int.__index__(cast("int", value))
        return number if -_MAX_JSON_INT < number < _MAX_JSON_INT else ["int", hex(number)]
    if issubclass(kind, str):
        return str.__str__(cast("str", value))
    if issubclass(kind, float):
        return ["float", (float.__float__(cast("float", value)) + 0.0).hex()]
    if issubclass(kind, complex):
        number = complex.__complex__(cast("complex", value))
        return ["complex", (number.real + 0.0).hex(), (number.imag + 0.0).hex()]
    if issubclass(kind, (bytes, bytearray)):
        return ["bytes" if issubclass(kind, bytes) else "bytearray", bytes(memoryview(cast("bytes", value))).hex()]
    return _container(value, kind, partial(_tree, in_order=in_order), in_order=in_order)


def _container(value: object, kind: type, tree: Callable[[object], ValueTree], *, in_order: bool) -> ValueTree:
    if issubclass(kind, list):
        return ["list", *map(tree, list.__iter__(cast("list[object]", value)))]
    if issubclass(kind, tuple):
        return ["tuple", *map(tree, tuple.__iter__(cast("tuple[object, ...]", value)))]
    if issubclass(kind, dict):
        items = dict.items(cast("dict[object, object]", value))
        pairs: list[ValueTree] = [[tree(key), tree(item)] for key, item in items]
        return ["dict", *(pairs if in_order else sorted(pairs, key=tree_text))]
    if issubclass(kind, set):
        return ["set", *sorted(map(tree, set.__iter__(cast("set[object]", value))), key=tree_text)]
    if issubclass(kind, frozenset):
        return ["frozenset", *sorted(map(tree, frozenset.__iter__(cast("frozenset[object]", value))), key=tree_text)]
    raise TypeError(f"expected plain data such as numbers, strings, lists and dicts, got a value of type {kind.__name__}")


def _value(tree: ValueTree) -> object:
    if not isinstance(tree, list):
        return tree
    kind, *parts = tree
    if kind == "dict":
        pairs = cast("list[list[ValueTree]]", parts)
        return {_value(key): _value(item) for key, item in pairs}
    if kind in SCALARS:
        return scalar_value(kind, cast("list[str]", parts))
    containers = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
    return containers[cast("str", kind)](map(_value, parts))


def scalar_value(kind: str, parts: list[str]) -> object:
    """Return the number or bytes of a tree of this kind and these parts."""
    if kind == "int":
        return int(parts[0], 16)
    if kind == "float":
        return float.fromhex(parts[0])
    if kind == "complex":
        return complex(*map(float.fromhex, parts))
    return (bytes if kind == "bytes" else bytearray).fromhex(parts[0])
