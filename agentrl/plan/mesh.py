"""The mesh of a run's trainer: `auto` resolved, and what the model or the machine forbids.

Invariant: nothing is started; a mesh without problems here is one that every trainer process accepts.
"""

from __future__ import annotations

import json
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from agentrl.config import RunConfig
from agentrl.errors import ConfigError
from agentrl.plan.memory import GIB, ModelShape, model_shape_of, trainer_memory
from agentrl.plan.places import trainer_places
from agentrl.trainer.config import ParallelConfig, TrainerConfig
from agentrl.trainer.parallel.shape import check_context_fit, check_tensor_fit

_AUTO_WAYS = (1, 2, 4, 8)
_AUTO_BYTES = 72 * GIB
"""What `auto` lets a trainer process take of a GPU of 80 GB."""


def with_mesh(run: RunConfig, root: Path = Path("/")) -> RunConfig:
    """Return `run` with a number for each axis of `trainer.parallel` that is `auto`.

    `dp: auto` takes the places that the other axes leave (`trainer_places`), and 1 on the CPU of this machine.
    `tp: auto` and `cp: auto` take the smallest product with which a process fits on a GPU of 80 GB, and 1 where the shape of
    the model is unknown. `replicate: auto` is 1.

    Raises:
        ConfigError: the number of places is unknown, the other axes do not divide it, or no mesh fits.
    """
    parallel = run.trainer.parallel
    if "auto" not in (parallel.dp, parallel.tp, parallel.cp, parallel.replicate):
        return run
    gpus = trainer_places(run, root) if parallel.dp == "auto" else None
    forms = mesh_forms(run, searched=gpus != 0)
    candidates = [each for each in (_with_axes(run, form, gpus) for form in forms) if each is not None]
    if not candidates:
        others = ", ".join(str(_others(form)) for form in forms)
        raise ConfigError(
            f"trainer.parallel.dp: auto, and the trainer has {gpus} place(s), which tp x cp x replicate of {others} does "
            "not divide; change one of the three, or give dp a number"
        )
    return _first_that_fits(candidates, model_shape_of(run.model.local_path or run.model.path))


def with_dp(run: RunConfig, dp: int) -> RunConfig:
    """Return `run` with another `trainer.parallel.dp`."""
    return with_parallel(run, run.trainer.parallel.model_copy(update={"dp": dp}))


def mesh_forms(run: RunConfig, *, searched: bool = True) -> list[ParallelConfig]:
    """Return every mesh of dp 1 that `trainer.parallel` allows, with a number for each axis, the smallest tp x cp first.

    Meshes that the model forbids are left out, unless all are: the plan then names what is wrong.

    Args:
        run: the run.
        searched: whether `tp: auto` and `cp: auto` stand for several numbers; without it, or where the shape of the model is
            unknown, they are 1.
    """
    parallel = run.trainer.parallel
    known = model_shape_of(run.model.local_path or run.model.path) is not None
    ways = _AUTO_WAYS if searched and known else (1,)
    tps = ways if parallel.tp == "auto" else (parallel.tp,)
    cps = ways if parallel.cp == "auto" else (parallel.cp,)
    replicate = 1 if parallel.replicate == "auto" else parallel.replicate
    pairs = sorted(product(tps, cps), key=lambda pair: (pair[0] * pair[1], pair[0]))
    forms = [ParallelConfig(tp=tp, cp=cp, replicate=replicate) for tp, cp in pairs]
    return [form for form in forms if not _fit_problems(with_parallel(run, form))] or forms


def meshes_that_fit(run: RunConfig, most: int, memory: float) -> dict[int, RunConfig]:
    """Return `run` with the smallest tp x cp that fits, for each number of trainer GPUs up to `most`; dp takes the rest.

    Numbers that no mesh divides, or at which a process needs more memory, are left out.

    Args:
        run: the run; its dp does not count.
        most: GPUs.
        memory: bytes of a GPU.
    """
    shape = model_shape_of(run.model.local_path or run.model.path)
    found: dict[int, RunConfig] = {}
    if shape is None:
        return found
    for form in mesh_forms(run):
        others = _others(form)
        for gpus in range(others, most + 1, others):
            if gpus not in found:
                sized = with_parallel(run, form.model_copy(update={"dp": gpus // others}))
                if trainer_memory(sized, shape).total <= memory:
                    found[gpus] = sized
    return dict(sorted(found.items()))


def _others(form: ParallelConfig) -> int:
    """Return the product of the axes but dp."""
    mesh = form.shape
    return mesh.world // mesh.dp


def with_parallel(run: RunConfig, parallel: ParallelConfig) -> RunConfig:
    """Return `run` with another mesh."""
    return run.model_copy(update={"trainer": run.trainer.model_copy(update={"parallel": parallel})})


def _with_axes(run: RunConfig, form: ParallelConfig, gpus: int | None) -> RunConfig | None:
    """Return the run with the axes of `form`; None where they do not divide the GPUs that `dp: auto` takes."""
    dp, others = run.trainer.parallel.dp, _others(form)
    if dp == "auto":
        if gpus and gpus % others:
            return None
        dp = gpus // others if gpus else 1
    return with_parallel(run, form.model_copy(update={"dp": dp}))


def _first_that_fits(candidates: list[RunConfig], shape: ModelShape | None) -> RunConfig:
    if shape is None or len(candidates) == 1:  # without a choice, the plan shows the memory and the user decides
        return candidates[0]
    for each in candidates:
        if trainer_memory(each, shape).total <= _AUTO_BYTES:
            return each
    raise ConfigError(
        "trainer.parallel: auto finds no mesh with which a trainer process fits on a GPU of 80 GB; use more GPUs, lower "
        "trainer.microbatch_tokens, set trainer.gradient_checkpointing: true, or give each axis a number"
    )


def mesh_problems(run: RunConfig) -> list[str]:
    """Return what forbids the mesh, each with its field and the fix; of the model only where its shape is known."""
    return _timeout_problems(run.trainer) + _fit_problems(run)


def _fit_problems(run: RunConfig) -> list[str]:
    mesh = run.trainer.parallel.shape
    path = run.model.local_path or run.model.path
    shape = model_shape_of(path)
    if shape is None:
        return []
    problems: list[str] = []
    sizes = {"heads": shape.heads, "kv_heads": shape.kv_heads, "intermediate": shape.intermediate}
    for check in (
        partial(check_tensor_fit, mesh.tp, architecture=shape.kind, **sizes),
        partial(check_context_fit, mesh.cp, tp=mesh.tp, heads=shape.heads),
    ):
        try:
            check()
        except ConfigError as error:
            problems.append(str(error))
    if mesh.cp > 1 and _has_windows(path):
        problems.append(
            "trainer.parallel.cp: the model has layers that attend within a window, which context parallelism does not "
            "support; set it to 1"
        )
    return problems


def _timeout_problems(trainer: TrainerConfig) -> list[str]:
    if trainer.parallel.shape.world == 1 or trainer.collective_timeout_s < trainer.call_timeout_s:
        return []
    return [
        f"trainer.collective_timeout_s: {trainer.collective_timeout_s:g} s is not less than the {trainer.call_timeout_s:g} "
        "s that a call to the trainer may take (trainer.call_timeout_s), so a stopped rank is never named; lower it, or "
        "raise trainer.call_timeout_s"
    ]


def _has_windows(path: str) -> bool:
    try:
        config: dict[str, Any] = json.loads((Path(path) / "config.json").read_bytes())
    except (OSError, ValueError):
        return False
    layers = config.get("layer_types")
    if layers is not None:
        return any(kind != "full_attention" for kind in layers)
    return config.get("sliding_window") is not None and config.get("use_sliding_window", True)
