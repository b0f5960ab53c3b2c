"""Anthropic's Messages."""

from agentrl_doors.gateway.dialects.messages.dialect import MessagesDialect

__all__ = ["MessagesDialect"]
