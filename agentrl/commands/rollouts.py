"""The place where the episodes of a run are played, by `rollout.runner`: this process, or workers.

Invariant: what cannot reach a worker unchanged is refused before anything starts.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from agentrl.config import RunConfig
from agentrl.data.load import TaskSets
from agentrl.plan.places import num_workers as num_workers
from agentrl.rollout.episode import LocalRunner, PolicyRunner
from agentrl.rollout.remote.frames import WorkerSetup, pack_task
from agentrl.rollout.remote.runner import RemoteRunner, ray_nodes, this_machine
from agentrl.tokens.renderer import Renderer
from agentrl.workflow import RolloutWorkflow


def make_runner(
    run: RunConfig, workflow: RolloutWorkflow, renderer: Renderer, *, model: Path | str, log_dir: Path
) -> PolicyRunner:
    """Return what plays the episodes of a run."""
    if run.rollout.runner == "local":
        return LocalRunner(workflow, renderer=renderer, rollout=run.rollout, seed=run.seed)
    setup = WorkerSetup(
        name="",
        directory=str(Path.cwd()),
        workflow=run.workflow,
        workflow_args=json.dumps(run.workflow_args),
        model=str(Path(model).absolute()),
        template_options=json.dumps(run.sampling.template_options),
        max_context=renderer.max_context,
        tool_format=run.sampling.tool_format,
        rollout=run.rollout.model_dump_json(),
        seed=run.seed,
        stall_timeout_s=run.engine.stall_timeout_s,
    )
    nodes = this_machine if run.rollout.runner == "processes" else partial(ray_nodes, run.cluster)
    return RemoteRunner(setup, num_workers=num_workers(run.rollout), nodes=nodes, log_dir=log_dir)


def check_tasks_travel(run: RunConfig, tasks: TaskSets) -> None:
    """Check that the tasks of a list can be sent to workers, where the run has any.

    Raises:
        ConfigError: one has a field that would arrive as something else.
    """
    if run.rollout.runner == "local":
        return
    for task in (*tasks.train.finite, *tasks.evaluation):
        pack_task(task)
