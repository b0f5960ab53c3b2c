"""Bytes that are kept by name as long as there is room: those that were asked for least recently go first."""

from __future__ import annotations

from collections import OrderedDict


class KeptBytes:
    """Keeps at most `max_bytes`.

    Example:
        >>> kept = KeptBytes(8)
        >>> for name in ("a", "b", "c"):
        ...     kept.keep(name, b"1234")
        >>> kept.get("a"), kept.get("c")
        (None, b'1234')
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._num_bytes = 0

    def get(self, name: str) -> bytes | None:
        """Return what is kept by this name."""
        found = self._kept.get(name)
        if found is not None:
            self._kept.move_to_end(name)
        return found

    def keep(self, name: str, content: bytes) -> None:
        """Keep `content`, and forget others where room is missing; what has no room at all is not kept."""
        if len(content) > self._max_bytes:
            return
        self._num_bytes += len(content) - len(self._kept.pop(name, b""))
        self._kept[name] = content
        while self._num_bytes > self._max_bytes:
            _, forgotten = self._kept.popitem(last=False)
            self._num_bytes -= len(forgotten)
