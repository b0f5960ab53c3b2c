"""What the source of a chat template tells about the way it treats text."""

from __future__ import annotations

import re

import jinja2
import jinja2.nodes

_SAFE_FILTERS = frozenset({"tojson", "trim", "length", "count", "string", "safe", "items", "default", "d", "e", "escape"})
_SAFE_METHODS = frozenset({"strip", "lstrip", "rstrip", "startswith", "endswith", "items", "keys", "values", "get"})


def literals_of(source: str) -> set[str]:
    """Return the texts that a template writes or compares with."""
    tree = _parse(source)
    texts = {node.data for node in tree.find_all(jinja2.nodes.TemplateData)}
    return texts | {node.value for node in tree.find_all(jinja2.nodes.Const) if isinstance(node.value, str)}


def cuts_and_joins(source: str) -> bool:
    """Return whether a template may cut and join strings."""
    tree = _parse(source)
    if any(node.name not in _SAFE_FILTERS for node in tree.find_all(jinja2.nodes.Filter)):
        return True
    called = (call.node for call in tree.find_all(jinja2.nodes.Call))
    if any(isinstance(node, jinja2.nodes.Getattr) and node.attr not in _SAFE_METHODS for node in called):
        return True
    return any(isinstance(node.arg, jinja2.nodes.Slice) for node in tree.find_all(jinja2.nodes.Getitem))


def _parse(source: str) -> jinja2.nodes.Template:
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    return environment.parse(re.sub(r"\{%-?\s*(?:end)?generation\s*-?%\}", "", source))
