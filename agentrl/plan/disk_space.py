"""The disk space of a run's published versions and checkpoints.

Invariant: nothing is written. Versions and checkpoints that are on the disk already count as free space that is gone.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from agentrl.config import RunConfig
from agentrl.config.route import Route
from agentrl.engine.config import KEPT_PUBLISHED
from agentrl.plan.memory import RunMemory, gib


def free_space(folder: Path) -> int:
    """Return the bytes that are free where `folder` is, or will be."""
    there = next(each for each in [folder, *folder.absolute().parents] if each.exists())
    return shutil.disk_usage(there).free


def disk_problems(run: RunConfig, memory: RunMemory, route: Route, free: Callable[[Path], int] = free_space) -> list[str]:
    """Return a line for each directory of a run on this machine that is too small for what stays in it.

    A new version or checkpoint is written before the oldest is removed, so there is one more for a while.
    """
    if run.cluster.launcher != "local":
        return []
    engine, problems = run.engine, list[str]()
    folder = Path(engine.publish_dir) if engine.publish_dir else run.run_dir / "weights"
    if route.method == "disk" and (
        short := _shortage(folder, KEPT_PUBLISHED + 1, memory.snapshot.num_bytes, free, "published versions")
    ):
        problems.append(f"engine.publish_dir: {short}; free space, or name another directory")
    saved, folder = memory.checkpoint * run.trainer.parallel.shape.world, run.run_dir / "checkpoints"
    if short := _shortage(folder, engine.keep_checkpoints + 1, saved, free, "checkpoints"):
        problems.append(f"runs_dir: {short}; free space, name another directory, or lower engine.keep_checkpoints")
    return problems


def _shortage(folder: Path, count: int, each: int, free: Callable[[Path], int], what: str) -> str:
    there = free(folder)
    if count * each <= there:
        return ""
    return f"{count} {what} of {gib(each)} GiB take {gib(count * each)} GiB, and {gib(there)} GiB are free in {folder}"
