"""Agents that work in a terminal: Harbor task folders, played and verified in containers."""

from __future__ import annotations

from agentrl_workflows.terminal.bash_agent import TerminalAgent
from agentrl_workflows.terminal.command_agent import TerminalCommand
from agentrl_workflows.terminal.episode import TerminalWorkflow
from agentrl_workflows.terminal.screen import Screen
from agentrl_workflows.terminal.workplace import Workplace

__all__ = ["Screen", "TerminalAgent", "TerminalCommand", "TerminalWorkflow", "Workplace"]
