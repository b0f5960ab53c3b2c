"""What it means for an episode, and for its run, that the environment of a task cannot be opened."""

from __future__ import annotations

from typing import Final

from agentrl.errors import ConfigError, EnvironmentFault, RunStopped
from agentrl_sandbox.containers.protocol import MissingImage, NoSecond
from agentrl_sandbox.harbor.task import HarborTask

FEEDBACK_SCRIPT: Final = "feedback.sh"


def opening_error(harbor: HarborTask, error: ConfigError) -> EnvironmentFault | RunStopped:
    """Return what to raise: it stops the run where the run file can mend it, and is a fault of this task elsewhere."""
    if isinstance(error, NoSecond):
        who, fix = f"{harbor.folder}/tests/{FEEDBACK_SCRIPT}: feedback runs", ", or set feedback_weight: 0"
        if harbor.is_judged_apart:
            who, fix = f"{harbor.folder}: its tests run", ""
        return RunStopped(f"{who} in a second environment beside that of the agent: {error}; let a host hold more{fix}")
    said = f"{harbor.folder}: {error}"
    return (
        RunStopped(f"{said}; correct its entry in `images`") if isinstance(error, MissingImage) else EnvironmentFault(said)
    )
