"""Histories of made-up episodes, and other spellings of the JSON in them."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import anyio
from hypothesis import strategies as st

from agentrl.types import Message, StopReason, Turn
from agentrl_doors.gateway.sessions.matching import ResentHistory
from tests.support.doors import HI, scripted_client

short_texts = st.text(max_size=12)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | short_texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(short_texts, inner, max_size=3),
    max_leaves=8,
)


@st.composite
def spellings(draw: st.DrawFn, value: object) -> str:
    """Return JSON text of a value: another order of keys, other white space, other escapes, integers as floats."""

    def written(part: object) -> str:
        space = draw(st.sampled_from(["", " ", "\n\t"]))
        if isinstance(part, dict):
            items = draw(st.permutations(list(part.items())))
            return "{" + ",".join(f"{space}{written(k)}{space}:{space}{written(v)}" for k, v in items) + "}"
        if isinstance(part, list):
            return "[" + ",".join(space + written(each) for each in part) + space + "]"
        if isinstance(part, int) and not isinstance(part, bool) and draw(st.booleans()):
            return f"{part}.0"
        return json.dumps(part, ensure_ascii=draw(st.booleans()))

    return written(value)


@cache
def some_turn() -> Turn:
    """Return a turn that a client recorded."""

    async def record() -> Turn:
        client, _ = scripted_client(["fine"])
        await client.chat.completions.create(messages=HI)
        return client.close(StopReason.COMPLETED, 1.0).turns[0]

    return anyio.run(record)


def history_of(*messages: Message) -> tuple[ResentHistory, dict[str, float]]:
    """Return the history of an episode whose turns answered with these messages, each the first of its conversation."""
    turns = [replace(some_turn(), message=message, messages=tuple(HI)) for message in messages]
    metrics: dict[str, float] = {}
    return ResentHistory(turns, metrics), metrics
