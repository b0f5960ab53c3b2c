"""What a run's own idle time says: another split of its GPUs, or a driver that cannot keep up.

Invariant: only whole windows of steps under the present split count, and only steps whose metrics say how busy the parts
were. Where the driver has no time left, no split is advised, because the GPUs wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.cluster.split import BusyShares, Split, SplitMove, advise_resize
from agentrl.config import RunConfig
from agentrl.plan.basis import DEFAULT_GPU, gpus_per_server, local_gpu, splittable_meshes
from agentrl.plan.split_record import first_step_of_split, read_splits
from agentrl.runs.reading import read_metrics

WINDOW_STEPS = 10
"""Steps of a window in which idle time is measured."""
FULL_DRIVER = 0.9
"""Cores in use at which the driver, whose event loop has one, cannot do more."""


def advise_move(run: RunConfig, root: Path = Path("/")) -> SplitMove | None:
    """Return the better split on which the last two windows of a run's steps agree; None: there is none.

    Args:
        run: the resolved run, whose directory is read.
        root: of the files that tell this machine's GPU.

    Raises:
        ConfigError: the record of the run's splits cannot be read.
    """
    if run.inference.backend != "sglang" or run.inference.urls:
        return None
    steps = _steps_of_split(run)
    windows = busy_windows(steps)
    if len(windows) < 2 or _full_driver(steps) is not None:
        return None
    now = split_of(run)
    sizes = list(splittable_meshes(run, now.total, local_gpu(root) or DEFAULT_GPU))
    return advise_resize(now, windows, train_sizes=sizes, server_gpus=gpus_per_server(run))


def advise_driver(run: RunConfig) -> str | None:
    """Return what to change where the driver was busy all the time in the last two windows; None where it was not.

    Raises:
        ConfigError: the record of the run's splits cannot be read.
    """
    cores = _full_driver(_steps_of_split(run))
    if cores is None:
        return None
    if run.rollout.runner == "local":
        change = "set rollout.runner: processes and rollout.workers, so that episodes run beside it"
    else:
        change = "its workers' model calls are more than one process can pass on: make fewer and longer ones"
    useless = ", so more or other GPUs do not help" if run.inference.backend == "sglang" else ""
    return f"{cores:.1f} cores busy, and its event loop has one{useless}; {change}"


def busy_windows(steps: Sequence[Mapping[str, Any]]) -> list[BusyShares]:
    """Return how busy both sides were in each full window of `step` lines, the newest last.

    The servers count as saturated in the step with the most tokens/s, so a server that never was looks busier than it is.
    """
    most = max((line["tokens_per_s"] for line in steps), default=0.0)
    return [
        BusyShares(trainer=_mean(window, "trainer_busy_share"), servers=_mean(window, "tokens_per_s") / most)
        for window in _windows(steps)
        if most
    ]


def split_of(run: RunConfig) -> Split:
    """Return the GPUs that a resolved run gives to each side."""
    return Split(train=run.trainer.parallel.shape.world, rollout=run.inference.servers * gpus_per_server(run))


def _steps_of_split(run: RunConfig) -> list[Mapping[str, Any]]:
    """Return the steps under the present split that say how busy the parts were; older lines do not."""
    if not (run.run_dir / "metrics.jsonl").is_file():
        return []
    began = first_step_of_split(read_splits(run.run_dir))
    steps = (line for line in read_metrics(run.run_dir) if line["event"] == "step" and line["step"] > began)
    return [line for line in steps if {"trainer_busy_share", "driver_busy_cores"} <= line.keys()]


def _full_driver(steps: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the cores that the driver used in the last two windows, if it was full in both."""
    used = [_mean(window, "driver_busy_cores") for window in _windows(steps)[-2:]]
    return sum(used) / 2 if len(used) == 2 and min(used) >= FULL_DRIVER else None


def _windows(steps: Sequence[Mapping[str, Any]]) -> list[Sequence[Mapping[str, Any]]]:
    first = len(steps) % WINDOW_STEPS
    return [steps[at : at + WINDOW_STEPS] for at in range(first, len(steps), WINDOW_STEPS)]


def _mean(window: Sequence[Mapping[str, Any]], key: str) -> float:
    return sum(line[key] for line in window) / len(window)
