"""Prompts: the ids and bytes one model call sends, built from what the turns above already hold.

Invariant: `input_ids` is the context and output ids from the root to the call's own context, joined; `input_json` is the
same, decimal; `digest` is the digest of `input_json`. Building costs what is new, but for two memory copies; for a call
that does not extend the last recorded turn, also one pass over its ids.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, cast

import numpy as np
import orjson

from agentrl.packed import PackedArray
from agentrl.tokens.match import Match
from agentrl.types import ForkReason, Int32Array, Turn

_CONTEXT_IDS, _OUTPUT_IDS = (cast("PackedArray", vars(Turn)[name]) for name in ("context_ids", "output_ids"))


class RunningDigest(Protocol):
    """A blake2b state of 16 bytes output."""

    def update(self, data: bytes, /) -> None:
        """Take in more bytes."""
        ...

    def copy(self) -> RunningDigest:
        """Return an independent state."""
        ...

    def digest(self) -> bytes:
        """Return the digest of the bytes so far."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What one model call sends, and where its turn will stand in the graph."""

    parent: int | None
    """The turn it extends; None for a root."""
    context_ids: Int32Array
    """[C] int32, read-only: the ids it adds to its parent's."""
    input_ids: Int32Array
    """[N] int32, read-only: the whole context."""
    input_json: bytes
    """The same ids, decimal and comma-joined."""
    fork: ForkReason | None
    """Why it is a fork; None if it is not."""
    tools: bool
    """Whether the request has tools, so that the output may hold tool calls."""
    thinking_open: bool
    """Whether the context ends inside `<think>`."""
    kept_thinking: bool
    """Whether the template would drop earlier reasoning that this context keeps (`history="keep"`)."""
    match: Match | None = field(repr=False, compare=False)
    """Where the request's messages met the known conversations; None for a call made of ids."""
    tools_key: bytes
    digest: RunningDigest = field(repr=False, compare=False)
    """Running digest of `input_json`."""


class Placed(NamedTuple):
    """A context with its place."""

    parent: int | None
    ids: list[int]
    thinking_open: bool
    fork: ForkReason | None
    kept_thinking: bool = False


class _Leaf(NamedTuple):
    """The end of the last recorded turn, ready to be extended."""

    turn: int | None
    ids: list[bytes]
    """Ids from the root to the end of the turn, int32, in pieces."""
    json: tuple[bytes, ...]
    """The same, decimal and comma-joined, in pieces without empty ones."""
    digest: RunningDigest
    """Of the JSON pieces, joined by commas."""


class PromptBuilder:
    """Builds prompts over the turns of one episode."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        """Build over `turns`, which grows as turns are recorded."""
        self._turns = turns
        self._leaf: _Leaf | None = None

    def path_ids(self, turn: int | None) -> Int32Array:
        """Return the ids from the root to the end of `turn`, [N] int32."""
        return np.frombuffer(b"".join(self._path(turn)), np.int32)

    def build(self, placed: Placed, *, tools: bool, match: Match | None, tools_key: bytes) -> Prompt:
        """Return the prompt of a call that stands at `placed`."""
        leaf = self._at(placed.parent)
        context = struct.pack(f"={len(placed.ids)}i", *placed.ids)
        added, pieces, digest = orjson.dumps(placed.ids)[1:-1], leaf.json, leaf.digest.copy()
        if added:
            digest.update(b"," + added if pieces else added)
            pieces = (*pieces, added)
        return Prompt(
            parent=placed.parent,
            context_ids=np.frombuffer(context, np.int32),
            input_ids=np.frombuffer(b"".join((*leaf.ids, context)), np.int32),
            input_json=b",".join(pieces),
            fork=placed.fork,
            tools=tools,
            thinking_open=placed.thinking_open,
            kept_thinking=placed.kept_thinking,
            match=match,
            tools_key=tools_key,
            digest=digest,
        )

    def recorded(self, turn: int, prompt: Prompt) -> None:
        """Remember the end of a turn just recorded, which the next call most likely extends."""
        leaf, record = self._leaf, self._turns[turn]
        ids = leaf.ids if leaf is not None and leaf.turn == prompt.parent else self._path(prompt.parent)
        pieces, digest = (prompt.input_json,) if prompt.input_json else (), prompt.digest.copy()
        output = _ids_json(record.output_ids)
        if output:
            digest.update(b"," + output if pieces else output)
            pieces = (*pieces, output)
        self._leaf = _Leaf(turn, [*ids, _CONTEXT_IDS.raw(record), _OUTPUT_IDS.raw(record)], pieces, digest)

    def _at(self, turn: int | None) -> _Leaf:
        if self._leaf is not None and self._leaf.turn == turn:
            return self._leaf
        path = self._path(turn)
        known = _ids_json(np.frombuffer(b"".join(path), np.int32))
        return _Leaf(turn, path, (known,) if known else (), hashlib.blake2b(known, digest_size=16))

    def _path(self, turn: int | None) -> list[bytes]:
        pieces: list[bytes] = []
        while turn is not None:
            record = self._turns[turn]
            pieces += (_OUTPUT_IDS.raw(record), _CONTEXT_IDS.raw(record))
            turn = record.parent
        return pieces[::-1]


def _ids_json(ids: Int32Array) -> bytes:
    return orjson.dumps(ids, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
