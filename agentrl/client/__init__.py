"""The OpenAI-compatible client bound to one episode, its backends, and tools."""

from agentrl.client.arguments import MessageLike
from agentrl.client.client import Client
from agentrl.client.completion import ChatStream
from agentrl.client.config import SamplingConfig
from agentrl.client.endpoint import EndpointBackend
from agentrl.client.episode import EpisodeSettings
from agentrl.client.offline import CallTimeout
from agentrl.client.policy import PolicyBackend
from agentrl.client.replay import ReplayBackend
from agentrl.tools import Tool, ToolError, reply_to, tool

__all__ = [
    "CallTimeout",
    "ChatStream",
    "Client",
    "EndpointBackend",
    "EpisodeSettings",
    "MessageLike",
    "PolicyBackend",
    "ReplayBackend",
    "SamplingConfig",
    "Tool",
    "ToolError",
    "reply_to",
    "tool",
]
