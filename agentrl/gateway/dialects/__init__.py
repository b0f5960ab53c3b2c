"""The dialects of the gateway: chat completions, Responses, and Messages."""

from agentrl.gateway.dialects.chat import ChatDialect
from agentrl.gateway.dialects.messages import MessagesDialect
from agentrl.gateway.dialects.responses import ResponsesDialect

__all__ = ["ChatDialect", "MessagesDialect", "ResponsesDialect"]
