"""The commands `agentrl serve` and `agentrl online`."""

from __future__ import annotations

from typing import Final

from agentrl.support.companions import Command

COMMANDS: Final = {
    "serve": Command(
        "agentrl_doors.commands.serve:serve_command",
        "Serve a checkpoint with the embedded server: SGLang's HTTP protocol, and the OpenAI API under /v1.",
    ),
    "online": Command(
        "agentrl_doors.commands.online:online_command",
        "Serve the policy to real clients over HTTP, and train it on their feedback while it serves.",
    ),
}
