"""Fields of a run as typed on a command line: `--trainer.lr 1e-5`.

Invariant: a value is what the same text would be in a YAML file, and the mapping it is put into is not the caller's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import yaml

from agentrl.errors import ConfigError


def overridden(values: Mapping[str, Any], flags: Sequence[str]) -> dict[str, Any]:
    """Return a copy of `values` with the fields that flags name replaced.

    Raises:
        ConfigError: a flag is not one, or names a field inside a single value.
    """
    merged = _copy(values)
    for key, value in parse_overrides(flags):
        _set(merged, key, value)
    return merged


def parse_overrides(flags: Sequence[str]) -> list[tuple[str, Any]]:
    """Return `(dotted key, value)` pairs from flags as typed.

    Example:
        >>> parse_overrides(["--trainer.lr", "1e-5", "--rollout.max_turns=6"])
        [('trainer.lr', 1e-05), ('rollout.max_turns', 6)]
    """
    pairs: list[tuple[str, Any]] = []
    rest = list(flags)
    while rest:
        flag = rest.pop(0)
        if not flag.startswith("--") or len(flag) < 3:
            raise ConfigError(f"expected a flag such as --trainer.lr 1e-5, got {flag!r}")
        key, equals, text = flag[2:].partition("=")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"--{key} needs a value, such as --{key} 1")
            text = rest.pop(0)
        pairs.append((key.replace("-", "_"), _scalar(text)))
    return pairs


def _scalar(text: str) -> Any:  # noqa: ANN401 - a YAML value
    try:
        return (
            float(text)
            if "e" in text.lower() and text.lower().replace("e", "").strip("+-.0123456789") == ""
            else yaml.safe_load(text)
        )
    except (ValueError, yaml.YAMLError):
        return text


def _copy(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _copy(cast("dict[str, Any]", v)) if isinstance(v, dict) else v for k, v in values.items()}


def _set(values: dict[str, Any], key: str, value: Any) -> None:  # noqa: ANN401 - a YAML value
    *parents, last = key.split(".")
    for parent in parents:
        below = values.setdefault(parent, {})
        if not isinstance(below, dict):
            raise ConfigError(f"--{key}: {parent} is a single value, it has no field {last}")
        values = cast("dict[str, Any]", below)
    values[last] = value
