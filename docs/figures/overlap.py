"""Draw how rollouts and training overlap under a staleness bound, from a simulation with the engine's own rules.

.venv/bin/python -m docs.figures.overlap
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from agentrl.engine.staleness import Admission, Candidate, select
from docs.figures.style import ASSETS, INK, QUIET, VERSIONS, save

SLOTS, GROUPS_PER_STEP, STEPS = 6, 3, 8
TRAIN_S = 2.0
BOUNDS = (0, 2)


@dataclass(frozen=True, slots=True)
class Bar:
    """A group in its slot."""

    slot: int
    start: float
    end: float


@dataclass(slots=True)
class Schedule:
    """What a simulated run did, in seconds from its start."""

    groups: list[Bar] = field(default_factory=list[Bar])
    steps: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    staleness: list[int] = field(default_factory=list[int])
    """Versions between the oldest token of a trained group and the version that trained it."""


def simulate(max_staleness: int, seed: int = 1) -> Schedule:
    """Return the schedule of a run of `STEPS` steps whose groups take lognormal times, the same for every bound."""
    durations = np.random.default_rng(seed).lognormal(1.2, 0.45, size=GROUPS_PER_STEP * (STEPS + max(BOUNDS) + 1))
    admission = Admission(groups_per_step=GROUPS_PER_STEP, max_staleness=max_staleness)
    result = Schedule()
    outstanding: dict[int, Candidate] = {}
    running: dict[int, Bar] = {}
    trains_until: float | None = None
    opened, version, now = 0, 0, 0.0
    while len(result.steps) < STEPS or trains_until is not None:
        while admission.allows(opened=opened, version=version) and len(running) < SLOTS:
            slot = min(set(range(SLOTS)) - {bar.slot for bar in running.values()})
            running[opened] = Bar(slot, now, now + float(durations[opened]))
            outstanding[opened] = Candidate(index=opened, version=version, complete=False)
            opened += 1
        if trains_until is None:
            taken = select(
                list(outstanding.values()),
                version=version,
                groups_per_step=GROUPS_PER_STEP,
                max_staleness=max_staleness,
                policy="wait",
            ).take
            if taken:
                result.staleness += [version - outstanding.pop(index).version for index in taken]
                trains_until = now + TRAIN_S
                result.steps.append((now, trains_until))
        ends: list[float] = [bar.end for bar in running.values()]
        now = min(ends if trains_until is None else [*ends, trains_until])
        for index in [index for index, bar in running.items() if bar.end <= now]:
            result.groups.append(running.pop(index))
            outstanding[index] = Candidate(index=index, version=outstanding[index].version, complete=True)
        if trains_until is not None and trains_until <= now:
            version, trains_until = version + 1, None
    result.groups += [Bar(bar.slot, bar.start, now) for bar in running.values() if bar.start < now]
    return result


def main(folder: Path = ASSETS) -> None:
    """Write `overlap.svg` into `folder`."""
    schedules = [simulate(bound) for bound in BOUNDS]
    until = max(schedule.steps[-1][1] for schedule in schedules)
    figure, rows = plt.subplots(len(BOUNDS), 1, figsize=(11, 6.4), sharex=True, constrained_layout=True)
    for axes, bound, schedule in zip(rows, BOUNDS, schedules, strict=True):
        _draw(axes, bound, schedule)
        axes.set_xlim(0, until)
    rows[-1].set_xlabel("seconds", color=INK)
    save(figure, "overlap", folder)
    plt.close(figure)


def _draw(axes: Axes, bound: int, schedule: Schedule) -> None:
    updates = [0.0, *(end for _, end in schedule.steps)]
    for bar in schedule.groups:
        cuts = [bar.start, *(at for at in updates if bar.start < at < bar.end), bar.end]
        for start, end in pairwise(cuts):
            version = sum(at <= start for at in updates) - 1
            axes.broken_barh([(start, end - start)], (bar.slot + 0.1, 0.8), facecolors=VERSIONS[version], edgecolor="white")
    for number, (start, end) in enumerate(schedule.steps):
        axes.broken_barh([(start, end - start)], (SLOTS + 0.35, 0.9), facecolors=INK)
        axes.text((start + end) / 2, SLOTS + 0.8, str(number + 1), ha="center", va="center", color="white", fontsize=9)
        axes.axvline(end, color=QUIET, linewidth=0.6, linestyle=":")
    busy = sum(bar.end - bar.start for bar in schedule.groups) / (SLOTS * schedule.steps[-1][1])
    axes.set_title(
        f"max_staleness: {bound}    {STEPS} steps in {schedule.steps[-1][1]:.0f} s, rollouts busy {busy:.0%}, "
        f"oldest trained token {max(schedule.staleness)} versions behind",
        loc="left",
        fontsize=10,
        color=INK,
    )
    axes.set_yticks([SLOTS / 2, SLOTS + 0.8], ["rollouts", "trainer"])
    axes.set_ylim(0, SLOTS + 1.4)
    axes.tick_params(length=0, colors=INK)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


if __name__ == "__main__":
    main()
