"""`agentrl simulate`: predict a run on a cluster, without the cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from agentrl.commands.running import Overrides, load_run
from agentrl.processes.watchdog.signals import interrupt_note
from agentrl.support.files import json_text
from agentrl_simulate.plan.simulate import SimulationOrder, describe_simulation, parse_ratio, simulate_file


def simulate_command(
    config: Path,
    /,
    *overrides: Overrides,
    gpus: int | None = None,
    split: str | None = None,
    fitted_from: Annotated[Path | None, Parameter(name="--from")] = None,
    gpu: str = "h100",
    output_tokens: int | None = None,
    steps: int = 24,
    json: bool = False,
) -> None:
    """Predict step time, utilization and staleness of a run on a cluster, and what to change, without the cluster.

    Args:
        config: YAML file that describes the run.
        overrides: Fields of the file to override.
        gpus: GPUs to split between trainer and servers; the default is the split of the file.
        split: Play only this split: GPUs that serve to GPUs that train, such as 3:1.
        fitted_from: Directory of a finished run whose speeds and episodes are used; without it, the defaults of --gpu.
        gpu: The GPU whose data sheet gives the defaults: a100, h100, h200, b200 or l40s.
        output_tokens: Mean output tokens of an episode, without --from; the default is a third of what the file allows.
        steps: Training steps to play.
        json: Print JSON instead of a table.
    """
    order = SimulationOrder(
        gpus=gpus,
        ratio=None if split is None else parse_ratio(split),
        fitted_from=fitted_from,
        gpu=gpu,
        output_tokens=output_tokens,
        steps=steps,
    )
    with interrupt_note(lambda: "A simulation leaves nothing behind."):
        report = simulate_file(load_run(config, overrides), order)
    print(json_text(report.as_json()) if json else describe_simulation(report))
