"""`cluster.split`: how many GPUs train and how many serve, resolved before anything starts, and corrected at a restart.

Invariant: a resolved run names its split in `trainer.parallel`, `inference.servers` and `cluster.split`, all three alike,
and its GPUs in `cluster.gpus`, so that reading its file again gives the same run. The mesh of the trainer is chosen with
the split: the smallest tp x cp with which a process fits. The formula: `agentrl_simulate.split`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from agentrl.config import RunConfig
from agentrl.errors import ConfigError
from agentrl.plan.memory import gpus_per_server
from agentrl.plan.mesh import mesh_choice, other_axes, with_mesh, with_parallel
from agentrl.plan.model import ModelFacts
from agentrl.plan.places import count_gpus, index_of
from agentrl.plan.resizing import RecordedSplit, read_splits
from agentrl.plan.splits import DEFAULT_GPU, ResolvedRun, Split, TimedSplit
from agentrl.trainer.config import ParallelConfig
from agentrl_simulate.costs import shape_of_run
from agentrl_simulate.plan.basis import assumed_basis, local_gpu, splittable_meshes
from agentrl_simulate.plan.moves import advise_move
from agentrl_simulate.predict import Cluster, cluster_splits

logger = logging.getLogger(__name__)


def resolve_run(run: RunConfig, model: ModelFacts, root: Path = Path("/"), *, resumes: bool = False) -> ResolvedRun:
    """Return the resolved run; the files that tell this machine's GPUs are under `root`.

    A run that `resumes` with `cluster.resize: at_restart` keeps the split that it last had, or takes the one that its own
    idle time asks for, as long as there are as many GPUs to divide.

    Raises:
        ConfigError: the GPUs are unknown or too few, no mesh fits, or a field contradicts the split.
    """
    _check_fields(run)
    total, gpu = _total(run, root), local_gpu(root) or DEFAULT_GPU
    run = run.model_copy(update={"cluster": run.cluster.model_copy(update={"gpus": total})})
    last = read_splits(run.run_dir)[-1:] if resumes and run.cluster.resize == "at_restart" else []
    if last and last[0].gpus == total:
        resolved = _continued(run, model, last[0], gpu, root)
    elif (named := _named_split(run, model, total)) is not None:
        resolved = _with_split(run, model, named, gpu)
    else:
        splits = run_splits(run, model, total, gpu)
        return ResolvedRun(_with_split(run, model, _agreeing_split(run, splits), gpu), tuple(splits))
    return ResolvedRun(resolved, () if model.shape is None else tuple(run_splits(resolved, model, total, gpu)))


def run_splits(run: RunConfig, model: ModelFacts, total: int, gpu: str) -> list[TimedSplit]:
    """Return the feasible splits of `total` GPUs, each with the mesh that it would have, the shortest step first.

    The dp of the run and its number of servers do not count.

    Raises:
        ConfigError: no split is feasible, or the shape of the model is unknown.
    """
    groups: dict[int, tuple[ParallelConfig, list[int]]] = {}
    for train, sized in splittable_meshes(run, model, total, gpu).items():
        mesh = sized.shape
        groups.setdefault(mesh.tp * mesh.cp, (sized, []))[1].append(train)
    if not groups:  # `cluster_splits` names what is missing
        groups[0] = mesh_choice(run, model).forms()[-1], []
    splits: list[TimedSplit] = []
    for sized, trains in groups.values():  # GPUs that share a sample change what a token costs
        basis = assumed_basis(with_parallel(run, sized), model, gpu)
        cluster = Cluster(gpus=total, train_sizes=trains, server_gpus=gpus_per_server(run.inference))
        splits += cluster_splits(cluster, shape_of_run(run), basis.costs, basis.source)
    return sorted(splits, key=lambda one: one.order)


def with_best_mesh(run: RunConfig, model: ModelFacts, total: int, gpu: str) -> RunConfig:
    """Return `run` with the mesh of the best split of `total` GPUs, for `simulate --gpus`; raises as `run_splits`."""
    parallel = run.trainer.parallel
    if "auto" not in (parallel.tp, parallel.cp):
        return with_mesh(with_parallel(run, parallel.model_copy(update={"dp": 1})), model)
    best = run_splits(run, model, total, gpu)[0].split.train
    return with_parallel(run, splittable_meshes(run, model, total, gpu)[best])


def _continued(run: RunConfig, model: ModelFacts, last: RecordedSplit, gpu: str, root: Path) -> RunConfig:
    before = _with_split(run, model, last.split, gpu)
    move = advise_move(before, model, root)
    if move is None:
        logger.info("cluster.resize: at_restart: the run keeps its split (%s)", last.split)
        return before
    logger.warning("cluster.resize: at_restart: %s", move)
    return _with_split(run, model, move.better, gpu)


def _check_fields(run: RunConfig) -> None:
    split, inference, parallel = run.cluster.split, run.inference, run.trainer.parallel
    assert split is not None
    if inference.backend != "sglang" or inference.urls or inference.device == "cpu" or run.trainer.device == "cpu":
        raise ConfigError(
            "cluster.split divides GPUs between the trainer and SGLang servers that the run launches; remove it, or set "
            "inference.backend: sglang without inference.urls, and no device to cpu"
        )
    named = split.train != "auto" and split.rollout != "auto"
    if inference.servers != 1 and not (named and inference.servers * gpus_per_server(run.inference) == split.rollout):
        raise ConfigError("inference.servers: cluster.split sets the number of servers; remove one of the two")
    resolved = named and "auto" not in (parallel.tp, parallel.cp, parallel.replicate)
    if parallel.dp not in (1, "auto") and not (resolved and parallel.shape.world == split.train):
        raise ConfigError("trainer.parallel.dp: cluster.split sets it; remove one of the two")


def _total(run: RunConfig, root: Path) -> int:
    split = run.cluster.split
    if run.cluster.gpus != "auto":
        return run.cluster.gpus
    if split is not None and split.train != "auto" and split.rollout != "auto":
        return split.train + split.rollout
    count = count_gpus(root)
    if run.cluster.launcher != "local" or not count:
        found = "their number is unknown" if run.cluster.launcher != "local" or count is None else "this machine has none"
        raise ConfigError(f"cluster.gpus: auto, and cluster.split needs the number of GPUs, but {found}; give a number")
    return count


def _named_split(run: RunConfig, model: ModelFacts, total: int) -> Split | None:
    """Return the split whose two numbers the run file gives; None where one of them is `auto`."""
    split, ways = run.cluster.split, gpus_per_server(run.inference)
    assert split is not None
    if split.train == "auto" or split.rollout == "auto":
        return None
    others = min(form.shape.world for form in mesh_choice(run, model).forms())
    if split.train + split.rollout > total or split.train % others or split.rollout % ways:
        raise ConfigError(
            f"cluster.split: {{train: {split.train}, rollout: {split.rollout}}} of {total} GPUs: their sum must not exceed "
            f"that, train must be a multiple of {others} (trainer.parallel) and rollout of {ways} (GPUs of a server)"
        )
    return Split(train=split.train, rollout=split.rollout)


def _agreeing_split(run: RunConfig, splits: Sequence[TimedSplit]) -> Split:
    """Return the best split that agrees with the number of the run file, if it gives one."""
    split = run.cluster.split
    assert split is not None
    for one in splits:
        if split.train in ("auto", one.split.train) and split.rollout in ("auto", one.split.rollout):
            return one.split
    possible = ", ".join(str(one.split) for one in splits[:3])
    raise ConfigError(
        f"cluster.split: {{train: {split.train}, rollout: {split.rollout}}} does not fit: it must not exceed the GPUs, "
        f"match trainer.parallel and the GPUs of a server ({gpus_per_server(run.inference)}), and leave the trainer enough "
        f"memory; possible are: {possible}"
    )


def _with_split(run: RunConfig, model: ModelFacts, split: Split, gpu: str) -> RunConfig:
    """Return `run` with the fields that the split sets; on one machine the servers take the GPUs after the trainer's."""
    sized, inference, asked = with_parallel(run, _mesh_of(run, model, split, gpu)), run.inference, run.cluster.split
    assert asked is not None
    changed: dict[str, object] = {"servers": split.rollout // gpus_per_server(run.inference)}
    first = index_of(run.trainer.device)
    before = () if asked.train == "auto" else (f"cuda:{first + asked.train}",)  # in a file that was resolved before
    if run.cluster.launcher == "local" and inference.device in ("auto", "cuda", *before):
        changed["device"] = f"cuda:{first + split.train}"
    named = asked.model_copy(update={"train": split.train, "rollout": split.rollout})
    return sized.model_copy(
        update={
            "inference": inference.model_copy(update=changed),
            "cluster": run.cluster.model_copy(update={"split": named}),
        }
    )


def _mesh_of(run: RunConfig, model: ModelFacts, split: Split, gpu: str) -> ParallelConfig:
    """Return a mesh of the trainer's GPUs; where the file leaves no choice, the plan shows its memory."""
    forms = mesh_choice(run, model).forms()
    if len(forms) == 1:
        return forms[0].model_copy(update={"dp": split.train // other_axes(forms[0])})
    meshes = splittable_meshes(run, model, split.total, gpu)
    if split.train not in meshes:
        raise ConfigError(
            f"trainer.parallel: auto finds no mesh of {split.train} GPU(s) ({gpu}) on which a trainer process fits, beside "
            f"servers on {split.rollout}; raise cluster.split.train, lower trainer.microbatch_tokens, set "
            "trainer.gradient_checkpointing: true, or give tp and cp numbers"
        )
    return meshes[split.train]
