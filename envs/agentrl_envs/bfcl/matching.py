"""Compares the calls that a policy made with those that a task of BFCL accepts, by the rules of its leaderboard.

An answer lists the accepted values of each parameter, and `""` where it may be left out. Texts are compared without case,
spaces and the signs `, . / - _ * ^`; an integer counts where a float is asked for, and no other type counts for another.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias, cast

from agentrl.types import JsonValue

Answer: TypeAlias = Mapping[str, Mapping[str, Sequence[JsonValue]]]
"""One function, and the accepted values of each of its parameters."""
_IGNORED: Final = re.compile(r"[ ,./\-_*^]")
_TYPES: Final[Mapping[str, type]] = {
    "string": str,
    "integer": int,
    "float": float,
    "boolean": bool,
    "array": list,
    "tuple": list,
    "dict": dict,
    "any": str,
}


def calls_match(
    calls: Sequence[tuple[str, Mapping[str, JsonValue]]], answers: Sequence[Answer], functions: Sequence[Mapping[str, Any]]
) -> bool:
    """Return whether each answer has a call of its own that it accepts, in any order, and no call is left.

    Args:
        calls: names and arguments.
        answers: of the task.
        functions: as the task describes them: `name` and `parameters` with `properties` and `required`.
    """
    if len(calls) != len(answers):
        return False
    described = {str(each["name"]): cast("Mapping[str, Any]", each["parameters"]) for each in functions}
    left = list(calls)
    for answer in answers:
        name, accepted = next(iter(answer.items()))
        found = next((call for call in left if call[0] == name and _fits(call[1], accepted, described[name])), None)
        if found is None:
            return False
        left.remove(found)
    return True


def _fits(
    arguments: Mapping[str, JsonValue], accepted: Mapping[str, Sequence[JsonValue]], parameters: Mapping[str, Any]
) -> bool:
    if not set(cast("Sequence[str]", parameters.get("required", ()))) <= set(arguments):
        return False
    properties = cast("Mapping[str, Mapping[str, Any]]", parameters["properties"])
    if any(name not in properties or name not in accepted for name in arguments):
        return False
    if any(name not in arguments and "" not in values for name, values in accepted.items()):
        return False
    return all(_value_fits(value, accepted[name], properties[name]) for name, value in arguments.items())


def _value_fits(value: JsonValue, accepted: Sequence[JsonValue], described: Mapping[str, Any]) -> bool:
    kind = str(described.get("type", "any"))
    if kind == "float" and type(value) is int:
        value = float(value)
    wanted = _TYPES.get(kind, str)
    # A task may accept a value of another type than the described one, such as the name of a variable.
    written = next((type(each) for each in accepted if each != ""), None)
    if type(value) not in (wanted, written):
        return False
    if type(value) is wanted and wanted is written:
        if isinstance(value, dict):
            return any(isinstance(each, dict) and _mapping_fits(value, each) for each in accepted)
        inner = cast("Mapping[str, Any]", described.get("items") or {}).get("type")
        if isinstance(value, list) and inner == "dict":
            return any(_mappings_fit(value, each) for each in accepted)
    return _normal(value) in [_normal(each) for each in accepted]


def _mapping_fits(value: Mapping[str, JsonValue], accepted: Mapping[str, JsonValue]) -> bool:
    """Return whether a mapping has one of the accepted values for each key, and no other keys."""
    options = cast("Mapping[str, Sequence[JsonValue]]", accepted)
    if any(key not in options or _normal(each) not in [_normal(one) for one in options[key]] for key, each in value.items()):
        return False
    return all(key in value or "" in values for key, values in options.items())


def _mappings_fit(value: Sequence[JsonValue], accepted: JsonValue) -> bool:
    if not isinstance(accepted, list) or len(accepted) != len(value):
        return False
    pairs = zip(value, accepted, strict=True)
    return all(isinstance(one, dict) and isinstance(other, dict) and _mapping_fits(one, other) for one, other in pairs)


def _normal(value: JsonValue) -> tuple[str, object]:
    """Return the value as it is compared, with its kind, since True is 1 in Python."""
    if isinstance(value, str):
        return "text", _IGNORED.sub("", value).lower().replace("'", '"')
    if isinstance(value, list):
        return "list", [_normal(each) for each in value]
    if isinstance(value, dict):
        return "dict", {key: _normal(each) for key, each in value.items()}
    return type(value).__name__ if isinstance(value, bool) else "number" if value is not None else "none", value
