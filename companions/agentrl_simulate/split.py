"""The split of GPUs between trainer and servers: a formula before a run, and a rule that corrects it from its idle time.

Invariant: a split uses no more GPUs than there are, each side has a part that fits, and the same numbers always give the
same split. The formula leaves the longest episode, the staleness bound and the pauses of servers to `agentrl_simulate`.

Legend: n_t trainer GPUs, k requests on each server, R tokens/s of a saturated server, h requests at which a server gives
half of R, T tokens/s of one trainer GPU, e efficiency of the trainer for each doubling of its GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.plan.splits import Split, TimedSplit

RESIZE_GAIN = 0.10
"""The share by which steps must become faster before a run is advised to move GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDemand:
    """The demand of one training step on a cluster; tokens are means of an episode."""

    episodes: int
    output_tokens: float
    context_tokens: float
    """Tokens that an episode is given, each counted once."""
    concurrent: int
    """The most model calls that run at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpeeds:
    """The speeds of GPUs.

    `server_tokens_per_s` is R, `half_saturation` h, `trainer_tokens_per_s` T of contexts and outputs, and
    `doubling_efficiency` e.
    """

    server_tokens_per_s: float
    half_saturation: float
    server_requests: int | None
    """Requests that one server runs together; others wait. None: all."""
    context_weight: float
    """Work of reading a context token, over that of sampling a token."""
    trainer_tokens_per_s: float
    doubling_efficiency: float
    sync_s: float
    """Seconds of a step in which the trainer publishes weights and checks servers."""


def server_rate(speeds: GpuSpeeds, requests: float) -> float:
    """Return the tokens/s of one server with `requests` running: R k / (k + h)."""
    running = requests if speeds.server_requests is None else min(requests, speeds.server_requests)
    return speeds.server_tokens_per_s * running / (running + speeds.half_saturation) if running else 0.0


def trainer_rate(speeds: GpuSpeeds, gpus: int) -> float:
    """Return the tokens/s of `gpus` trainer GPUs together: n_t T e^log2(n_t)."""
    return gpus * speeds.trainer_tokens_per_s * speeds.doubling_efficiency ** math.log2(gpus)


def sorted_splits(
    total: int, demand: StepDemand, speeds: GpuSpeeds, *, train_sizes: Sequence[int], server_gpus: int
) -> list[TimedSplit]:
    """Return every feasible split of `total` GPUs, the one with the shortest step first.

    `train_sizes` are the numbers of trainer GPUs that form a mesh and whose memory is enough.
    """
    found: list[TimedSplit] = []
    for train in sorted(set(train_sizes)):
        servers = (total - train) // server_gpus
        if train < 1 or servers < 1:
            continue
        work = demand.episodes * (demand.output_tokens + speeds.context_weight * demand.context_tokens)
        rate = servers * server_rate(speeds, max(1.0, demand.concurrent / servers))
        trained = demand.episodes * (demand.output_tokens + demand.context_tokens)
        found.append(
            TimedSplit(
                split=Split(train=train, rollout=servers * server_gpus),
                rollout_s=work / rate,
                train_s=trained / trainer_rate(speeds, train) + speeds.sync_s,
            )
        )
    return sorted(found, key=lambda one: one.order)


@dataclass(frozen=True, slots=True, kw_only=True)
class BusyShares:
    """The load of both sides in a window of steps."""

    trainer: float
    """Share of the time in which the trainer worked on steps."""
    servers: float
    """Tokens/s over the tokens/s of saturated servers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitMove:
    """A better split, as two windows agree."""

    now: Split
    better: Split
    gain: float
    """Share by which steps become faster, the smaller of both windows."""

    def __str__(self) -> str:
        return f"move from ({self.now}) to ({self.better}): steps about {self.gain:.0%} faster"


def resize_gain(now: Split, other: Split, busy: BusyShares) -> float:
    """Return the share by which steps are faster under `other`, if the busier side becomes as busy as it is now.

    The gain is largest at n u_t n_t / (u_t n_t + u_r n_r) trainer GPUs of n, where u_t and u_r are the busy shares.
    """
    load = max(busy.trainer, busy.servers)
    work_t, work_r = busy.trainer * now.train, busy.servers * now.rollout
    then = max(work_t / other.train, work_r / other.rollout)
    return load / then - 1 if then else 0.0


def advise_resize(
    now: Split, windows: Sequence[BusyShares], *, train_sizes: Sequence[int], server_gpus: int
) -> SplitMove | None:
    """Return the smaller of both moves on which the last two windows agree; None where they do not, or it gains <= 10 %.

    The windows agree if each gives a better split on the same side of the present one.
    """
    if len(windows) < 2:
        return None
    wanted = [_nearest(now, busy, train_sizes, server_gpus) for busy in windows[-2:]]
    if any(one is None for one in wanted):
        return None
    better = min((one for one in wanted if one is not None), key=lambda one: abs(one.train - now.train))
    directions = {(one.train > now.train) - (one.train < now.train) for one in wanted if one is not None}
    gain = min(resize_gain(now, better, busy) for busy in windows[-2:])
    if len(directions) > 1 or 0 in directions or gain <= RESIZE_GAIN:
        return None
    return SplitMove(now=now, better=better, gain=gain)


def _nearest(now: Split, busy: BusyShares, train_sizes: Sequence[int], server_gpus: int) -> Split | None:
    splits = [
        Split(train=train, rollout=(now.total - train) // server_gpus * server_gpus)
        for train in sorted(set(train_sizes))
        if 0 < train <= now.total - server_gpus
    ]
    return max(splits, key=lambda one: (resize_gain(now, one, busy), -abs(one.train - now.train)), default=None)
