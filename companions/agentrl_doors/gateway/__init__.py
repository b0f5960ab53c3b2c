"""The OpenAI API over HTTP, in front of an inference engine: chat completions, completions and the list of models."""

from agentrl_doors.gateway.routes import Gateway

__all__ = ["Gateway"]
