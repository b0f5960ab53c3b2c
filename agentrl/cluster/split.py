"""How many GPUs train and how many serve: a formula before a run, and a rule that corrects it from a run's own idle time.

Invariant: a split uses no more GPUs than there are, and each side has at least one part that fits: a server, and a number of
trainer GPUs that the caller lists. The same numbers always give the same split. torch is not imported.

The formula ranks splits; it does not promise seconds. It leaves out the longest episode of a batch, the staleness bound and
the pauses of servers, which `agentrl.simulate` plays.

Legend: n_t trainer GPUs, n_s servers, k requests on each server, R tokens/s of a saturated server, h requests at which a
server gives half of R, T tokens/s of one trainer GPU, e efficiency of the trainer for each doubling of its GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

RESIZE_GAIN = 0.10
"""The share by which steps must become faster before a run is advised to move GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDemand:
    """What one training step asks of a cluster."""

    episodes: int
    """Episodes of a batch."""
    output_tokens: float
    """Tokens that an episode samples, mean."""
    context_tokens: float
    """Tokens that an episode is given, each counted once, mean."""
    concurrent: int
    """The most model calls that run at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpeeds:
    """What the GPUs do."""

    server_tokens_per_s: float
    """R."""
    half_saturation: float
    """h, requests."""
    server_requests: int | None
    """Requests that one server runs together; others wait. None: all."""
    context_weight: float
    """Work of reading a context token, over that of sampling a token."""
    trainer_tokens_per_s: float
    """T, of contexts and outputs."""
    doubling_efficiency: float
    """e."""
    sync_s: float
    """Seconds of a step in which the trainer publishes weights and checks servers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A division of GPUs.

    Example:
        >>> str(Split(train=2, rollout=6))
        '2 GPUs train, 6 serve'
    """

    train: int
    """GPUs of the trainer."""
    rollout: int
    """GPUs of servers."""

    @property
    def total(self) -> int:
        """GPUs in use."""
        return self.train + self.rollout

    def __str__(self) -> str:
        return f"{self.train} GPU{'s' if self.train > 1 else ''} train, {self.rollout} serve"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedSplit:
    """A split with the seconds that the formula gives."""

    split: Split
    rollout_s: float
    """Seconds in which the servers sample the tokens of a batch."""
    train_s: float
    """Seconds in which the trainer trains it and publishes the weights."""

    @property
    def slower_s(self) -> float:
        """The larger of both, which bounds a step where rollouts and training overlap."""
        return max(self.rollout_s, self.train_s)

    @property
    def rank(self) -> tuple[float, float, int]:
        """The order of splits: by the shortest step, then by the sum of both times, then by the fewest trainer GPUs."""
        return self.slower_s, self.rollout_s + self.train_s, self.split.train


def server_rate(speeds: GpuSpeeds, requests: float) -> float:
    """Return the tokens/s of one server with `requests` running: R k / (k + h).

    Example:
        >>> speeds = GpuSpeeds(server_tokens_per_s=1000, half_saturation=10, server_requests=30, context_weight=0,
        ...                 trainer_tokens_per_s=1, doubling_efficiency=1, sync_s=0)
        >>> server_rate(speeds, 10), server_rate(speeds, 90)
        (500.0, 750.0)
    """
    running = requests if speeds.server_requests is None else min(requests, speeds.server_requests)
    return speeds.server_tokens_per_s * running / (running + speeds.half_saturation) if running else 0.0


def trainer_rate(speeds: GpuSpeeds, gpus: int) -> float:
    """Return the tokens/s of `gpus` trainer GPUs together: n_t T e^log2(n_t)."""
    return gpus * speeds.trainer_tokens_per_s * speeds.doubling_efficiency ** math.log2(gpus)


def rank_splits(
    total: int, demand: StepDemand, speeds: GpuSpeeds, *, train_sizes: Sequence[int], server_gpus: int
) -> list[RankedSplit]:
    """Return every feasible split of `total` GPUs, the one with the shortest step first.

    Args:
        total: GPUs.
        demand: what a step asks for.
        speeds: what GPUs do.
        train_sizes: numbers of trainer GPUs that form a mesh and whose memory is enough.
        server_gpus: GPUs of one server.
    """
    found: list[RankedSplit] = []
    for train in sorted(set(train_sizes)):
        servers = (total - train) // server_gpus
        if train < 1 or servers < 1:
            continue
        work = demand.episodes * (demand.output_tokens + speeds.context_weight * demand.context_tokens)
        rate = servers * server_rate(speeds, max(1.0, demand.concurrent / servers))
        trained = demand.episodes * (demand.output_tokens + demand.context_tokens)
        found.append(
            RankedSplit(
                split=Split(train=train, rollout=servers * server_gpus),
                rollout_s=work / rate,
                train_s=trained / trainer_rate(speeds, train) + speeds.sync_s,
            )
        )
    return sorted(found, key=lambda one: one.rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class BusyShares:
    """How busy both sides were in a window of steps."""

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

    The gain is largest where both sides are equally busy, at n u_t n_t / (u_t n_t + u_r n_r) trainer GPUs of n, where u_t
    and u_r are the busy shares.
    """
    load = max(busy.trainer, busy.servers)
    work_t, work_r = busy.trainer * now.train, busy.servers * now.rollout
    then = max(work_t / other.train, work_r / other.rollout)
    return load / then - 1 if then else 0.0


def advise_resize(
    now: Split, windows: Sequence[BusyShares], *, train_sizes: Sequence[int], server_gpus: int
) -> SplitMove | None:
    """Return the move that the last two windows agree on; None where they do not, or the gain is at most 10 %.

    The windows agree if each gives a better split on the same side of the present one. The smaller of both moves is taken.

    Args:
        now: the present split.
        windows: the windows so far, the newest last.
        train_sizes: as for `rank_splits`.
        server_gpus: GPUs of one server.
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
    """Return the feasible split with the largest gain for one window; None where there is none."""
    splits = [
        Split(train=train, rollout=(now.total - train) // server_gpus * server_gpus)
        for train in sorted(set(train_sizes))
        if 0 < train <= now.total - server_gpus
    ]
    return max(splits, key=lambda one: (resize_gain(now, one, busy), -abs(one.train - now.train)), default=None)
