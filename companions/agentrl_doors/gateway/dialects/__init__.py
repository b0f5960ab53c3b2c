"""The dialects of the gateway: chat completions, Responses, and Messages."""

from agentrl_doors.gateway.dialects.chat import ChatDialect
from agentrl_doors.gateway.dialects.messages import MessagesDialect
from agentrl_doors.gateway.dialects.responses import ResponsesDialect

__all__ = ["ChatDialect", "MessagesDialect", "ResponsesDialect"]
