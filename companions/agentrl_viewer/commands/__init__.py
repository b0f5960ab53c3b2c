"""The commands `agentrl view`, `audit`, `diff` and `export`."""

from __future__ import annotations

from typing import Final

from agentrl.support.companions import Command

COMMANDS: Final = {
    "view": Command(
        "agentrl_viewer.commands.view:view_command",
        "Show a run in the browser, live or ended: curves, who waits for whom, episodes as conversations and as tokens.",
    ),
    "audit": Command(
        "agentrl_viewer.commands.audit:audit_command",
        "Prove from a run's files that the trained tokens are those that were sent and sampled; status 1 where one is not.",
    ),
    "diff": Command(
        "agentrl_viewer.commands.diff:diff_command",
        "Compare two runs: the fields of their run files that differ, final figures, and tasks whose success changed.",
    ),
    "export": Command(
        "agentrl_viewer.commands.export:export_command",
        "Write the stored episodes of a run in the format of other programs: one ATIF document an episode.",
    ),
}
