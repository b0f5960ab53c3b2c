"""JSON of users, with integers of any size: orjson reads those over 64 bits as floats, and writes none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, cast

import msgspec
import orjson

_MAX_DEPTH: Final = 200
"""Levels of a value with such integers that can be written; orjson takes 254."""


def decode_exact_json(data: bytes | str) -> object:
    """Return the value of a JSON text.

    Raises:
        ValueError: the text is no JSON, or has a float too large for a double or an integer of more than 4,300 digits.
    """
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(str(error)) from None


def encode_exact_json(value: object, option: int = 0) -> bytes:
    """Return a value as JSON; `option` is of orjson.

    Raises:
        TypeError: a part of the value is not JSON, or is an integer of more than 4,300 digits.
    """
    try:
        return orjson.dumps(value, option=option)
    except TypeError:
        try:
            return orjson.dumps(_with_digits(value, _MAX_DEPTH), option=option)
        except ValueError as error:
            raise TypeError(str(error)) from None


def _with_digits(value: object, depth: int) -> object:
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return orjson.Fragment(int.__repr__(value))
    if isinstance(value, Mapping) and depth:
        return {name: _with_digits(field, depth - 1) for name, field in cast("Mapping[object, object]", value).items()}
    if isinstance(value, (list, tuple)) and depth:
        return [_with_digits(item, depth - 1) for item in cast("Sequence[object]", value)]
    return value
