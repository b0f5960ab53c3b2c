"""The context of a model call: its token ids and their JSON, in pieces that the calls of a conversation share.

At 32k tokens they are 128 and 170 KiB. A call that goes on where another ended takes over its pieces and adds its own, so a
turn costs what is new; whoever sends or reads the whole joins it.

Invariant: the pieces of `json`, joined, are the ids, decimal and comma-joined; every id is at least 0 and below `bound`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import orjson

from agentrl.errors import TokenError
from agentrl.types import Int32Array

INT32 = np.dtype(np.int32)


class Context(msgspec.Struct, frozen=True):
    """Token ids from the root of a conversation to where the model writes.

    Example:
        >>> context = Context.of([5, 6, 7])
        >>> context.size, context.ids().tolist(), context.json
        (3, [5, 6, 7], (b'5,6,7',))
    """

    packed: tuple[bytes, ...]
    """The ids, int32, in pieces."""
    json: tuple[bytes, ...]
    """The ids as they are sent, in pieces."""
    size: int
    """How many there are."""
    bound: int
    """All of them are below it: the size of the vocabulary they are from, or less."""

    @classmethod
    def of(cls, ids: Sequence[int] | Int32Array) -> Context:
        """Return the context of these ids.

        Raises:
            TokenError: if they are no list of whole numbers, or one is negative or no int32.
        """
        given = np.asarray(ids)
        if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
            raise TokenError(f"a context is a list of token ids, got an array of {given.dtype} with shape {given.shape}")
        low, high = (int(given.min()), int(given.max())) if given.size else (0, -1)
        if low < 0 or high >= 2**31:
            raise TokenError(f"token ids must be in 0..{2**31 - 1}, got {low}..{high}")
        packed = given.astype(INT32).tobytes()
        return cls((packed,), (json_of(packed),), given.size, high + 1)

    def ids(self) -> Int32Array:
        """Return all ids, [N] int32, read-only."""
        return np.frombuffer(b"".join(self.packed), INT32)


def json_of(packed: bytes) -> bytes:
    """Return int32 ids as JSON, without brackets."""
    return orjson.dumps(np.frombuffer(packed, INT32), option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
