"""The run files of the bundled workflows are valid: they plan, their tasks load, and only a model is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.config import load_config
from agentrl.data.load import load_tasks
from agentrl.plan.checks import missing_here
from agentrl.plan.plan import plan_run
from agentrl.plan.text import describe_plan

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "examples" / "bundled").glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_bundled_run_plans_and_lacks_the_model_only(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    run = load_config(path)
    assert run.workflow.startswith("agentrl_workflows.")
    assert run.workflow in describe_plan(plan_run(run))
    here = ("model.path", "runs_dir")  # the disk of this machine may be too small for checkpoints of such a model
    assert [lack for lack in missing_here(plan_run(run)) if not lack.startswith(here)] == []
    tasks = load_tasks(run.tasks)
    assert {task.id for task in tasks.train.finite}.isdisjoint(task.id for task in tasks.evaluation)
