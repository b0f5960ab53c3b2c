"""Episodes over HTTP: each has a door of its own on the server of its process."""

from agentrl_doors.gateway.sessions.server import open_door

__all__ = ["open_door"]
