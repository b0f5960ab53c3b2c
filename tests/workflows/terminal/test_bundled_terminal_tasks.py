"""Each bundled terminal task pays its oracle, and neither an agent that does nothing nor two that get it wrong."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from agentrl_sandbox.containers import open_containers
from agentrl_sandbox.harbor.task import read_harbor_folder
from agentrl_workflows.terminal_tasks.catalog import bundled_problems, terminal_tasks
from agentrl_workflows.terminal_tasks.problem import Problem
from tests.support.terminal import play_script

pytestmark = [pytest.mark.anyio]
LEVELS = (1, 2, 3, 4)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def test_there_are_forty_tasks_at_four_levels_with_names_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tasks = terminal_tasks()
    levels = Counter(task["level"] for task in tasks)
    assert len(tasks) >= 40
    assert len({task["question"] for task in tasks}) == len(tasks)
    assert set(levels) == set(LEVELS)
    assert min(levels.values()) >= 8
    assert {task.id for task in terminal_tasks([2])} == {task.id for task in tasks if task["level"] == 2}


@pytest.mark.starts
@pytest.mark.parametrize(
    "problem",
    [
        pytest.param(problem, id=problem.name, marks=pytest.mark.long if at >= 2 else ())
        for level in LEVELS
        for at, problem in enumerate(problem for problem in bundled_problems() if problem.level == level)
    ],
)
async def test_only_the_oracle_is_paid(problem: Problem, tmp_path: Path) -> None:
    folder = problem.write(tmp_path)
    solution = (folder / "solution" / "solve.sh").read_text()
    assert problem.ask.strip() == read_harbor_folder(folder).instruction
    async with open_containers(images={"debian:12": None}) as containers:
        verdicts = [await play_script(containers, folder, script) for script in (solution, "", *problem.wrong)]
    assert [(verdict.reward, verdict.broken) for verdict in verdicts] == [(1.0, ""), (0.0, ""), (0.0, ""), (0.0, "")]
