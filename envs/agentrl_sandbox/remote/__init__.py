"""Programs, sessions and containers of another machine: the protocol and its client. `agentrl_sandbox.hosts` serves it."""

from agentrl_sandbox.remote.sandbox import RemoteSandbox, open_remote

__all__ = ["RemoteSandbox", "open_remote"]
