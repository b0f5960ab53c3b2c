"""Predict a run on several splits of the same GPUs: the formula ranks them, the simulator plays those worth playing.

Invariant: every prediction of one call plays the same episodes with the same costs; only the machines differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentrl.cluster.split import GpuSpeeds, RankedSplit, Split, StepDemand, rank_splits
from agentrl.errors import ConfigError
from agentrl.simulate.costs.model import CostModel, Fleet, RunShape
from agentrl.simulate.outcome import SimulatedRun, SimulatedStep
from agentrl.simulate.play import play_run
from agentrl.simulate.workload import EpisodeSource

PLAYED = 3
"""Splits that the formula ranks first and the simulator plays."""
USUAL_RATIOS = (3.0, 1.0)
"""GPUs that serve for each one that trains, which are played for comparison."""
_SAMPLED_GROUPS = 64
"""Groups whose episodes give the mean lengths."""


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

    ranked: RankedSplit
    run: SimulatedRun

    @property
    def split(self) -> Split:
        return self.ranked.split


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


def rank_cluster(cluster: Cluster, shape: RunShape, costs: CostModel, source: EpisodeSource) -> list[RankedSplit]:
    """Return the feasible splits of a cluster, the best by the formula first; raises ConfigError where there is none."""
    ranked = rank_splits(
        cluster.gpus,
        demand_of(shape, source),
        speeds_of(costs),
        train_sizes=cluster.train_sizes,
        server_gpus=cluster.server_gpus,
    )
    if not ranked:
        least = f"{min(cluster.train_sizes)}" if cluster.train_sizes else "more than there are"
        raise ConfigError(
            f"{cluster.gpus} GPUs cannot be split: the trainer needs {least}, and a server {cluster.server_gpus}; use more "
            "GPUs, a smaller model, or more GPUs for each sample (trainer.parallel)"
        )
    return ranked


def nearest_split(ranked: Sequence[RankedSplit], ratio: float) -> RankedSplit:
    """Return the feasible split with about `ratio` serving GPUs for each trainer GPU; the most GPUs in use first."""
    return min(ranked, key=lambda one: (abs(math.log(one.split.rollout / one.split.train / ratio)), -one.split.total))


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
        Prediction(ranked=one, run=play_run(shape, cluster.fleet(one.split), costs, source, on_step=on_step))
        for one in chosen_splits(rank_cluster(cluster, shape, costs, source), ratio)
    ]
    return sorted(found, key=lambda one: -one.run.trained_tokens_per_s)


def chosen_splits(ranked: Sequence[RankedSplit], ratio: float | None) -> list[RankedSplit]:
    """Return the splits to play: the one of `ratio`, or else the formula's first ones and the usual ratios."""
    if ratio is not None:
        return [nearest_split(ranked, ratio)]
    chosen = [*ranked[:PLAYED], *(nearest_split(ranked, usual) for usual in USUAL_RATIOS)]
    return list({one.split: one for one in chosen}.values())
