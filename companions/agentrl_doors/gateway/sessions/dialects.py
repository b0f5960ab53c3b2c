"""The routes of the dialects that an episode speaks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from agentrl_doors.gateway.dialect import Dialect
from agentrl_doors.gateway.dialects import ChatDialect, MessagesDialect, ResponsesDialect

COUNT_ROUTE: Final = "messages/count_tokens"
"""The route that takes the body of a call and answers the number of its tokens."""
_COUNTED: Final = MessagesDialect(takes_prefill=True)
_DIALECTS: Final[Mapping[str, Dialect]] = {
    "chat/completions": ChatDialect(),
    "responses": ResponsesDialect(),
    "messages": MessagesDialect(),
}


def dialect_of_path(route: str) -> Dialect | None:
    """Return the dialect of a route without `/v1`; None: its bodies are of no dialect."""
    return _COUNTED if route == COUNT_ROUTE else _DIALECTS.get(route)


def served_dialects() -> Sequence[Dialect]:
    """Return the dialects, the first one for what belongs to none."""
    return tuple(_DIALECTS.values())


def served_routes() -> Sequence[str]:
    """Return the routes of calls."""
    return tuple(_DIALECTS)
