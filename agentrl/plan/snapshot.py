"""The plan's row on published weights in host memory, and what `trainer.snapshot` takes.

Invariant: the choice is the one that the trainer makes, for the memory that is free now. On other machines nothing is known.
"""

from __future__ import annotations

from agentrl.config import RunConfig
from agentrl.plan.gpus import trainer_gpus
from agentrl.plan.memory import ELEMENT_BYTES, gib, is_whole, model_shape_of, trainer_memory
from agentrl.trainer.worker.memory import snapshot_kind


def snapshot_memory(run: RunConfig) -> int | None:
    """Return the bytes of one copy of the published weights; None where the shape of the model is unknown."""
    shape = model_shape_of(run.model.local_path or run.model.path)
    return None if shape is None else shape.num_parameters * ELEMENT_BYTES[_type(run)]


def memory_for_snapshot(run: RunConfig, free: int | None) -> int | None:
    """Return what a trainer on the CPU leaves of the bytes that are `free` here; None where it runs on another machine."""
    shape = model_shape_of(run.model.local_path or run.model.path)
    if run.cluster.launcher != "local" or free is None or shape is None:
        return None
    if trainer_gpus(run) != 0:
        return free
    trainer = trainer_memory(run, shape)
    return max(0, free - (trainer.weights + trainer.optimizer) * run.trainer.parallel.shape.world)


def snapshot_rows(run: RunConfig, free: int | None) -> list[tuple[str, str]]:
    """Return the row; none where the shape of the model is unknown.

    Args:
        run: the run.
        free: bytes of host memory that are free; None: not known.
    """
    num_bytes = snapshot_memory(run)
    if num_bytes is None:
        return []
    where, size = "host memory of rank 0 for published weights:", f"{gib(num_bytes)} GiB of {_type(run)}"
    setting = run.trainer.snapshot
    if setting == "auto" and free is None:
        return [("", f"{where} {size}; trainer.snapshot auto: rank 0 decides by the memory that is free on its machine")]
    kind = snapshot_kind(setting, num_bytes, free)
    found = "" if setting != "auto" or free is None else f" auto takes {kind}, with {gib(free)} GiB free for it here"
    choice = f"trainer.snapshot{found or f' is {setting}'}"
    if kind == "stream" and is_whole(run):
        return [("", f"{where} none, where a copy takes {size}; {choice}: steps wait until weights have left")]
    if kind == "stream":
        return [("", f"{where} none; {choice}: {size} in a file of TMPDIR")]
    how_long = ", twice while a server still takes the version before" if _sends(run) else " until they are written"
    return [("", f"{where} {size}{how_long}; {choice}")]


def snapshot_problems(run: RunConfig, free: int | None) -> list[str]:
    """Return an error where `trainer.snapshot: host` asks for more memory than is free.

    Args:
        run: the run.
        free: bytes of host memory that are free; None: not known.
    """
    num_bytes = snapshot_memory(run)
    if run.trainer.snapshot != "host" or free is None or num_bytes is None:
        return []
    needed = num_bytes * (2 if _sends(run) else 1)
    if needed <= free:
        return []
    return [
        f"trainer.snapshot: host takes {gib(needed)} GiB of host memory on rank 0, and {gib(free)} GiB are free for "
        "it; set stream or auto"
    ]


def _sends(run: RunConfig) -> bool:
    return run.route.method == "distributed"


def _type(run: RunConfig) -> str:
    """Return the type of a copy: of the wire, or, in files, of the trained weights."""
    return (run.resolved_inference.dtype or "float32") if _sends(run) else "float32"
