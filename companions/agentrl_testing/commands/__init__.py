"""The commands `agentrl record`, `replay` and `rescore`."""

from __future__ import annotations

from typing import Final

from agentrl.support.companions import Command

COMMANDS: Final = {
    "record": Command(
        "agentrl_testing.commands.record:record_command",
        "Run episodes and write each as a cassette, which `agentrl replay` plays without a model.",
    ),
    "replay": Command(
        "agentrl_testing.commands.replay:replay_command",
        "Run recorded episodes again without a model, and compare them with their records, byte by byte.",
    ),
    "rescore": Command(
        "agentrl_testing.commands.rescore:rescore_command",
        "Compute the rewards of a run's stored episodes again, without a model, and print what changed.",
    ),
}
