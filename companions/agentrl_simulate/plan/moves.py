"""The change of its split that a run's own idle time asks for.

Invariant: where the driver has no time left, no split is advised, because the GPUs wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.config import RunConfig
from agentrl.plan.memory import gpus_per_server
from agentrl.plan.model import ModelFacts
from agentrl.plan.resizing import full_driver, mean_of, steps_of_split, windows_of
from agentrl.plan.splits import DEFAULT_GPU, split_of
from agentrl_simulate.plan.basis import local_gpu, splittable_meshes
from agentrl_simulate.split import BusyShares, SplitMove, advise_resize


def advise_move(run: RunConfig, model: ModelFacts, root: Path = Path("/")) -> SplitMove | None:
    """Return the better split on which the last two windows of a resolved run's steps agree; None: there is none.

    `root` is that of the files that tell this machine's GPU.
    """
    if run.inference.backend != "sglang" or run.inference.urls:
        return None
    steps = steps_of_split(run)
    windows = busy_windows(steps)
    if len(windows) < 2 or full_driver(steps) is not None:
        return None
    now = split_of(run)
    sizes = list(splittable_meshes(run, model, now.total, local_gpu(root) or DEFAULT_GPU))
    return advise_resize(now, windows, train_sizes=sizes, server_gpus=gpus_per_server(run.inference))


def busy_windows(steps: Sequence[Mapping[str, Any]]) -> list[BusyShares]:
    """Return how busy both sides were in each full window of `step` lines, the newest last.

    The servers count as saturated in the step with the most tokens/s, so a server that never was looks busier than it is.
    """
    most = max((line["tokens_per_s"] for line in steps), default=0.0)
    return [
        BusyShares(trainer=mean_of(window, "trainer_busy_share"), servers=mean_of(window, "tokens_per_s") / most)
        for window in windows_of(steps)
        if most
    ]
