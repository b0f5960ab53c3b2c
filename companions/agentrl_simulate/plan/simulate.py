"""`agentrl simulate`: predict step time, utilization and staleness of a run on other machines, and what to change.

Invariant: nothing of the run starts; only files are read. What was measured and what is assumed is printed with the result.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from agentrl.config import RunConfig
from agentrl.errors import ConfigError
from agentrl.plan.memory import gpus_per_server
from agentrl.plan.mesh import with_mesh
from agentrl.plan.model import ModelFacts, model_of
from agentrl.plan.splits import DEFAULT_GPU, Split
from agentrl_simulate.costs import CostModel, HostCost, RunShape, UpdateCost, fleet_of_run, shape_of_run
from agentrl_simulate.outcome import SimulatedStep
from agentrl_simulate.plan.basis import assumed_basis, fitted_basis, splittable_meshes
from agentrl_simulate.plan.split import resolve_run, with_best_mesh
from agentrl_simulate.predict import (
    AdvisedChange,
    Cluster,
    Prediction,
    advise_changes,
    chosen_splits,
    cluster_splits,
    count_changes,
    describe_bottleneck,
    describe_driver,
    predict_splits,
)

DEFAULT_STEPS = 24
"""Training steps that a simulation plays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOrder:
    """The order of `agentrl simulate`."""

    gpus: int | None = None
    """GPUs to split; None: those of the run file."""
    ratio: float | None = None
    """GPUs that serve for each one that trains; None: the best that are found."""
    fitted_from: Path | None = None
    """Directory of a finished run to fit; None: the defaults of a GPU."""
    gpu: str = DEFAULT_GPU
    """The GPU of the defaults."""
    output_tokens: int | None = None
    """Mean output tokens of an episode, without a run to fit; None: a third of the most that the run file allows."""
    steps: int = DEFAULT_STEPS
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationReport:
    """The predictions, the best first, and what they rest on."""

    shape: RunShape
    costs: CostModel
    episodes: str
    """Source of the episodes, for people."""
    predictions: Sequence[Prediction]
    bottleneck: str
    """Of the first prediction."""
    driver: str | None
    """A warning that one driver process is not enough."""
    advice: Sequence[AdvisedChange]

    def as_json(self) -> dict[str, Any]:
        return {
            "settings": asdict(self.shape),
            "costs": asdict(self.costs),
            "episodes": self.episodes,
            "predictions": [_prediction_json(one) for one in self.predictions],
            "bottleneck": self.bottleneck,
            "driver": self.driver,
            "advice": [asdict(change) for change in self.advice],
        }


def parse_ratio(text: str) -> float:
    """Return the ratio of `3:1`, GPUs that serve to GPUs that train.

    Raises:
        ConfigError: it is no ratio of positive numbers.

    Example:
        >>> parse_ratio("3:1")
        3.0
    """
    serving, colon, training = text.partition(":")
    if not (colon and serving.isdecimal() and training.isdecimal() and int(serving) and int(training)):
        raise ConfigError(f"--split: expected GPUs that serve to GPUs that train, such as 3:1, got {text!r}")
    return int(serving) / int(training)


def _resolved(run: RunConfig, model: ModelFacts) -> RunConfig:
    return with_mesh(run, model) if run.cluster.split is None else resolve_run(run, model).run


def simulate_file(run: RunConfig, order: SimulationOrder) -> SimulationReport:
    """Return the prediction for a run.

    Raises:
        ConfigError: the model's shape, the run to fit or a GPU is unknown, or nothing fits on the GPUs.
    """
    for name, number in (("--gpus", order.gpus), ("--steps", order.steps), ("--output-tokens", order.output_tokens)):
        if number is not None and number < 1:
            raise ConfigError(f"{name}: expected at least 1, got {number}")
    model = model_of(run.model)
    run = _resolved(run, model) if order.gpus is None else with_best_mesh(run, model, order.gpus, order.gpu)
    shape = shape_of_run(run.model_copy(update={"engine": run.engine.model_copy(update={"steps": 1_000_000})}), order.steps)
    shape = replace(shape, total_steps=None)
    if order.fitted_from is None:
        basis = assumed_basis(run, model, order.gpu, output_tokens=order.output_tokens, seed=order.seed)
    else:
        basis = fitted_basis(run, order.fitted_from, order.seed)
    cluster, ratio = _cluster(run, model, order)
    splits = chosen_splits(cluster_splits(cluster, shape, basis.costs, basis.source), ratio)
    first, *_ = splits
    with _step_bar(order.steps * (len(splits) + count_changes(first.split, cluster, shape))) as on_step:
        predictions = predict_splits(cluster, shape, basis.costs, basis.source, ratio=ratio, on_step=on_step)
        best = predictions[0]
        advice = advise_changes(best.split, cluster, shape, basis.costs, basis.source, best.run, on_step=on_step)
    return SimulationReport(
        shape=shape,
        costs=basis.costs,
        episodes=basis.episodes,
        predictions=predictions,
        bottleneck=describe_bottleneck(best.run, shape),
        driver=describe_driver(best.run),
        advice=advice,
    )


def describe_simulation(report: SimulationReport) -> str:
    """Return the report as a table, the bottleneck of its first row, and advice."""
    costs, shape = report.costs, report.shape
    server = costs.server
    requests = "any number of" if server.requests is None else f"at most {server.requests}"
    lines = [
        f"costs      {costs.origin}",
        f"server     {server.tokens_per_s:.0f} tokens/s saturated, half of it with {server.half_saturation:.0f} requests, "
        f"{requests} requests together, {server.gpus} GPU{'s' if server.gpus > 1 else ''} each",
        f"trainer    {costs.trainer.gpu_s_per_token * 1e6:.3g} GPU microseconds for a token, and "
        f"{costs.trainer.fixed_s:.2g} s a step",
        *_update_row(costs.update, shape),
        *_cores_row(costs.host),
        f"episodes   {report.episodes}",
        f"played     {shape.steps} steps of {shape.groups_per_step} groups of {shape.group_size}, max_staleness "
        f"{shape.max_staleness}, {shape.slots} episodes at once",
        "",
        "train  serve    step s  trained tok/s  servers  trainer  staleness mean  max   formula s",
    ]
    for one in report.predictions:
        run, split = one.run, one.split
        lines.append(
            f"{split.train:>5}  {split.rollout:>5}  {run.step_s:>8.2f}  {run.trained_tokens_per_s:>13.0f}  "
            f"{run.server_share:>7.0%}  {run.trainer_share:>7.0%}  {run.mean_staleness:>14.2f}  {run.max_staleness:>3}  "
            f"{one.timed.slower_s:>10.2f}"
        )
    lines += ["", report.bottleneck, *([report.driver] if report.driver else [])]
    lines += [f"- {change}" for change in report.advice] or ["No change that was played helps by more than 5 %."]
    return "\n".join(lines)


def _update_row(update: UpdateCost, shape: RunShape) -> list[str]:
    if not update.num_bytes:
        return []
    calls = "keep their adapter within the staleness bound" if shape.pins_calls else "continue with the new version"
    times = f"in {update.update_s:.2g} s, of which it pauses {update.pause_s:.2g} s"
    return [f"update     {update.num_bytes / 2**20:.0f} MiB to each server {times}; running calls {calls}"]


def _cores_row(host: HostCost) -> list[str]:
    if host.cores is None:
        return []
    return [f"cores      {host.cores} for driver, servers and trainer; {host.turn_s * 1e3:.2g} ms of the driver for a turn"]


def _prediction_json(one: Prediction) -> dict[str, Any]:
    run = one.run
    return {
        "train_gpus": one.split.train,
        "rollout_gpus": one.split.rollout,
        "formula_rollout_s": one.timed.rollout_s,
        "formula_train_s": one.timed.train_s,
        "step_s": run.step_s,
        "trained_tokens_per_s": run.trained_tokens_per_s,
        "server_share": run.server_share,
        "serving_share": run.serving_share,
        "trainer_share": run.trainer_share,
        "bound_share": run.bound_share,
        "slots_share": run.slots_share,
        "mean_staleness": run.mean_staleness,
        "max_staleness": run.max_staleness,
        "staleness_tokens": {str(age): tokens for age, tokens in run.staleness.items()},
        "groups": dict(run.groups),
    }


def _cluster(run: RunConfig, model: ModelFacts, order: SimulationOrder) -> tuple[Cluster, float | None]:
    """Return the GPUs to split, and the ratio to play; without `--gpus`, the split of the run file."""
    server_gpus, fleet = gpus_per_server(run.inference), fleet_of_run(run)
    split = Split(train=fleet.trainer_gpus, rollout=fleet.servers * server_gpus)
    total, ratio = order.gpus or split.total, order.ratio
    sizes = _train_sizes(run, model, total, order.gpu)
    if order.gpus is None and ratio is None:
        sizes, ratio = sorted({*sizes, split.train}), split.rollout / split.train
    return Cluster(gpus=total, train_sizes=sizes, server_gpus=server_gpus), ratio


def _train_sizes(run: RunConfig, model: ModelFacts, total: int, gpu: str) -> list[int]:
    """Return the numbers of trainer processes that form a mesh and, where the model has a shape and runs on GPUs, fit."""
    on_gpus = run.inference.backend == "sglang" and run.trainer.device != "cpu"
    if on_gpus and model.shape is not None:
        return list(splittable_meshes(run, model, total, gpu))
    mesh = run.trainer.parallel.shape
    others = mesh.world // mesh.dp
    return list(range(others, total, others))


@contextmanager
def _step_bar(total: int) -> Generator[Callable[[SimulatedStep], None]]:
    """Show the simulated steps on standard error when that is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("simulated steps"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
    task = bar.add_task("steps", total=total)

    def on_step(_step: SimulatedStep) -> None:
        with suppress(OSError):  # a terminal that is gone does not end the command
            bar.advance(task)

    with bar:
        yield on_step
