"""Prompts: the ids and bytes one model call sends, built from what the turns above already hold.

Invariant: `input_ids` is the context and output ids from the root to the call's own context, joined; `input_json` is the
same, decimal; `digest` is the digest of `input_json`. Building costs what is new and the output before it, but for two
memory copies; for a call that does not extend the last recorded turn, also one pass over its ids.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
import orjson

from agentrl.packed import PackedArray
from agentrl.tokens.match import Match
from agentrl.types import ForkReason, Int32Array, Turn

INT32 = np.dtype(np.int32)
CONTEXT_IDS, OUTPUT_IDS = (cast("PackedArray", vars(Turn)[name]) for name in ("context_ids", "output_ids"))


class Placed(NamedTuple):
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


class Prompt(NamedTuple):
    """What one model call sends, and where its turn will stand in the graph."""

    placed: Placed
    context: bytes
    """The ids it adds to its parent's, int32."""
    input_ids: Int32Array
    """[N] int32, read-only: the whole context."""
    input_json: bytes
    """The same ids, decimal and comma-joined."""
    tools: bool
    """Whether the request has tools, so that the output may hold tool calls."""
    match: Match | None
    """Where the request's messages met the known conversations; None for a call made of ids."""
    tools_key: bytes
    digest: hashlib.blake2b
    """Running digest of `input_json`."""


class PromptBuilder:
    """Builds prompts over the turns of one episode; remembers the end of the last one, which most calls extend."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        """Build over `turns`, which grows as turns are recorded."""
        self._turns = turns
        self._turn: int | None = None
        """The last recorded turn."""
        self._ids: list[bytes] = []
        """Ids from the root to its end, int32, in pieces; the last one is its output."""
        self._json = b""
        """Those before its output, decimal and comma-joined."""
        self._digest = hashlib.blake2b(digest_size=16)
        """Of that."""

    def path_ids(self, turn: int | None) -> Int32Array:
        """Return the ids from the root to the end of `turn`, [N] int32."""
        return np.frombuffer(b"".join(self._path(turn)), np.int32)

    def build(self, placed: Placed, *, tools: bool, match: Match | None, tools_key: bytes) -> Prompt:
        """Return the prompt of a call that stands at `placed`."""
        context = array("i", placed.ids).tobytes()
        if placed.parent == self._turn:
            ids, known, digest = self._ids, self._json, self._digest.copy()
            fresh = ids[-1] + context if ids else context
        else:
            ids, known, digest = self._path(placed.parent), b"", hashlib.blake2b(digest_size=16)
            fresh = b"".join([*ids, context])
        written = orjson.dumps(np.frombuffer(fresh, INT32), option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
        written = b"," + written if known and written else written
        digest.update(written)
        input_ids = np.frombuffer(b"".join([*ids, context]), INT32)
        return tuple.__new__(Prompt, (placed, context, input_ids, known + written, tools, match, tools_key, digest))

    def recorded(self, turn: int, prompt: Prompt) -> None:
        """Remember the end of a turn just recorded."""
        parent = prompt.placed.parent
        ids = self._ids if self._turn == parent else self._path(parent)
        ids += (prompt.context, OUTPUT_IDS.raw(self._turns[turn]))
        self._turn, self._ids, self._json, self._digest = turn, ids, prompt.input_json, prompt.digest

    def _path(self, turn: int | None) -> list[bytes]:
        pieces: list[bytes] = []
        while turn is not None:
            record = self._turns[turn]
            pieces += (OUTPUT_IDS.raw(record), CONTEXT_IDS.raw(record))
            turn = record.parent
        return pieces[::-1]
