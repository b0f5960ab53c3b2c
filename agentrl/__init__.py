"""Multi-turn agentic RL of language models.

Write a `RolloutWorkflow`; it drives an environment through an OpenAI-compatible `Client`; an episode comes back as a
`Trajectory` of token ids with rewards on its turns; `agentrl train run.yaml` trains on it.

Invariant: importing this package imports none of its modules but `support.exports` and `support.moved`. A name is imported
at its first use, so a server or trainer process does not import the client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.support.exports import first_use
from agentrl.support.moved import find_moved_modules

if TYPE_CHECKING:
    from agentrl.client import Client, MessageLike
    from agentrl.client.tools import ToolError, reply_to, tool
    from agentrl.client.tools.processes import in_process
    from agentrl.commands.open_run import open_run
    from agentrl.commands.python.episode import run_episode
    from agentrl.commands.python.evaluation import evaluate
    from agentrl.commands.python.serving import serve
    from agentrl.commands.python.training import train, train_async
    from agentrl.env import Environment, open_environment
    from agentrl.errors import AgentRLError, ConfigError, EnvironmentFault
    from agentrl.tokens.verify import verify
    from agentrl.types import Group, MemberAdvantages, Sample, StopReason, Task, Trajectory, Turn
    from agentrl.workflow import RolloutWorkflow

__all__ = [
    "AgentRLError",
    "Client",
    "ConfigError",
    "Environment",
    "EnvironmentFault",
    "Group",
    "MemberAdvantages",
    "MessageLike",
    "RolloutWorkflow",
    "Sample",
    "StopReason",
    "Task",
    "ToolError",
    "Trajectory",
    "Turn",
    "evaluate",
    "in_process",
    "open_environment",
    "open_run",
    "reply_to",
    "run_episode",
    "serve",
    "tool",
    "train",
    "train_async",
    "verify",
]

_HOME = {
    "AgentRLError": "agentrl.errors",
    "Client": "agentrl.client",
    "ConfigError": "agentrl.errors",
    "Environment": "agentrl.env",
    "EnvironmentFault": "agentrl.errors",
    "Group": "agentrl.types",
    "MemberAdvantages": "agentrl.types",
    "MessageLike": "agentrl.client",
    "RolloutWorkflow": "agentrl.workflow",
    "Sample": "agentrl.types",
    "StopReason": "agentrl.types",
    "Task": "agentrl.types",
    "ToolError": "agentrl.client.tools",
    "Trajectory": "agentrl.types",
    "Turn": "agentrl.types",
    "evaluate": "agentrl.commands.python.evaluation",
    "in_process": "agentrl.client.tools.processes",
    "open_environment": "agentrl.env",
    "open_run": "agentrl.commands.open_run",
    "reply_to": "agentrl.client.tools",
    "run_episode": "agentrl.commands.python.episode",
    "serve": "agentrl.commands.python.serving",
    "tool": "agentrl.client.tools",
    "train": "agentrl.commands.python.training",
    "train_async": "agentrl.commands.python.training",
    "verify": "agentrl.tokens.verify",
}

__getattr__ = first_use(__name__, _HOME)
find_moved_modules()


def __dir__() -> list[str]:
    return sorted(__all__)
