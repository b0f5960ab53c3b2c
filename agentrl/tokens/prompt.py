"""The prompt of one model call: the ids that it adds to the turn that it extends, and the whole context that is sent.

Invariant: a context shares its pieces with the contexts before it, so that a prompt that extends the last recorded turn
costs what is new. `ContextBuilder.record` returns the digest of exactly the ids that were sent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
import numpy as np

from agentrl.inference.backend import INT32, Context, json_of
from agentrl.tokens.history import HistoryMatch
from agentrl.tokens.template.rendering import ToolSchemas
from agentrl.types import ForkReason, Int32Array, Message, Turn


class Extension(msgspec.Struct, frozen=True):
    """What a model call adds to the turn that it extends."""

    parent: int | None
    """The extended turn; None for a root."""
    ids: list[int]
    """The context ids between the end of the parent and where the model writes."""
    thinking_open: bool = False
    """Whether the context ends inside `<think>`."""
    fork: ForkReason | None = None
    """Why it is a fork; None if it is not."""
    kept_thinking: bool = False
    """Whether the context keeps earlier reasoning that the template would drop (`history="keep"`)."""


class Prompt(msgspec.Struct, frozen=True):
    """What one model call sends, and where its turn will stand in the graph."""

    extension: Extension
    added: bytes
    """The ids of the extension, int32."""
    context: Context
    """All ids."""
    match: HistoryMatch | None
    """Where the request meets the recorded conversations; None for a call made of ids."""
    tools_key: bytes
    sent_after: int
    """How many turns were complete when the request was prepared."""
    messages: tuple[Message, ...] = ()
    """The messages that the request adds to the conversation of the extended turn."""
    schemas: ToolSchemas | None = None
    """The tools of the request, if it starts a conversation; the turn that it extends has the same tools."""
    started_s: float = 0.0
    """When the request was prepared, seconds of `time.perf_counter`."""

    @property
    def tools(self) -> bool:
        """Whether the request has tools, so that the output may hold tool calls."""
        return bool(self.tools_key)


class ContextBuilder:
    """Builds contexts over the turns of one episode; remembers the end of the last turn, which most calls extend."""

    def __init__(self, turns: Sequence[Turn], bound: int) -> None:
        """Build over `turns`, which grows as turns are recorded and whose ids are below `bound`."""
        self._turns = turns
        self._bound = bound
        self._last: int | None = None
        """The last recorded turn."""
        self._pieces: list[bytes] = []
        """The ids from the root to its end, int32; the last piece is its output."""
        self._size = 0
        """Number of these ids."""
        self._json: tuple[bytes, ...] = ()
        """The JSON of the ids before its output, in pieces as in `Context`."""
        self._digest = hashlib.blake2b(digest_size=16)
        """The digest of that JSON."""

    def path_ids(self, turn: int | None) -> Int32Array:
        """Return the ids from the root to the end of `turn`, [N] int32."""
        return np.frombuffer(b"".join(self._path(turn)), np.int32)

    def build(self, parent: int | None, added: bytes) -> Context:
        """Return the context of a call that adds the int32 ids `added` to the end of `parent`."""
        if parent == self._last:
            pieces, json = (*self._pieces, added), self._json
            size, fresh = self._size + len(added) // INT32.itemsize, b"".join([*self._pieces[-1:], added])
        else:
            fresh = b"".join([*self._path(parent), added])
            pieces, json, size = (fresh,), (), len(fresh) // INT32.itemsize
        written = json_of(fresh)
        if written:
            json = (*json, b"," + written if json else written)
        return Context(pieces, json, size, self._bound)

    def record(self, turn: int, prompt: Prompt, output: bytes) -> bytes:
        """Remember the end of `turn`, which is recorded now; return the digest of its context's JSON."""
        parent, json = prompt.extension.parent, prompt.context.json
        if parent == self._last:  # also when the prompt was built, because a parent precedes its children
            pieces, digest, new = self._pieces, self._digest, json[len(self._json) :]
        else:
            pieces, digest, new = self._path(parent), hashlib.blake2b(digest_size=16), json
        digest.update(b"".join(new))
        self._last, self._pieces, self._json, self._digest = turn, [*pieces, prompt.added, output], json, digest
        self._size = prompt.context.size + len(output) // INT32.itemsize
        return digest.digest()

    def _path(self, turn: int | None) -> list[bytes]:
        pieces: list[bytes] = []
        while turn is not None:
            record = self._turns[turn]
            pieces += (record.output_ids.tobytes(), record.context_ids.tobytes())
            turn = record.parent
        return pieces[::-1]
