"""The arguments of a tool call, which a model writes as it likes.

Invariant: what is returned is a JSON object that fits the tool's listed arguments, or a text that says what is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, cast

MAX_DEPTH: Final = 64
"""Levels of nesting that arguments may have."""


def read_call_arguments(
    arguments: object, *, required: Sequence[str], known: Collection[str] | None, limit: int
) -> dict[str, Any] | str:
    """Return the arguments of a call, or what is wrong with them.

    Args:
        arguments: as the call has them.
        required: the names that must be there.
        known: the names that may be there; None: any.
        limit: of their characters.
    """
    if not isinstance(arguments, (str, Mapping)):
        arguments = arguments or "{}"
    try:
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        if len(text) > limit:
            return f"they have {len(text)} characters, the limit is {limit}"
        value: object = json.loads(text or "{}", parse_constant=_refuse_nan)
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, TypeError, RecursionError) as error:
        return f"they are not JSON: {error}"
    if not isinstance(value, dict):
        return "they must be a JSON object"
    read = cast("dict[str, Any]", value)
    if _depth_exceeds(read, MAX_DEPTH):
        return f"they are nested more than {MAX_DEPTH} levels deep"
    if missing := [name for name in required if name not in read]:
        return f"missing {', '.join(missing)}"
    if known is not None and (unknown := [name for name in read if name not in known]):
        return f"unknown {', '.join(name[:80] for name in unknown)}; there is {', '.join(sorted(known)) or 'none'}"
    return read


def _refuse_nan(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def _depth_exceeds(value: object, limit: int) -> bool:
    level: list[object] = [value]
    for _ in range(limit):
        nested = [item for item in level if isinstance(item, (dict, list))]
        level = []
        for item in nested:
            level.extend(cast("dict[str, object]", item).values() if isinstance(item, dict) else cast("list[object]", item))
        if not level:
            return False
    return any(isinstance(item, (dict, list)) for item in level)
