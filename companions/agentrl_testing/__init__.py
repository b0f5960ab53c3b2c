"""Play a workflow without a model, for tests: `trajectory = play(Calculator, task, replies)`. Check an advantage or a loss.

Invariant: the workflow meets the real client, and its tools, environments and graders run. Nothing outside this process
answers for the model, and the same replies give the same trajectory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.support.exports import first_use

if TYPE_CHECKING:
    from agentrl_testing.playing import TIMEOUT_S, CalledTool, Reply, call, check_replay, play, play_async
    from agentrl_testing.properties.check_advantage import check_advantage
    from agentrl_testing.properties.check_policy_loss import check_correction, check_policy_loss

__all__ = [
    "TIMEOUT_S",
    "CalledTool",
    "Reply",
    "call",
    "check_advantage",
    "check_correction",
    "check_policy_loss",
    "check_replay",
    "play",
    "play_async",
]

__getattr__ = first_use(
    __name__,
    {
        "CalledTool": "agentrl_testing.playing",
        "Reply": "agentrl_testing.playing",
        "TIMEOUT_S": "agentrl_testing.playing",
        "call": "agentrl_testing.playing",
        "check_advantage": "agentrl_testing.properties.check_advantage",
        "check_correction": "agentrl_testing.properties.check_policy_loss",
        "check_policy_loss": "agentrl_testing.properties.check_policy_loss",
        "check_replay": "agentrl_testing.playing",
        "play": "agentrl_testing.playing",
        "play_async": "agentrl_testing.playing",
    },
)
