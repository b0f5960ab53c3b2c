"""Changes to a run that help, found by playing each.

Invariant: a line of advice names the field and the value, and gives the gain that the simulator found for it. Nothing is
advised that was not played.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from agentrl.cluster.split import Split
from agentrl.simulate.costs.model import CostModel, Fleet, RunShape
from agentrl.simulate.outcome import SimulatedRun, SimulatedStep
from agentrl.simulate.play import play_run
from agentrl.simulate.predict import Cluster
from agentrl.simulate.workload import EpisodeSource

WORTH = 0.05
"""Share of more trained tokens/s from which a change is advised."""
DRIVER_CALL_S = 0.002
"""Processor seconds of the driver for a model call with long contexts, the workflow's own code left out (benchmarks)."""
_MOST_PLAYED = 6
"""Changes that are played at most."""


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
