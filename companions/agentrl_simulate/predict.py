"""Predict a run on several splits of the same GPUs, and find changes that help: the simulator plays what is worth playing.

Invariant: every prediction of one call plays the same episodes with the same costs; only the machines differ. A line of
advice names the field and the value, and gives the gain that the simulator found for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from agentrl.errors import ConfigError
from agentrl.plan.splits import Split, TimedSplit
from agentrl_simulate.costs import CostModel, Fleet, RunShape
from agentrl_simulate.outcome import SimulatedRun, SimulatedStep
from agentrl_simulate.play import play_run
from agentrl_simulate.split import GpuSpeeds, StepDemand, sorted_splits
from agentrl_simulate.workload import EpisodeSource

PLAYED = 3
"""Number of splits, the best of the formula, that the simulator plays."""
USUAL_RATIOS = (3.0, 1.0)
"""GPUs that serve for each one that trains, which are played for comparison."""
_SAMPLED_GROUPS = 64
"""Groups whose episodes give the mean lengths."""
WORTH = 0.05
"""Share of more trained tokens/s from which a change is advised."""
DRIVER_CALL_S = 0.002
"""Processor seconds of the driver for a model call with long contexts, the workflow's own code left out (benchmarks)."""
_MOST_PLAYED = 6
"""Changes that are played at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The GPUs to split, and the parts that fit on them."""

    gpus: int
    train_sizes: Sequence[int]
    """Numbers of trainer GPUs that form a mesh and whose memory is enough."""
    server_gpus: int

    def fleet(self, split: Split) -> Fleet:
        return Fleet(servers=split.rollout // self.server_gpus, trainer_gpus=split.train)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One split, as the formula sees it and as the simulator plays it."""

    timed: TimedSplit
    run: SimulatedRun

    @property
    def split(self) -> Split:
        return self.timed.split


def demand_of(shape: RunShape, source: EpisodeSource) -> StepDemand:
    """Return what a step of these episodes asks for, from the first attempts of some groups."""
    episodes = [source.attempts(group, member)[0] for group in range(_SAMPLED_GROUPS) for member in range(shape.group_size)]
    output = sum(episode.output_tokens for episode in episodes)
    return StepDemand(
        episodes=shape.group_size * shape.groups_per_step,
        output_tokens=output / len(episodes),
        context_tokens=(sum(episode.tokens for episode in episodes) - output) / len(episodes),
        concurrent=min(shape.slots, shape.group_size * shape.groups_per_step * (shape.max_staleness + 1)),
    )


def speeds_of(costs: CostModel) -> GpuSpeeds:
    """Return the numbers of the formula from a cost model."""
    server, trainer, update = costs.server, costs.trainer, costs.update
    measured = trainer.doubling_efficiency ** math.log2(trainer.measured_gpus)
    around = update.spot_check_s + update.publish_s + max(update.update_s, update.pause_s) + update.between_s
    return GpuSpeeds(
        server_tokens_per_s=server.tokens_per_s,
        half_saturation=server.half_saturation,
        server_requests=server.requests,
        context_weight=server.context_weight,
        trainer_tokens_per_s=1 / (trainer.gpu_s_per_token * measured) if trainer.gpu_s_per_token else math.inf,
        doubling_efficiency=trainer.doubling_efficiency,
        sync_s=trainer.fixed_s + around,
    )


def cluster_splits(cluster: Cluster, shape: RunShape, costs: CostModel, source: EpisodeSource) -> list[TimedSplit]:
    """Return the feasible splits of a cluster, the best by the formula first; raises ConfigError where there is none."""
    splits = sorted_splits(
        cluster.gpus,
        demand_of(shape, source),
        speeds_of(costs),
        train_sizes=cluster.train_sizes,
        server_gpus=cluster.server_gpus,
    )
    if not splits:
        least = f"{min(cluster.train_sizes)}" if cluster.train_sizes else "more than there are"
        raise ConfigError(
            f"{cluster.gpus} GPUs cannot be split: the trainer needs {least}, and a server {cluster.server_gpus}; use more "
            "GPUs, a smaller model, or more GPUs for each sample (trainer.parallel)"
        )
    return splits


def nearest_split(splits: Sequence[TimedSplit], ratio: float) -> TimedSplit:
    """Return the feasible split with about `ratio` serving GPUs for each trainer GPU; the most GPUs in use first."""
    return min(splits, key=lambda one: (abs(math.log(one.split.rollout / one.split.train / ratio)), -one.split.total))


def predict_splits(
    cluster: Cluster,
    shape: RunShape,
    costs: CostModel,
    source: EpisodeSource,
    *,
    ratio: float | None = None,
    on_step: Callable[[SimulatedStep], None] = lambda step: None,
) -> list[Prediction]:
    """Return predictions of the promising and the usual splits, the one with the most trained tokens/s first.

    `ratio` asks only for the split with about so many serving GPUs for each trainer GPU.

    Raises:
        ConfigError: no split is feasible.
    """
    found = [
        Prediction(timed=one, run=play_run(shape, cluster.fleet(one.split), costs, source, on_step=on_step))
        for one in chosen_splits(cluster_splits(cluster, shape, costs, source), ratio)
    ]
    return sorted(found, key=lambda one: -one.run.trained_tokens_per_s)


def chosen_splits(splits: Sequence[TimedSplit], ratio: float | None) -> list[TimedSplit]:
    """Return the splits to play: the one of `ratio`, or else the formula's first ones and the usual ratios."""
    if ratio is not None:
        return [nearest_split(splits, ratio)]
    chosen = [*splits[:PLAYED], *(nearest_split(splits, usual) for usual in USUAL_RATIOS)]
    return list({one.split: one for one in chosen}.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvisedChange:
    """A change, with its gain in the simulator: more trained tokens/s, as a share."""

    text: str
    """The field to set, such as `algorithm.max_staleness: 2 (now 1)`."""
    gain: float
    mean_staleness: float
    """Versions, after the change."""

    def __str__(self) -> str:
        return f"{self.text}: {self.gain:+.0%} trained tokens/s, mean staleness {self.mean_staleness:.1f}"


@dataclass(frozen=True, slots=True)
class _Option:
    text: str
    shape: RunShape
    fleet: Fleet


def advise_changes(
    split: Split,
    cluster: Cluster,
    shape: RunShape,
    costs: CostModel,
    source: EpisodeSource,
    run: SimulatedRun,
    *,
    on_step: Callable[[SimulatedStep], None] = lambda step: None,
) -> list[AdvisedChange]:
    """Return the changes of `split` that help by more than 5 % over its `run`, the best first."""
    found: list[AdvisedChange] = []
    for option in list(_tried_changes(split, cluster, shape))[:_MOST_PLAYED]:
        tried = play_run(option.shape, option.fleet, costs, source, on_step=on_step)
        gain = tried.trained_tokens_per_s / run.trained_tokens_per_s - 1
        if gain > WORTH:
            found.append(AdvisedChange(text=option.text, gain=gain, mean_staleness=tried.mean_staleness))
    return sorted(found, key=lambda one: -one.gain)


def count_changes(split: Split, cluster: Cluster, shape: RunShape) -> int:
    """Return how many changes `advise_changes` plays."""
    return min(_MOST_PLAYED, len(list(_tried_changes(split, cluster, shape))))


def _tried_changes(split: Split, cluster: Cluster, shape: RunShape) -> Iterator[_Option]:
    fleet = cluster.fleet(split)
    more = max(1, 2 * shape.max_staleness)
    yield _Option(f"algorithm.max_staleness: {more} (now {shape.max_staleness})", replace(shape, max_staleness=more), fleet)
    slots = 2 * shape.slots
    yield _Option(f"rollout.max_concurrent_episodes: {slots} (now {shape.slots})", replace(shape, slots=slots), fleet)
    groups = 2 * shape.groups_per_step
    yield _Option(
        f"algorithm.groups_per_step: {groups} (now {shape.groups_per_step}), for steps of twice the episodes",
        replace(shape, groups_per_step=groups),
        fleet,
    )
    for train in _neighbours(split, cluster):
        moved = Split(train=train, rollout=(split.total - train) // cluster.server_gpus * cluster.server_gpus)
        count, where = abs(train - split.train), "rollout" if train < split.train else "training"
        yield _Option(f"move {count} GPU{'s' if count > 1 else ''} to {where} ({moved})", shape, cluster.fleet(moved))


def _neighbours(split: Split, cluster: Cluster) -> Iterator[int]:
    """Yield a smaller and a larger number of trainer GPUs, about a quarter away or the next that is feasible."""
    sizes = [size for size in cluster.train_sizes if 0 < size <= split.total - cluster.server_gpus]
    away = max(1, split.train // 4)
    smaller, larger = [s for s in sizes if s < split.train], [s for s in sizes if s > split.train]
    if smaller:
        yield min(smaller, key=lambda size: abs(size - (split.train - away)))
    if larger:
        yield min(larger, key=lambda size: abs(size - (split.train + away)))


def describe_bottleneck(run: SimulatedRun, shape: RunShape) -> str:
    """Return in one sentence what bounds the steps."""
    if run.cores_share > 0.9:
        return "The cores are the bottleneck: driver, servers and trainer keep nearly all of them busy."
    if run.trainer_share > 0.9:
        return "The trainer is the bottleneck: it is busy almost all the time."
    if run.server_share > 0.85:
        return "The servers are the bottleneck: they sample almost as fast as they can."
    if run.slots_share > 0.9:
        return "The episode slots are the bottleneck: nearly all are in use, and servers could take more requests."
    if run.bound_share > 0.5:
        bound = "synchronous training" if shape.max_staleness == 0 else "the staleness bound"
        return f"The longest episodes are the bottleneck: under {bound} nothing else may start while they end."
    return "Nothing is busy all the time: the steps wait for the longest episodes of their batches."


def describe_driver(run: SimulatedRun) -> str | None:
    """Return a warning where one driver process cannot make the model calls; None where it can, or its work is played."""
    calls_per_s = run.calls / run.seconds
    if calls_per_s * DRIVER_CALL_S < 0.7 or run.cores_share:
        return None
    return (
        f"The run makes {calls_per_s:.0f} model calls/s. One driver process makes about {1 / DRIVER_CALL_S:.0f}, and the "
        "simulator leaves this limit out: spread the episodes over several processes (rollout workers)."
    )
