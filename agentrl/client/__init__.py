"""The OpenAI-compatible client bound to one episode, its backends, and tools. A name is imported at its first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.support.exports import first_use

if TYPE_CHECKING:
    from agentrl.client.arguments import MessageLike
    from agentrl.client.client import Client
    from agentrl.client.completion import ChatStream
    from agentrl.client.config import SamplingConfig
    from agentrl.client.door import Door, DoorSettings, OtherModel, RoleRule, SideCalls
    from agentrl.client.endpoint import EndpointBackend
    from agentrl.client.episode import EpisodeSettings
    from agentrl.client.offline import CallTimeout
    from agentrl.client.policy import PolicyBackend
    from agentrl.client.replay import ReplayBackend
    from agentrl.client.tools import Tool, ToolError, reply_to, tool

__all__ = [
    "CallTimeout",
    "ChatStream",
    "Client",
    "Door",
    "DoorSettings",
    "EndpointBackend",
    "EpisodeSettings",
    "MessageLike",
    "OtherModel",
    "PolicyBackend",
    "ReplayBackend",
    "RoleRule",
    "SamplingConfig",
    "SideCalls",
    "Tool",
    "ToolError",
    "reply_to",
    "tool",
]

__getattr__ = first_use(
    __name__,
    {
        "CallTimeout": "agentrl.client.offline",
        "ChatStream": "agentrl.client.completion",
        "Client": "agentrl.client.client",
        "Door": "agentrl.client.door",
        "DoorSettings": "agentrl.client.door",
        "EndpointBackend": "agentrl.client.endpoint",
        "EpisodeSettings": "agentrl.client.episode",
        "MessageLike": "agentrl.client.arguments",
        "OtherModel": "agentrl.client.door",
        "PolicyBackend": "agentrl.client.policy",
        "ReplayBackend": "agentrl.client.replay",
        "RoleRule": "agentrl.client.door",
        "SamplingConfig": "agentrl.client.config",
        "SideCalls": "agentrl.client.door",
        "Tool": "agentrl.client.tools",
        "ToolError": "agentrl.client.tools",
        "reply_to": "agentrl.client.tools",
        "tool": "agentrl.client.tools",
    },
)
