"""Makes the folder of a task from two commits, and proves it: the oracle is paid, and an agent that does nothing is not.

Invariant: tests count as they behave in the containers of training: a test must pass in two runs over the second commit.
What passes there and fails over the first commit has to be fixed, and what passes over both has to stay.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import msgspec

from agentrl.errors import ConfigError
from agentrl_sandbox.containers import Containers, Workbench, open_containers
from agentrl_sandbox.containers.workbench import CONTAINER_LIMITS
from agentrl_sandbox.harbor.task import read_harbor_folder
from agentrl_workflows.terminal.benches import TaskBenches
from agentrl_workflows.terminal.oracle import run_solution
from agentrl_workflows.terminal.scripts import end_of_output
from agentrl_workflows.terminal.verifier import kept_paths, run_tests
from agentrl_workflows.terminal_commits.commits import History
from agentrl_workflows.terminal_commits.folder import CommitTask, TaskOptions

_OUTCOMES: Final = "/logs/verifier/outcomes.json"
_MAX_OUTCOMES: Final = 8 * 2**20
_LIMITS: Final = CONTAINER_LIMITS.model_copy(update={"wall_s": 1800.0})


class _Outcomes(msgspec.Struct, frozen=True):
    outcomes: dict[str, str]
    log: str


@dataclass(frozen=True, slots=True)
class MadeTask:
    """What became of two commits."""

    folder: Path
    to_fix: int
    to_keep: int
    left_out: int
    """Tests of the second commit that do not pass there each time."""


async def make_task(
    repository: Path, before: str, after: str, folder: Path, options: TaskOptions, *, root: str | None = None
) -> MadeTask:
    """Write the task to `folder`, which does not exist yet.

    Args:
        repository: a local git repository.
        before: the commit that the agent gets.
        after: the commit whose tests judge, and whose sources are the oracle.
        folder: of the task.
        options: what the commits do not say.
        root: folder of the unpacked image; None: the programs of this machine.

    Raises:
        ConfigError: the commits cannot make a task; the message says what is missing.
    """
    task = _read(repository, before, after, folder, options)
    with TemporaryDirectory(prefix="agentrl-commits-") as place:
        made = Path(place) / "task"
        async with open_containers(images={options.image: root}) as containers:
            task.write(made, {})
            required, left_out = await _required(containers, made)
            shutil.rmtree(made)
            task.write(made, required)
            await _prove(containers, made)
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(made, folder)
    fixed = sum(outcome != "passed" for outcome in required.values())
    return MadeTask(folder, fixed, len(required) - fixed, left_out)


def _read(repository: Path, before: str, after: str, folder: Path, options: TaskOptions) -> CommitTask:
    if folder.exists():
        raise ConfigError(f"{folder}: expected the name of a folder that does not exist yet")
    history = History(repository)
    task = CommitTask(history, history.commit(before), history.commit(after), options)
    if not task.sources():
        raise ConfigError(f"{repository}: {before} and {after} differ in no source; which paths are tests is --tests")
    return task


async def _required(containers: Containers, folder: Path) -> tuple[Mapping[str, str], int]:
    """Return the tests that must pass, with their outcome before, and how many pass in no or only some runs after."""
    before = await _survey(containers, folder, solved=False)
    runs = [await _survey(containers, folder, solved=True) for _ in range(2)]
    names = {name for run in runs for name in run.outcomes}
    passing = {name for name in names if all(run.outcomes.get(name) == "passed" for run in runs)}
    if not passing:
        raise ConfigError(f"no test passes over the second commit; the end of what they say:\n{runs[0].log}")
    required = {name: "passed" if before.outcomes.get(name) == "passed" else "failed" for name in passing}
    if "failed" not in required.values():
        raise ConfigError(f"each of the {len(passing)} tests of the second commit passes over the first one already")
    return required, len(names) - len(passing)


async def _survey(containers: Containers, folder: Path, *, solved: bool) -> _Outcomes:
    harbor = read_harbor_folder(folder)
    async with TaskBenches(containers).opened(harbor, _LIMITS) as bench:
        await _work(bench, folder, solved=solved)
        await bench.keep(kept_paths(await bench.changed(), harbor))
        verdict = await run_tests(bench, harbor, _LIMITS)
        try:
            return msgspec.json.decode(await bench.read(_OUTCOMES, max_bytes=_MAX_OUTCOMES), type=_Outcomes)
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(f"the tests wrote no outcomes ({error}): {verdict.broken}") from error


async def _prove(containers: Containers, folder: Path) -> None:
    """Raise ConfigError unless the oracle is paid in full, and an agent that does nothing earns nothing."""
    harbor = read_harbor_folder(folder)
    for solved, expected in ((True, 1.0), (False, 0.0)):
        async with TaskBenches(containers).opened(harbor, _LIMITS) as bench:
            await _work(bench, folder, solved=solved)
            await bench.keep(kept_paths(await bench.changed(), harbor))
            verdict = await run_tests(bench, harbor, _LIMITS)
        if verdict.broken or verdict.reward != expected:
            who = "the oracle" if solved else "an agent that does nothing"
            raise ConfigError(f"{who} earned {verdict.reward:g} instead of {expected:g}: {verdict.broken or 'tests differ'}")


async def _work(bench: Workbench, folder: Path, *, solved: bool) -> None:
    harbor = read_harbor_folder(folder)
    async with bench.run(directory=harbor.image.workdir, limits=_LIMITS) as container:
        if not solved:
            return
        result = await run_solution(container, harbor)
        if not result.is_success:
            raise ConfigError(f"the patch of the sources does not apply: {end_of_output(result)}")


def made_line(made: MadeTask) -> str:
    """Return what was made, as one line."""
    return json.dumps(
        {"folder": str(made.folder), "to_fix": made.to_fix, "to_keep": made.to_keep, "left_out": made.left_out}
    )
