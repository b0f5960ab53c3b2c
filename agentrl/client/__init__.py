"""The OpenAI-compatible client bound to one episode, its counterpart for evaluation, and tools."""

from agentrl.client.arguments import MessageLike
from agentrl.client.client import Client
from agentrl.client.config import SamplingConfig
from agentrl.client.endpoint import EndpointClient
from agentrl.client.openai_base import CallTimeout
from agentrl.client.stream import ChatStream
from agentrl.tools import Tool, ToolError, reply_to, tool

__all__ = [
    "CallTimeout",
    "ChatStream",
    "Client",
    "EndpointClient",
    "MessageLike",
    "SamplingConfig",
    "Tool",
    "ToolError",
    "reply_to",
    "tool",
]
