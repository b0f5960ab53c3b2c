"""Counts of the fields of bodies that have no effect, under one rule for doors and for `agentrl serve`.

Invariant: every such field counts. A client cannot fill the counts with names of its own: beyond `MAX_IGNORED` names the
rest counts as `other`.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Final

MAX_IGNORED: Final = 64
"""Fields that are counted by name."""
_MAX_FIELD_NAME: Final = 100


class IgnoredFields:
    """Counts requests by the fields in them that have no effect.

    Args:
        counts: grows by one name a field.
        prefix: of these names.

    Example:
        >>> counts: dict[str, float] = {}
        >>> IgnoredFields(counts, "ignored.").count(["speed", "speed"])
        >>> counts
        {'ignored.speed': 2.0}
    """

    def __init__(self, counts: MutableMapping[str, float], prefix: str = "") -> None:
        self._counts, self._prefix = counts, prefix
        self._known: set[str] = set()

    def count(self, fields: Iterable[str]) -> None:
        """Count the fields of one request."""
        for field in fields:
            is_known = field in self._known or len(self._known) < MAX_IGNORED
            if is_known:
                self._known.add(field)
            name = self._prefix + (field if is_known else "other")[:_MAX_FIELD_NAME]
            self._counts[name] = self._counts.get(name, 0.0) + 1.0
