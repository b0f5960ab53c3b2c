"""The run files of coding CLIs: they load, and hidden tests pay for the patch of each task and for nothing else."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from agentrl.config import load_config
from agentrl.config.yaml import load_yaml
from agentrl.data.load import load_tasks
from agentrl.plan.plan import plan_run
from agentrl.plan.text import describe_plan
from agentrl.types import Task
from agentrl.workflow import load_workflow
from agentrl_sandbox import open_sandbox
from agentrl_testing import play
from agentrl_workflows.command import Work
from agentrl_workflows.repositories import load_repository_tasks, repository_tasks
from agentrl_workflows.repositories.grading import hidden_tests
from agentrl_workflows.repositories.project import files_as_bytes
from tests.support.sandboxes import usable_host

ROOT = Path(__file__).parents[2]
FOLDER = "examples/coding_clis/tasks"
RUNS = sorted((ROOT / "examples" / "coding_clis").glob("*.yaml"))


@pytest.fixture(autouse=True)
def _at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_a_run_file_is_a_run_whose_tasks_hide_their_tests(path: Path) -> None:
    run = load_config(path)
    assert "agentrl_workflows.command" in describe_plan(plan_run(run))
    settings = load_yaml(path.read_text())["workflow"]
    for task in load_tasks(run.tasks).evaluation:
        assert task.data.keys() - set(settings["hide"]) == {"question"}
    assert load_workflow(run.workflow, run.workflow_args).sandbox_config is not None  # pyright: ignore


@pytest.mark.starts
def test_the_patches_alone_pass_the_hidden_tests_and_what_a_cli_leaves_beside_them_does_not_count() -> None:
    usable_host()
    tasks = {task.id.removeprefix("repository-"): task for task in repository_tasks(FOLDER)}

    async def grade() -> list[float]:
        found: list[float] = []
        async with open_sandbox() as sandbox:
            for each in load_repository_tasks(FOLDER):
                beside = {"task.json": b"{}", ".codex/notes": b"x", "solution.py": b"raise SystemExit"}
                beside |= {f"many/{number}.txt": b"" for number in range(300 if each.name == "slugs" else 3)}
                for files in (each.files, each.patched()):
                    work = Work({**beside, **files_as_bytes(files)}, sandbox)
                    found.append(await hidden_tests("", tasks[each.name], work))
        return found

    assert anyio.run(grade) == [0.0, 1.0] * 3


@pytest.mark.starts
def test_a_program_mends_a_project_in_the_sandbox_and_the_hidden_tests_pay() -> None:
    usable_host()
    run = load_config(ROOT / "examples" / "coding_clis" / "codex.yaml")
    task = next(task for task in repository_tasks(FOLDER) if task.id == "repository-intervals")
    mends = (
        "test ! -e tests && ! grep -q calls task.json && sed -i 's/, last)$/, max(found[-1][1], last))/' calendar_days.py"
    )
    for script, reward in ((mends, 1.0), ("true", 0.0)):
        workflow = load_workflow(run.workflow, {**run.workflow_args, "command": ["sh", "-c", script], "no_call": "allow"})
        found = play(workflow, Task(id=task.id, data=task.data), [])
        assert found.failure is None, found.failure
        assert found.final_reward == reward
