"""Servers that run programs and containers for other machines, and the command that starts one."""

from __future__ import annotations

from typing import Final

from agentrl.support.companions import Command

COMMANDS: Final = {
    "sandbox-host": Command(
        "agentrl_sandbox.hosts.command:sandbox_host_command",
        "Run programs and containers of runs on other machines, which name this one (sandbox.url, containers.hosts).",
    ),
}
