"""OpenAI's Responses."""

from agentrl_doors.gateway.dialects.responses.dialect import ResponsesDialect

__all__ = ["ResponsesDialect"]
