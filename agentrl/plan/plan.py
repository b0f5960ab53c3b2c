"""The plan of a run: everything that follows from its file, the model's config.json and this machine, derived once.

Invariant: a plan needs neither weights nor a GPU, and it starts nothing. It is made before anything starts, and whatever
starts the run, prints it or simulates it takes the plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agentrl.config import RunConfig
from agentrl.config.route import Route
from agentrl.plan.memory import RunMemory, adapter_problems, run_memory
from agentrl.plan.mesh import mesh_problems, with_mesh
from agentrl.plan.model import ModelFacts, model_of, pattern_problems
from agentrl.plan.places import missing_gpus, shared_gpus, trainer_gpus
from agentrl.plan.splits import Split, TimedSplit, split_of, split_planner
from agentrl.processes.machine import free_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A resolved run and what follows from it."""

    run: RunConfig
    """The run, with numbers in place of each `auto` of its split and of its mesh."""
    model: ModelFacts
    route: Route
    """The way of weights to the servers."""
    memory: RunMemory | None
    """None: the shape of the model is unknown."""
    split: Split | None
    """None: the run file has no `cluster.split`."""
    splits: tuple[TimedSplit, ...]
    """The feasible splits, the shortest step first."""
    gpu: str | None
    """This machine's GPU, a key of the data sheets; None: unknown, or the run file has no `cluster.split`."""
    shared_gpus: tuple[int, ...]
    """GPUs of both the trainer and launched servers."""
    missing_gpus: tuple[str, ...]
    """Fields that ask for GPUs that this machine lacks."""
    problems: tuple[str, ...]
    """Faults on any machine, each with its field and the fix: a model or a mesh that the trainer refuses."""


def plan_run(run: RunConfig, root: Path = Path("/"), *, resumes: bool = False) -> Plan:
    """Return the plan of a run.

    One that `resumes` keeps or corrects the split that it last had. `root` holds the files that tell this machine's GPUs.

    Raises:
        ConfigError: the GPUs are unknown or too few, no mesh fits, or a field contradicts the split.
    """
    model = model_of(run.model)
    gpu, splits = None, ()
    if run.cluster.split is None:
        run = with_mesh(run, model, root)
    else:
        planner = split_planner()
        gpu, (run, splits) = planner.local_gpu(root), planner.resolve_run(run, model, root, resumes=resumes)
    route = run.route
    on_cpu, sends = trainer_gpus(run.trainer, run.inference, root) == 0, route.method == "distributed"
    memory = None
    if model.shape is not None:
        memory = run_memory(run, model.shape, free_memory(), trains_on_cpu=on_cpu, sends=sends)
    return Plan(
        run=run,
        model=model,
        route=route,
        memory=memory,
        split=None if run.cluster.split is None else split_of(run),
        splits=splits,
        gpu=gpu,
        shared_gpus=shared_gpus(run),
        missing_gpus=tuple(missing_gpus(run, root)),
        problems=(
            *model.problems(run.inference.context_limit),
            *mesh_problems(run.trainer, model),
            *adapter_problems(run.trainer, model.shape),
            *_served_adapter_problems(run, model),
            *pattern_problems(run.trainer.trainable, run.model),
        ),
    )


def _served_adapter_problems(run: RunConfig, model: ModelFacts) -> list[str]:
    if run.sync.adapter != "adapter" or run.inference.backend != "embedded" or model.own_forward:
        return []
    return [
        f"sync.adapter: the embedded server computes a {model.architecture} model with transformers' module, which takes no "
        "adapter beside the weights; set sync.adapter: merged, or inference.backend: sglang"
    ]
