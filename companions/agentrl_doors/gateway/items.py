"""The items of one session's responses, by id: what `previous_response_id` and `item_reference` stand for.

Invariant: an id stands for what was issued or sent under it, or is unknown; nothing is guessed. The store has a limit in
bytes; beyond it the oldest response goes, and ids that need it become unknown.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

MAX_STORED_BYTES = 16 * 1024 * 1024
"""Default limit of one store."""
Item = Mapping[str, object]


class _Response(NamedTuple):
    previous: str | None
    items: tuple[Item, ...]
    size: int


class ItemStore:
    """Keeps the items of responses.

    Args:
        max_bytes: limit of the bodies that are kept.

    Example:
        >>> store = ItemStore()
        >>> store.keep("resp_1", None, [{"id": "a"}], [{"id": "b"}], size=20)
        >>> store.keep("resp_2", "resp_1", [{"id": "c"}], [], size=20)
        >>> [item["id"] for item in store.conversation("resp_2")], store.item("b"), store.conversation("resp_3")
        (['a', 'b', 'c'], {'id': 'b'}, None)
    """

    def __init__(self, max_bytes: int = MAX_STORED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._size = 0
        self._responses: OrderedDict[str, _Response] = OrderedDict()
        self._items: dict[str, Item] = {}

    def keep(
        self, response_id: str, previous: str | None, sent: Sequence[Item], answered: Sequence[Item], *, size: int
    ) -> None:
        """Keep the items that a call sent and those that answered it; `previous` is the response that it continued."""
        self._forget(response_id)
        response = _Response(previous, (*sent, *answered), size)
        self._responses[response_id] = response
        self._items.update({str(item["id"]): item for item in response.items if item.get("id")})
        self._size += size
        while self._size > self._max_bytes and self._responses:
            self._forget(next(iter(self._responses)))

    def item(self, item_id: str) -> Item | None:
        """Return the item with this id; None if there is none."""
        return self._items.get(item_id)

    def conversation(self, response_id: str) -> list[Item] | None:
        """Return all items up to and with this response; None if it, or one that it continues, is unknown."""
        chain: list[_Response] = []
        at: str | None = response_id
        while at is not None:
            response = self._responses.get(at)
            if response is None:
                return None
            chain.append(response)
            at = response.previous
        return [item for response in reversed(chain) for item in response.items]

    def _forget(self, response_id: str) -> None:
        response = self._responses.pop(response_id, None)
        if response is None:
            return
        self._size -= response.size
        for item in response.items:
            if self._items.get(str(item.get("id"))) is item:
                del self._items[str(item["id"])]
