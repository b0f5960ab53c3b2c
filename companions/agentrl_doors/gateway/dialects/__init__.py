"""The dialects of the gateway: chat completions, Responses, and Messages; `agentrl serve`, doors and online runs speak them.

The routes here stand without `/v1`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from agentrl_doors.gateway.dialect import Dialect
from agentrl_doors.gateway.dialects.chat import ChatDialect
from agentrl_doors.gateway.dialects.messages import MessagesDialect
from agentrl_doors.gateway.dialects.responses import ResponsesDialect

__all__ = ["COUNTED", "DIALECTS", "ChatDialect", "MessagesDialect", "ResponsesDialect", "dialect_of"]
CHAT_ROUTE: Final = "chat/completions"
"""The route whose dialect answers what belongs to none."""
COUNT_ROUTE: Final = "messages/count_tokens"
"""The route that takes the body of a call and answers the number of its tokens."""
DIALECTS: Final[Mapping[str, Dialect]] = {
    CHAT_ROUTE: ChatDialect(),
    "responses": ResponsesDialect(),
    "messages": MessagesDialect(),
}
"""The dialects by the routes of their calls."""
COUNTED: Final = MessagesDialect(takes_prefill=True)
"""The dialect of `COUNT_ROUTE`."""


def dialect_of(route: str) -> Dialect | None:
    """Return the dialect of a route; None: its bodies are of no dialect."""
    return COUNTED if route == COUNT_ROUTE else DIALECTS.get(route)
