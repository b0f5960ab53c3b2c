"""Prompts: what one model call sends, built from what the turns above already hold.

Invariant: a prompt's context holds the context and output ids from the root to the call's own context; `recorded` returns
the digest of its JSON. Building costs what is new, the output before it, and a list of pieces; for a call that does not
extend the last recorded turn, one pass over all its ids.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import cast

import msgspec
import numpy as np

from agentrl.context import INT32, Context, json_of
from agentrl.packed import PackedArray
from agentrl.tokens.match import Match
from agentrl.types import ForkReason, Int32Array, Turn

CONTEXT_IDS, OUTPUT_IDS = (cast("PackedArray", vars(Turn)[name]) for name in ("context_ids", "output_ids"))


class Placed(msgspec.Struct, frozen=True):
    """The ids a model call adds, with their place."""

    parent: int | None
    """The turn it extends; None for a root."""
    ids: list[int]
    """What it adds to its parent's."""
    thinking_open: bool
    """Whether the context ends inside `<think>`."""
    fork: ForkReason | None
    """Why it is a fork; None if it is not."""
    kept_thinking: bool = False
    """Whether the template would drop earlier reasoning that this context keeps (`history="keep"`)."""


class Prompt(msgspec.Struct, frozen=True):
    """What one model call sends, and where its turn will stand in the graph."""

    placed: Placed
    added: bytes
    """The ids it adds to its parent's, int32."""
    context: Context
    """All ids."""
    tools: bool
    """Whether the request has tools, so that the output may hold tool calls."""
    match: Match | None
    """Where the request's messages met the known conversations; None for a call made of ids."""
    tools_key: bytes


class PromptBuilder:
    """Builds prompts over the turns of one episode; remembers the end of the last one, which most calls extend."""

    def __init__(self, turns: Sequence[Turn], bound: int) -> None:
        """Build over `turns`, which grows as turns are recorded and whose ids are below `bound`."""
        self._turns = turns
        self._bound = bound
        self._turn: int | None = None
        """The last recorded turn."""
        self._ids: list[bytes] = []
        """Ids from the root to its end, int32, in pieces; the last one is its output."""
        self._size = 0
        """How many there are."""
        self._json: tuple[bytes, ...] = ()
        """Those before its output, as in `Context`."""
        self._digest = hashlib.blake2b(digest_size=16)
        """Of that."""

    def path_ids(self, turn: int | None) -> Int32Array:
        """Return the ids from the root to the end of `turn`, [N] int32."""
        return np.frombuffer(b"".join(self._path(turn)), np.int32)

    def build(self, placed: Placed, *, tools: bool, match: Match | None, tools_key: bytes) -> Prompt:
        """Return the prompt of a call that stands at `placed`."""
        added = array("i", placed.ids).tobytes()
        if placed.parent == self._turn:
            ids, json, size = self._ids, self._json, self._size + len(placed.ids)
            packed, fresh = (*ids, added), ids[-1] + added if ids else added
        else:
            fresh = b"".join([*self._path(placed.parent), added])
            packed, json, size = (fresh,), (), len(fresh) // INT32.itemsize
        written = json_of(fresh)
        if written:
            json = (*json, b"," + written if json else written)
        return Prompt(placed, added, Context(packed, json, size, self._bound), tools, match, tools_key)

    def recorded(self, turn: int, prompt: Prompt, output: bytes) -> bytes:
        """Remember the end of a turn that is being recorded; return the digest of its context's JSON."""
        parent, written = prompt.placed.parent, prompt.context.json
        if self._turn == parent:  # and it was when the prompt was built, for turns come one after the other
            ids, digest, new = self._ids, self._digest, written[len(self._json) :]
        else:
            ids, digest, new = self._path(parent), hashlib.blake2b(digest_size=16), written
        digest.update(b"".join(new))
        ids += (prompt.added, output)
        self._turn, self._ids, self._json, self._digest = turn, ids, written, digest
        self._size = prompt.context.size + len(output) // INT32.itemsize
        return digest.digest()

    def _path(self, turn: int | None) -> list[bytes]:
        pieces: list[bytes] = []
        while turn is not None:
            record = self._turns[turn]
            pieces += (OUTPUT_IDS.raw(record), CONTEXT_IDS.raw(record))
            turn = record.parent
        return pieces[::-1]
