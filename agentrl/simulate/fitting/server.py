"""Fit the cost of an inference server to the model calls that a run recorded.

Invariant: no fitted number is negative.

A model call is taken to last `overhead + (output + w * context) * (h + k) / R * slowdown` seconds, where k is the mean
number of calls that its server computed meanwhile, and the slowdown what the sharing of cores adds, which is known. The
overhead, in which the driver or the network has the call, grows with the calls in flight: `a + b * calls`. Pauses are
subtracted first. R, h, a and b come from non-negative least squares, w from a grid. A call does not count towards k in its
overhead; so the fit is repeated, with the seconds of each call that the fit before gave to the server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from agentrl.simulate.costs.model import ServerCost

Floats: TypeAlias = NDArray[np.float64]
Spans: TypeAlias = Sequence[tuple[float, float]]

_CONTEXT_WEIGHTS = (0.0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
_MORE_ROUNDS = 12
"""Fits after the first one, each with the servers' seconds of the one before."""


class CallTable(NamedTuple):
    """One entry for each model call: [calls] float64."""

    starts: Floats
    ends: Floats
    outputs: Floats
    contexts: Floats

    @property
    def lasted(self) -> Floats:
        """Seconds of each call."""
        return np.maximum(self.ends - self.starts, 1e-6)


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedServer:
    """One server, and what is left over of a call."""

    tokens_per_s: float
    half_saturation: float
    context_weight: float
    overhead_s: float
    """Of a call, seconds in which no server works for it."""
    error: float
    """Mean distance of a call's seconds from the model's, over the mean call."""

    def cost(self, *, requests: int | None, gpus: int) -> ServerCost:
        """Return the cost of a server that runs at most `requests` together, on `gpus` GPUs."""
        return ServerCost(
            tokens_per_s=self.tokens_per_s,
            half_saturation=self.half_saturation,
            requests=requests,
            context_weight=self.context_weight,
            gpus=gpus,
        )


def fit_server(calls: CallTable, pauses: Spans, slowdown: Floats, *, servers: int, requests: int | None) -> FittedServer:
    """Return the cost of each of `servers` equal servers.

    No server samples during `pauses`. `slowdown` is the factor of each call for shared cores: [calls], 1 where they are not.
    """
    sampled_s = np.maximum(calls.lasted - seconds_within(calls, pauses), 1e-6)
    in_flight = _overlapping(calls)
    fitted, served_s = _fit(calls, sampled_s, slowdown, np.clip(in_flight / servers, 1.0, requests), in_flight)
    for _ in range(_MORE_ROUNDS):
        middle = (calls.starts + calls.ends) / 2
        computed = calls._replace(starts=middle - served_s / 2, ends=middle + served_s / 2)
        running = np.clip(_overlapping(computed) / servers, 1.0, requests)
        fitted, served_s = _fit(calls, sampled_s, slowdown, running, in_flight)
    return fitted


def _overlapping(calls: CallTable) -> Floats:
    """Return the mean number of calls in the time of each call, itself included: [calls]."""
    spans = list(zip(calls.starts.tolist(), calls.ends.tolist(), strict=True))
    return seconds_within(calls, spans) / calls.lasted


def _fit(
    calls: CallTable, sampled_s: Floats, slowdown: Floats, running: Floats, in_flight: Floats
) -> tuple[FittedServer, Floats]:
    """Return the best fit, and the seconds of each call that it gives to the server: [calls]."""
    fits: list[tuple[FittedServer, Floats]] = []
    for weight in _CONTEXT_WEIGHTS:
        work = (calls.outputs + weight * calls.contexts) * slowdown
        columns = np.stack([work, work * running, np.ones_like(work), in_flight], axis=1)
        found = nonnegative(columns, sampled_s)
        alone, shared = float(found[0]), max(float(found[1]), 1e-9)
        server = FittedServer(
            tokens_per_s=1 / shared,
            half_saturation=alone / shared,
            context_weight=weight,
            overhead_s=float((columns[:, 2:] @ found[2:]).mean()),
            error=float(np.abs(columns @ found - sampled_s).mean() / sampled_s.mean()),
        )
        fits.append((server, np.minimum(columns[:, :2] @ found[:2], calls.lasted)))
    return min(fits, key=lambda one: one[0].error)


def seconds_within(calls: CallTable, spans: Spans) -> Floats:
    """Return, for each call, the seconds that it shares with `spans`, summed over them: [calls] float64."""
    if not spans:
        return np.zeros_like(calls.starts)
    begins, ends = (np.array(side, np.float64) for side in zip(*spans, strict=True))
    times = np.concatenate([begins, ends])
    change = np.concatenate([np.ones_like(begins), -np.ones_like(ends)])
    order = np.argsort(times, kind="stable")
    times, active = times[order], np.cumsum(change[order])
    total = np.concatenate([[0.0], np.cumsum(active[:-1] * np.diff(times))])
    return np.interp(calls.ends, times, total) - np.interp(calls.starts, times, total)


def nonnegative(columns: Floats, wanted: Floats) -> Floats:
    """Return the least-squares solution without negative entries: a column that would get one is left out."""
    kept = list(range(columns.shape[1]))
    while True:
        solution = np.linalg.lstsq(columns[:, kept], wanted, rcond=None)[0]
        if len(kept) == 1 or solution.min() >= 0:
            break
        del kept[int(solution.argmin())]
    result = np.zeros(columns.shape[1])
    result[kept] = np.maximum(solution, 0.0)
    return result
