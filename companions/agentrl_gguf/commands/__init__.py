"""The command `agentrl import`."""

from __future__ import annotations

from typing import Final

from agentrl.support.companions import Command

COMMANDS: Final = {
    "import": Command(
        "agentrl_gguf.commands.import_model:import_command",
        "Write a GGUF file as a Hugging Face directory: config, weights, tokenizer and chat template.",
    ),
}
