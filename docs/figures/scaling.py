"""Draw how simulated throughput grows with GPUs, asynchronous and synchronous, at two generation lengths.

.venv/bin/python -m docs.figures.scaling        (about three minutes; prints the table of docs/scaling.md)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from rich.console import Console

from agentrl.plan.model import read_model
from agentrl_simulate.costs import AssumedUse, CostModel, Fleet, ModelSize, RunShape, gpu_costs
from agentrl_simulate.outcome import SimulatedRun
from agentrl_simulate.play import play_run
from agentrl_simulate.predict import Cluster, cluster_splits
from agentrl_simulate.workload import LognormalSource
from docs.figures.style import ASSETS, INK, QUIET, VERSIONS, save

MODEL, GPU = "Qwen3-8B", "h100"
GPUS = (32, 64, 128, 256, 512)
GROUPS, GROUP_SIZE = 512, 16
LENGTHS = {16_384: 6_000, 32_768: 12_000}
"""Mean output tokens by the most that an answer may have."""
SPREAD, CONTEXT = 0.8, 512
STALENESS = 4


@dataclass(frozen=True, slots=True)
class Point:
    """Both ways of running on the same GPUs."""

    gpus: int
    train: int
    """Of these, trainer GPUs of the asynchronous run."""
    asynchronous: SimulatedRun
    synchronous: SimulatedRun

    @property
    def ratio(self) -> float:
        """Throughput of the asynchronous run over that of the synchronous one."""
        return self.asynchronous.trained_tokens_per_s / self.synchronous.trained_tokens_per_s


def costs_of(mean_tokens: float) -> CostModel:
    """Return the default costs of the model."""
    shape = read_model(MODEL).shape
    assert shape is not None
    size = ModelSize(
        parameters=shape.num_parameters,
        kv_bytes_per_token=shape.kv_bytes(2),
        attention_width=shape.layers * shape.heads * shape.head_dim,
    )
    return gpu_costs(GPU, size, AssumedUse(mean_tokens=mean_tokens + CONTEXT, checkpointing=True))


def play_point(gpus: int, longest: int, mean: int) -> Point:
    """Return the asynchronous run on the formula's best split, and the synchronous one that shares all GPUs in turn."""
    costs = costs_of(mean)
    source = LognormalSource(mean_tokens=mean, spread=SPREAD, max_tokens=longest, context_tokens=CONTEXT)
    requests = costs.server.requests or 1
    slots = min(requests * gpus, 2 * GROUPS * GROUP_SIZE)
    shape = RunShape(steps=8, group_size=GROUP_SIZE, groups_per_step=GROUPS, max_staleness=STALENESS, slots=slots)
    cluster = Cluster(gpus=gpus, train_sizes=range(4, gpus, 4), server_gpus=1)
    split = cluster_splits(cluster, shape, costs, source)[0].split
    asynchronous = play_run(shape, cluster.fleet(split), costs, source, warm_up=4)
    together = Fleet(servers=gpus, trainer_gpus=gpus)
    in_turn = RunShape(steps=3, group_size=GROUP_SIZE, groups_per_step=GROUPS, max_staleness=0, slots=slots)
    return Point(gpus, split.train, asynchronous, play_run(in_turn, together, costs, source, warm_up=1))


def main(folder: Path = ASSETS) -> None:
    """Write `scaling.svg` into `folder` and print the table."""
    figure, both = plt.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)
    console = Console(width=200)
    console.print("| longest | GPUs | train + serve | asynchronous, tokens/s | synchronous, tokens/s | ratio | staleness |")
    console.print("|---|---|---|---|---|---|---|")
    for axes, (longest, mean) in zip(both, LENGTHS.items(), strict=True):
        points: list[Point] = []
        for gpus in GPUS:
            point = play_point(gpus, longest, mean)
            points.append(point)
            run = point.asynchronous
            console.print(
                f"| {longest} | {gpus} | {point.train} + {gpus - point.train} | {run.trained_tokens_per_s:,.0f} | "
                f"{point.synchronous.trained_tokens_per_s:,.0f} | {point.ratio:.2f} | {run.mean_staleness:.1f} |"
            )
        _draw(axes, longest, points)
    save(figure, "scaling", folder)
    plt.close(figure)


def _draw(axes: Axes, longest: int, points: list[Point]) -> None:
    gpus = [point.gpus for point in points]
    first = points[0].asynchronous.trained_tokens_per_s / points[0].gpus
    axes.plot(gpus, [first * count / 1e3 for count in gpus], color=QUIET, linestyle=":", label="linear")
    for name, color, runs in (
        ("asynchronous", VERSIONS[0], [point.asynchronous for point in points]),
        ("synchronous", VERSIONS[3], [point.synchronous for point in points]),
    ):
        axes.plot(gpus, [run.trained_tokens_per_s / 1e3 for run in runs], color=color, marker="o", label=name)
    for point in points:
        axes.annotate(
            f"{point.ratio:.1f}x",
            (point.gpus, point.asynchronous.trained_tokens_per_s / 1e3),
            textcoords="offset points",
            xytext=(0, 6),
            fontsize=8,
            color=INK,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(gpus, [str(count) for count in gpus])
    axes.set_xlabel("GPUs", color=INK)
    axes.set_ylabel("thousand trained tokens/s", color=INK)
    axes.set_title(f"answers of at most {longest} tokens", loc="left", fontsize=10, color=INK)
    axes.legend(frameon=False, fontsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


if __name__ == "__main__":
    main()
