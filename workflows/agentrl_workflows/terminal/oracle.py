"""The oracle of a task: its own solution in place of an agent, in the same container and under the same limits.

Invariant: a solution that was cut short and is not paid in full is an error that names the limit, not a low reward. One
that ended well and is not paid in full has the last words of the tests, which say why.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from agentrl.client import Client
from agentrl.errors import WorkflowError
from agentrl.types import Task
from agentrl.workflow import REWARD_MARGIN, RolloutWorkflow
from agentrl_sandbox import Ending, Result
from agentrl_sandbox.containers import Container
from agentrl_sandbox.harbor.task import HarborTask
from agentrl_sandbox.types import signal_name
from agentrl_workflows.terminal.benches import limits_as_full_disks
from agentrl_workflows.terminal.scripts import end_of_output, script_argv
from agentrl_workflows.terminal.verifier import TaskVerdict
from agentrl_workflows.terminal.workplace import Work, Workplace

SOLUTION_S: Final = 3600.0
"""Seconds of a solution whose task sets no `agent.timeout_sec`."""
_SCRIPT: Final = "solve.sh"
_GROUP: Final = 256
"""Names of programs that one command takes."""
_FIELDS: Final = {Ending.MEMORY: "memory_mb", Ending.OUTPUT: "output_kb", Ending.FILES: "num_files"}


class TaskOracle(RolloutWorkflow):
    """Plays tasks with their own solution and asks no model.

    Args:
        judge: `judged` of a `TerminalWorkflow` that is open.
        full_reward: of that workflow.
    """

    def __init__(self, judge: Callable[[Task, Client, Work], Awaitable[TaskVerdict]], full_reward: float) -> None:
        self._judge, self.full_reward = judge, full_reward
        self.shortfall = ""
        """Why the last solution was not paid in full, in the words of the tests; empty: it was, or none was played."""

    async def run(self, task: Task, client: Client) -> float:
        """Return what the tests say of the solution.

        Raises:
            WorkflowError: it does not fit into the container, or it did not end well and is not paid in full.
        """
        problem = ""

        async def solve(task: Task, client: Client, place: Workplace) -> None:
            nonlocal problem
            del task, client
            problem = problem or _bad_end(await run_solution(place.container, place.harbor), place.harbor)

        verdict = await self._judge(task, client, solve)
        if verdict.reward >= self.full_reward - REWARD_MARGIN:
            self.shortfall = ""
            return verdict.reward
        self.shortfall = f"the tests say: {verdict.last_words}"
        if problem:
            raise WorkflowError(f"{problem}; the tests then pay {verdict.reward:g}, and {self.shortfall}")
        return verdict.reward


def has_solution(harbor: HarborTask) -> bool:
    """Return whether a task has a `solution/solve.sh`, and each of its steps."""
    return all(_SCRIPT in step.files("solution") for step in harbor.steps or (harbor,))


async def run_solution(container: Container, harbor: HarborTask) -> Result:
    """Put the solution of a task into a container and run it; its programs stay programs.

    Raises:
        WorkflowError: the container cannot hold it.
    """
    files = {f"/solution/{name}": path for name, path in harbor.files("solution").items()}
    programs = [name for name, path in files.items() if path.stat().st_mode & 0o100]
    try:
        with limits_as_full_disks(container):
            await container.upload({name: path.read_bytes() for name, path in files.items()})
    except (OSError, UnicodeError) as error:
        raise WorkflowError(f"{harbor.folder}/solution does not fit into the container: {error}") from error
    for start in range(0, len(programs), _GROUP):
        changed = await container.execute(["/bin/chmod", "755", *programs[start : start + _GROUP]])
        if not changed.is_success:
            raise WorkflowError(f"{harbor.folder}/solution: chmod 755: {end_of_output(changed)}")
    seconds = harbor.agent_timeout_s or SOLUTION_S
    argv = script_argv(f"/solution/{_SCRIPT}")
    return await container.execute(argv, environment=harbor.solution_env, timeout_s=seconds)


def _bad_end(result: Result, harbor: HarborTask) -> str:
    """Return why a solution did not end well, or nothing."""
    if result.is_success:
        return ""
    if result.ended is Ending.TIMEOUT:
        said = "is not set" if harbor.agent_timeout_s is None else "of its task.toml"
        end = f"was interrupted after {harbor.agent_timeout_s or SOLUTION_S:g} s (agent.timeout_sec {said})"
    elif result.ended is Ending.EXITED:
        end = f"ended with exit status {result.exit_status}"
    elif result.ended in _FIELDS:
        end = f"reached limits.{_FIELDS[result.ended]} of workflow_args"
    else:
        end = f"was ended by {signal_name(result.signal)}"
    return f"solution/{_SCRIPT} {end}, and said: {end_of_output(result)}"
