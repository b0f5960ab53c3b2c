"""Tasks of several steps: each begins with the files that the one before it left, and has tests of its own.

Invariant: between two steps every process of the agent ends, and the tests of a step see a copy of its files alone. A step
that cannot begin, or whose tests name no reward, counts as 0 and is the last one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from agentrl.errors import EnvironmentFault
from agentrl.types import Task
from agentrl_sandbox.containers import LayerFile, Workbench
from agentrl_sandbox.harbor.task import HarborTask
from agentrl_sandbox.types import Limits
from agentrl_workflows.terminal.verifier import TaskVerdict, TaskVerifier


async def judged_steps(
    bench: Workbench,
    harbor: HarborTask,
    verifier: TaskVerifier,
    play: Callable[[HarborTask], Awaitable[str]],
    limits: Limits,
    judge_limits: Limits,
) -> list[TaskVerdict]:
    """Play the steps of a task in their order, and return what the tests of each say.

    Args:
        bench: of the agent.
        harbor: a task that has steps.
        verifier: judges each.
        play: runs a container for one step; returns why it could not begin, or nothing.
        limits: of the agent's environment.
        judge_limits: of an environment that the tests have for themselves.

    Raises:
        EnvironmentFault: the first step cannot begin.
    """
    verdicts: list[TaskVerdict] = []
    changed: set[str] = set()
    for step in harbor.steps:
        files: dict[str, LayerFile] = {f"{step.image.workdir}/{name}": path for name, path in step.files("workdir").items()}
        if files:
            await bench.add(files)
        if problem := await play(step):
            if not verdicts:
                raise EnvironmentFault(f"{step.key}: {problem}")
            verdicts.append(TaskVerdict(reward=0.0, broken=problem))
            break
        changed |= set(await bench.changed())
        verdict = await verifier.verify_step(bench, step, changed, limits, judge_limits=judge_limits)
        verdicts.append(verdict)
        if verdict.broken or _misses(verdict, step):
            break
    return verdicts


def task_of_step(task: Task, harbor: HarborTask) -> Task:
    """Return what an agent is asked in one step."""
    return Task(id=task.id, data={**task.data, "question": harbor.instruction}) if harbor.step else task


def combined_verdict(harbor: HarborTask, verdicts: Sequence[TaskVerdict]) -> TaskVerdict:
    """Return the verdict over a task by those of its steps: that of the last one, or the mean of all that were played.

    A number that a step does not name is 0 there.
    """
    names = [step.step for step in harbor.steps[: len(verdicts)]]
    broken = "; ".join(f"step {name}: {each.broken}" for name, each in zip(names, verdicts, strict=True) if each.broken)
    worst = min(range(len(verdicts)), key=lambda at: verdicts[at].reward)
    said = f"step {names[worst]}: {verdicts[worst].said}"
    if harbor.is_last_reward:
        return TaskVerdict(reward=verdicts[-1].reward, parts=verdicts[-1].parts, broken=broken, said=said)
    parts = {name for each in verdicts for name in each.parts}
    means = {name: sum(each.parts.get(name, 0.0) for each in verdicts) / len(verdicts) for name in sorted(parts)}
    return TaskVerdict(reward=sum(each.reward for each in verdicts) / len(verdicts), parts=means, broken=broken, said=said)


def _misses(verdict: TaskVerdict, step: HarborTask) -> bool:
    """Return whether a step that has to reach something does not."""
    named = {"reward": verdict.reward, **verdict.parts}
    return any(name not in named or named[name] < least for name, least in step.min_reward.items())
