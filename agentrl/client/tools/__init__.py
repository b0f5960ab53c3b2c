"""Tools: functions that the model can call, and where they run."""

from agentrl.client.tools.functions import RepliesToCalls, Tool, ToolError, reply_to, tool
from agentrl.client.tools.processes import in_process

__all__ = ["RepliesToCalls", "Tool", "ToolError", "in_process", "reply_to", "tool"]
