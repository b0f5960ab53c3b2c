"""Agents of terminal tasks that are scripts: each works in a container of its own, and the task's tests judge it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import anyio

from agentrl.errors import EnvironmentFault
from agentrl_sandbox.containers import Containers
from agentrl_sandbox.containers.protocol import CONTAINER_LIMITS
from agentrl_sandbox.harbor.task import read_harbor_folder
from agentrl_sandbox.types import Limits
from agentrl_workflows.terminal.benches import TaskBenches
from agentrl_workflows.terminal.verifier import TaskVerdict, TaskVerifier
from agentrl_workflows.terminal_tasks.catalog import bundled_problems

NAIVE_TEST = """#!/bin/bash
if python3 /tests/check.py && grep -qx 42 answer.txt; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
NAIVE_CHECK = """
import json, os, re, subprocess
assert re.fullmatch("42", open("/app/answer.txt").read().strip())
assert subprocess.run(["grep", "-c", "42", "/app/answer.txt"], capture_output=True).stdout.strip() == b"1"
"""
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


def write_naive_task(folder: Path) -> Path:
    (folder / "environment").mkdir(parents=True)
    (folder / "tests").mkdir()
    (folder / "task.toml").write_text('schema_version = "1.1"\n[verifier]\ntimeout_sec = 120\n')
    (folder / "instruction.md").write_text("Write 42 to /app/answer.txt.\n")
    (folder / "tests" / "test.sh").write_text(NAIVE_TEST)
    (folder / "tests" / "check.py").write_text(NAIVE_CHECK)
    return folder


def write_bundled_task(folder: Path, name: str) -> Path:
    return next(problem for problem in bundled_problems() if problem.name == name).write(folder)


async def outcomes_in(
    containers: Containers, folder: Path, agents: Mapping[str, str], patience_s: float
) -> dict[str, object]:
    """Return what each agent got in these containers, or the fault that it caused."""
    found: dict[str, object] = {}
    limits = SCRIPT_LIMITS.model_copy(update={"work_mb": 64, "processes": 64, "memory_mb": 256})
    at_a_time = anyio.CapacityLimiter(3)

    async def play(name: str, script: str) -> None:
        async with at_a_time:
            try:
                found[name] = (await play_script(containers, folder, script, limits, patience_s)).reward
            except (EnvironmentFault, OSError) as error:
                found[name] = repr(error)

    async with anyio.create_task_group() as tasks:
        for name, script in agents.items():
            tasks.start_soon(play, name, script)
    return found
