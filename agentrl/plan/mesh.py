"""The mesh of a run's trainer: `auto` resolved, and what the model or the machine forbids.

Invariant: nothing is started; a mesh without problems here is one that every trainer process accepts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

from agentrl.algo.config import AlgorithmConfig
from agentrl.config import RunConfig
from agentrl.errors import ConfigError
from agentrl.plan.memory import GIB, trainer_memory
from agentrl.plan.model import ModelFacts
from agentrl.plan.places import trainer_places
from agentrl.trainer.config import ParallelConfig, TrainerConfig
from agentrl.trainer.parallel.shape import check_context_fit, check_tensor_fit

_AUTO_WAYS = (1, 2, 4, 8)
_AUTO_BYTES = 72 * GIB
"""Memory of a GPU of 80 GB that `auto` lets a trainer process take."""


@dataclass(frozen=True, slots=True)
class MeshChoice:
    """The meshes that a run file allows for the trainer of a model."""

    trainer: TrainerConfig
    model: ModelFacts
    context_limit: int | None
    """Tokens of the longest sample; None: not limited."""
    algorithm: AlgorithmConfig | None = None
    """It says which models stand beside the policy; None: none does."""

    def forms(self, *, searched: bool = True) -> list[ParallelConfig]:
        """Return every mesh of dp 1, with a number for each axis, the smallest tp x cp first.

        Meshes that the model forbids are left out, unless all are: the plan then names what is wrong. Without `searched`, or
        where the shape of the model is unknown, `tp: auto` and `cp: auto` are 1.
        """
        parallel = self.trainer.parallel
        ways = _AUTO_WAYS if searched and self.model.shape is not None else (1,)
        tps = ways if parallel.tp == "auto" else (parallel.tp,)
        cps = ways if parallel.cp == "auto" else (parallel.cp,)
        replicate = 1 if parallel.replicate == "auto" else parallel.replicate
        pairs = sorted(product(tps, cps), key=lambda pair: (pair[0] * pair[1], pair[0]))
        forms = [ParallelConfig(tp=tp, cp=cp, replicate=replicate) for tp, cp in pairs]
        return [form for form in forms if not _fit_problems(form, self.model)] or forms

    def that_fit(self, most: int, memory: float) -> dict[int, ParallelConfig]:
        """Return the mesh with the smallest tp x cp that fits, for each number of trainer GPUs up to `most`.

        dp takes the rest, whatever the run file says. Numbers that no mesh divides, or at which a process needs more than
        `memory` bytes, are left out.
        """
        found: dict[int, ParallelConfig] = {}
        if self.model.shape is None:
            return found
        for form in self.forms():
            others = other_axes(form)
            for gpus in range(others, most + 1, others):
                sized = form.model_copy(update={"dp": gpus // others})
                if gpus not in found and self._fits(sized, memory):
                    found[gpus] = sized
        return dict(sorted(found.items()))

    def resolved(self, places: int | None) -> ParallelConfig:
        """Return the mesh with a number for each axis.

        `tp: auto` and `cp: auto` take the smallest product with which a process fits on a GPU of 80 GB, and 1 where the
        shape of the model is unknown. `replicate: auto` is 1.

        Args:
            places: what `dp: auto` divides by the other axes; 0: one, on the CPU; None: dp is a number.

        Raises:
            ConfigError: the other axes do not divide the places, or no mesh fits.
        """
        forms = self.forms(searched=places != 0)
        candidates = [mesh for mesh in (self._with_dp(form, places) for form in forms) if mesh is not None]
        if not candidates:
            others = ", ".join(str(other_axes(form)) for form in forms)
            raise ConfigError(
                f"trainer.parallel.dp: auto, and the trainer has {places} place(s), which tp x cp x replicate of {others} "
                "does not divide; change one of the three, or give dp a number"
            )
        if self.model.shape is None or len(candidates) == 1:  # the plan shows the memory and the user decides
            return candidates[0]
        for mesh in candidates:
            if self._fits(mesh, _AUTO_BYTES):
                return mesh
        raise ConfigError(
            "trainer.parallel: auto finds no mesh with which a trainer process fits on a GPU of 80 GB; use more GPUs, lower "
            "trainer.microbatch_tokens, set trainer.gradient_checkpointing: true, or give each axis a number"
        )

    def _fits(self, mesh: ParallelConfig, memory: float) -> bool:
        assert self.model.shape is not None
        sized = self.trainer.model_copy(update={"parallel": mesh})
        return trainer_memory(sized, self.model.shape, self.context_limit, self.algorithm).total <= memory

    def _with_dp(self, form: ParallelConfig, places: int | None) -> ParallelConfig | None:
        """Return `form` with its dp; None where it does not divide the places that `dp: auto` takes."""
        dp, others = self.trainer.parallel.dp, other_axes(form)
        if dp == "auto":
            if places and places % others:
                return None
            dp = places // others if places else 1
        return form.model_copy(update={"dp": dp})


def mesh_choice(run: RunConfig, model: ModelFacts) -> MeshChoice:
    """Return the meshes that a run allows."""
    return MeshChoice(run.trainer, model, run.inference.context_limit, run.algorithm)


def other_axes(form: ParallelConfig) -> int:
    """Return the product of the axes but dp."""
    mesh = form.shape
    return mesh.world // mesh.dp


def has_auto(parallel: ParallelConfig) -> bool:
    """Return whether an axis is still to be resolved."""
    return "auto" in (parallel.dp, parallel.tp, parallel.cp, parallel.replicate)


def with_parallel(run: RunConfig, parallel: ParallelConfig) -> RunConfig:
    """Return `run` with another mesh."""
    return run.model_copy(update={"trainer": run.trainer.model_copy(update={"parallel": parallel})})


def with_mesh(run: RunConfig, model: ModelFacts, root: Path = Path("/")) -> RunConfig:
    """Return `run` with a number for each axis of its mesh; `dp: auto` takes the places that the other axes leave."""
    if not has_auto(run.trainer.parallel):
        return run
    places = trainer_places(run, root) if run.trainer.parallel.dp == "auto" else None
    return with_parallel(run, mesh_choice(run, model).resolved(places))


def mesh_problems(trainer: TrainerConfig, model: ModelFacts) -> list[str]:
    """Return what forbids the mesh, each with its field and the fix; of the model only where its shape is known."""
    return _timeout_problems(trainer) + _fit_problems(trainer.parallel, model)


def _fit_problems(parallel: ParallelConfig, model: ModelFacts) -> list[str]:
    mesh, shape = parallel.shape, model.shape
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
    if mesh.cp > 1 and model.has_windows:
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
