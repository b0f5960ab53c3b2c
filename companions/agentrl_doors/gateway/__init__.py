"""Model APIs over HTTP: chat completions, Responses and Messages, for an inference engine (`routes`) or for episodes."""

from agentrl_doors.gateway.routes import Gateway

__all__ = ["Gateway"]
