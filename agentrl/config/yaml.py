"""YAML of run files, and command-line flags that override it; a flag's value is read as the same text in a file would be."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import yaml

from agentrl.errors import ConfigError

NOT_YAML = (yaml.YAMLError, ValueError, RecursionError)
"""What reading YAML raises: the last two for an impossible date or number, and for thousands of brackets."""


def overridden(values: Mapping[str, Any], flags: Sequence[str]) -> dict[str, Any]:
    """Return a copy of `values` in which the flags' values replace the fields that they name.

    Raises:
        ConfigError: a flag is malformed, or names a field of a single value.
    """
    merged = _copy(values)
    for key, value in parse_overrides(flags):
        _set(merged, key, value)
    return merged


def parse_overrides(flags: Sequence[str]) -> list[tuple[str, Any]]:
    """Return the `(dotted key, value)` pairs of command-line flags.

    Example:
        >>> parse_overrides(["--trainer.lr", "1.0e-5", "--rollout.max_turns=6"])
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
                raise ConfigError(f"--{key} needs a value, such as --{key}=1; a value that starts with -- needs the = too")
            text = rest.pop(0)
        pairs.append((key.replace("-", "_"), _scalar(text)))
    return pairs


def _scalar(text: str) -> Any:  # noqa: ANN401 - a YAML value
    try:
        return load_yaml(text)
    except NOT_YAML:
        return text


class _Loader(yaml.SafeLoader):
    """Refuses a mapping with a repeated key, of which the plain loader drops one, and a value that contains itself.

    As in YAML 1.2, `true` and `false` are booleans, and `yes`, `no`, `on` and `off` are words: some fields have
    such a value.
    """

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in cast("list[tuple[yaml.Node, yaml.Node]]", node.value):
            if str(key.value) in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value!r} is given twice", problem_mark=key.start_mark)
            seen.add(str(key.value))
        return node

    def construct_document(self, node: yaml.Node) -> object:
        return self.construct_object(node, deep=True)


_BOOLEAN: Final = "tag:yaml.org,2002:bool"
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _BOOLEAN]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_BOOLEAN, re.compile("(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))


def load_yaml(text: str) -> Any:  # noqa: ANN401 - a YAML value
    """Return the value of YAML text; raise one of `NOT_YAML` if it is not YAML, or repeats a key."""
    return yaml.load(text, _Loader)


def _copy(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _copy(cast("dict[str, Any]", v)) if isinstance(v, dict) else v for k, v in values.items()}


def _set(values: dict[str, Any], key: str, value: Any) -> None:  # noqa: ANN401 - a YAML value
    *parents, last = key.split(".")
    for parent in parents:
        below = values.setdefault(parent, {})
        if not isinstance(below, dict):
            raise ConfigError(f"--{key}: {parent} is a single value and has no field {last}")
        values = cast("dict[str, Any]", below)
    values[last] = value
