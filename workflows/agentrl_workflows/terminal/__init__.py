"""Agents that work in a terminal: Harbor task folders, played and verified in containers."""

from __future__ import annotations

from agentrl_workflows.terminal.agent import TerminalAgent
from agentrl_workflows.terminal.episode import TerminalWorkflow

__all__ = ["TerminalAgent", "TerminalWorkflow"]
