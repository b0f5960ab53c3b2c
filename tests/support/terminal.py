"""Agents of terminal tasks that are scripts: each works in a container of its own, and the task's tests judge it."""

from __future__ import annotations

from pathlib import Path

from agentrl.data.harbor_task import read_harbor_folder
from agentrl.sandbox.containers import Containers
from agentrl.sandbox.containers.protocol import CONTAINER_LIMITS
from agentrl.sandbox.types import Limits
from agentrl_workflows.terminal.benches import TaskBenches
from agentrl_workflows.terminal.verifier import TaskVerdict, TaskVerifier
from agentrl_workflows.terminal_tasks.catalog import bundled_problems

SCRIPT_LIMITS = CONTAINER_LIMITS.model_copy(update={"wall_s": 300.0})


async def play_script(
    containers: Containers, folder: Path, script: str, limits: Limits = SCRIPT_LIMITS, patience_s: float = 300
) -> TaskVerdict:
    """Return what the tests say after `script` has run in the container of the task in `folder`."""
    harbor = read_harbor_folder(folder)
    benches = TaskBenches(containers)
    verifier = TaskVerifier(benches)
    async with benches.opened(harbor, limits) as bench:
        async with bench.run(directory=harbor.image.workdir) as container:
            await container.execute(["/bin/bash", "-c", script], timeout_s=patience_s)
        verdict = await verifier.verify(bench, harbor, limits)
    await verifier.refuse_own_faults(verdict, harbor, limits)
    return verdict


def write_problem(folder: Path, name: str) -> dict[str, str]:
    """Write a bundled task below `folder`, and return the fields of a task for it."""
    problem = next(problem for problem in bundled_problems() if problem.name == name)
    return {"question": problem.ask, "folder": str(problem.write(folder))}
