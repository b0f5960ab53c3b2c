"""The basis of a prediction: costs and episodes, assumed from data sheets or fitted to a run, and the meshes that fit.

Invariant: only files are read. The text of a basis names what was measured and what is assumed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agentrl.commands.open_run import open_run
from agentrl.config import RunConfig
from agentrl.errors import ConfigError
from agentrl.inference.config import CPU_THREADS, runs_on_cpu
from agentrl.plan.memory import gpus_per_server, running_requests, server_memory, trained_parameters
from agentrl.plan.mesh import mesh_choice
from agentrl.plan.model import ModelFacts
from agentrl.plan.splits import DEFAULT_GPU
from agentrl.trainer.config import ParallelConfig
from agentrl_simulate.costs import (
    GPUS,
    SERVER_MEMORY_SHARE,
    AssumedUse,
    CostModel,
    ModelSize,
    fleet_of_run,
    gpu_costs,
    gpu_sheet,
    shape_of_run,
)
from agentrl_simulate.fitting import MeasuredMachines, fit_run
from agentrl_simulate.workload import EpisodeSource, LognormalSource

ASSUMED_SPREAD = 0.8
"""Standard deviation of the logarithm of an episode's length, where no run has been measured."""
ASSUMED_SHARE = 1 / 3
"""Mean output tokens of an episode over the most that the run file allows, where no run has been measured."""
ASSUMED_CONTEXT = 256
"""Context tokens of a turn, where no run has been measured."""


@dataclass(frozen=True, slots=True)
class Basis:
    """Costs and episodes."""

    costs: CostModel
    source: EpisodeSource
    episodes: str
    """Source of the episodes, for people."""


def local_gpu(root: Path = Path("/")) -> str | None:
    """Return the key in `GPUS` of this machine's first GPU, by the files of its driver; None where it is unknown."""
    for file in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        text = file.read_text(errors="replace").lower()
        return next((name for name in GPUS if name in text), None)
    return None


def fitted_basis(run: RunConfig, folder: Path, seed: int) -> Basis:
    """Return the costs and the episodes of a finished run.

    Raises:
        ConfigError: it has too few steps, or its records are gone.
    """
    measured = open_run(folder).config
    if measured is None:
        raise ConfigError(f"{folder} has no config.yaml, which names the servers of the run; choose another run for --from")
    fitted = fit_run(folder, measured_machines(measured), shape_of_run(measured))
    count = sum(map(len, fitted.groups.values()))
    return Basis(
        fitted.costs,
        fitted.source(retries=run.rollout.episode_retries, seed=seed),
        f"{count} recorded ones of {len(fitted.groups)} groups, drawn again; the fit is off by {fitted.call_error:.0%} of a "
        "model call",
    )


def measured_machines(run: RunConfig) -> MeasuredMachines:
    """Return the machines of a run; its parts share cores where all of them compute on this machine's CPU."""
    fleet, inference = fleet_of_run(run), run.inference
    on_cpu = run.trainer.device == "cpu" and (runs_on_cpu(inference) or inference.device == "cpu")
    here = run.cluster.launcher == "local" and run.rollout.runner == "local" and not inference.urls
    return MeasuredMachines(
        servers=fleet.servers,
        requests=running_requests(inference),
        server_gpus=gpus_per_server(run.inference),
        trainer_gpus=fleet.trainer_gpus,
        rereads_context=run.resolved_inference.pause_mode == "exact",
        shares_cores=on_cpu and here,
        server_threads=CPU_THREADS,
        trainer_threads=run.trainer.threads,
    )


def assumed_basis(
    run: RunConfig, model: ModelFacts, gpu: str = DEFAULT_GPU, *, output_tokens: int | None = None, seed: int = 0
) -> Basis:
    """Return the costs of a GPU's data sheet, and lognormal episodes, for a `run` whose mesh has numbers.

    `output_tokens` is the mean of an episode; None: a third of the most that the run file allows.

    Raises:
        ConfigError: the model's shape or the GPU is unknown, or a server has no room for the model.
    """
    shape = model.shape
    if shape is None:
        raise ConfigError(
            f"model.path: the shape of {run.model.path} is unknown here, so there are no default costs; put its config.json "
            "there, or fit a run with --from"
        )
    turns = run.rollout.max_turns or 1
    longest = run.rollout.max_episode_tokens or turns * run.sampling.max_tokens
    mean = output_tokens or max(1, round(longest * ASSUMED_SHARE))
    mesh = run.trainer.parallel.shape
    source = LognormalSource(
        mean_tokens=mean,
        spread=ASSUMED_SPREAD,
        max_tokens=max(longest, mean),
        context_tokens=ASSUMED_CONTEXT,
        turns=turns,
        seed=seed,
    )
    costs = gpu_costs(
        gpu,
        ModelSize(
            parameters=shape.num_parameters,
            kv_bytes_per_token=shape.kv_bytes(2),
            attention_width=shape.layers * shape.heads * shape.head_dim,
            adapter_parameters=0 if run.trainer.lora is None else trained_parameters(run.trainer, shape),
        ),
        AssumedUse(
            mean_tokens=mean + turns * ASSUMED_CONTEXT,
            server_gpus=gpus_per_server(run.inference),
            sample_gpus=mesh.cp * mesh.tp,
            checkpointing=run.trainer.gradient_checkpointing,
            requests=run.inference.max_running_requests,
            served_adapters=run.served_adapters,
        ),
    )
    episodes = (
        f"assumed: lognormal, mean {mean} output tokens, at most {longest}, spread {ASSUMED_SPREAD}, in {turns} "
        f"turn{'s' if turns > 1 else ''}"
    )
    return Basis(costs, source, episodes)


def splittable_meshes(run: RunConfig, model: ModelFacts, total: int, gpu: str) -> dict[int, ParallelConfig]:
    """Return the mesh for each number of trainer GPUs that fits and leaves a server of `total` GPUs.

    None fits where a server has no room for the weights, or the shape of the model is unknown.
    """
    memory = gpu_sheet(gpu).memory
    if model.shape is None or server_memory(run, model.shape).fixed > SERVER_MEMORY_SHARE * memory:
        return {}
    return mesh_choice(run, model).that_fit(total - gpus_per_server(run.inference), memory)
