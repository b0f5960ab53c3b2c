"""Prompts: the ids and bytes one model call sends, built from what the turns above already hold.

Invariant: `input_ids` is the context and output ids from the root to the call's own context, joined; `input_json` is the
same, decimal; `recorded` returns the digest of `input_json`. Building costs what is new and the output before it, but for
one memory copy; for a call that does not extend the last recorded turn, also one pass over its ids.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import cast

import msgspec
import numpy as np
import orjson

from agentrl.packed import PackedArray
from agentrl.tokens.match import Match
from agentrl.types import ForkReason, Int32Array, Turn

INT32 = np.dtype(np.int32)
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
    context: bytes
    """The ids it adds to its parent's, int32."""
    input_ids: Int32Array
    """[N] int32, read-only: the whole context."""
    input_json: tuple[bytes, ...]
    """The same ids, decimal and comma-joined, in pieces."""
    tools: bool
    """Whether the request has tools, so that the output may hold tool calls."""
    match: Match | None
    """Where the request's messages met the known conversations; None for a call made of ids."""
    tools_key: bytes


class PromptBuilder:
    """Builds prompts over the turns of one episode; remembers the end of the last one, which most calls extend."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        """Build over `turns`, which grows as turns are recorded."""
        self._turns = turns
        self._turn: int | None = None
        """The last recorded turn."""
        self._ids: list[bytes] = []
        """Ids from the root to its end, int32, in pieces; the last one is its output."""
        self._json: tuple[bytes, ...] = ()
        """Those before its output, decimal and comma-joined, in pieces."""
        self._digest = hashlib.blake2b(digest_size=16)
        """Of that."""

    def path_ids(self, turn: int | None) -> Int32Array:
        """Return the ids from the root to the end of `turn`, [N] int32."""
        return np.frombuffer(b"".join(self._path(turn)), np.int32)

    def build(self, placed: Placed, *, tools: bool, match: Match | None, tools_key: bytes) -> Prompt:
        """Return the prompt of a call that stands at `placed`."""
        context = array("i", placed.ids).tobytes()
        if placed.parent == self._turn:
            ids, known = self._ids, self._json
            fresh = ids[-1] + context if ids else context
        else:
            ids, known = self._path(placed.parent), ()
            fresh = b"".join([*ids, context])
        written = orjson.dumps(np.frombuffer(fresh, INT32), option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
        if written:
            known = (*known, b"," + written if known else written)
        input_ids = np.frombuffer(b"".join([*ids, context]), INT32)
        return Prompt(placed, context, input_ids, known, tools, match, tools_key)

    def recorded(self, turn: int, prompt: Prompt, output: bytes) -> bytes:
        """Remember the end of a turn that is being recorded; return the digest of the prompt's `input_json`."""
        parent, written = prompt.placed.parent, prompt.input_json
        if self._turn == parent:  # and it was when the prompt was built, for turns come one after the other
            ids, digest, new = self._ids, self._digest, written[len(self._json) :]
        else:
            ids, digest, new = self._path(parent), hashlib.blake2b(digest_size=16), written
        digest.update(b"".join(new))
        ids += (prompt.context, output)
        self._turn, self._ids, self._json, self._digest = turn, ids, written, digest
        return digest.digest()

    def _path(self, turn: int | None) -> list[bytes]:
        pieces: list[bytes] = []
        while turn is not None:
            record = self._turns[turn]
            pieces += (OUTPUT_IDS.raw(record), CONTEXT_IDS.raw(record))
            turn = record.parent
        return pieces[::-1]
