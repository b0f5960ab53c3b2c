"""`cluster.split`: how many GPUs train and how many serve, resolved before anything starts, and corrected at a restart.

Invariant: a resolved run names its split in `trainer.parallel.dp`, `inference.servers` and `cluster.split`, all three alike,
so that reading its file again gives the same run. The formula and its reasons: `agentrl.cluster.split`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.cluster.split import BusyShares, RankedSplit, Split, SplitMove, advise_resize
from agentrl.config import RunConfig
from agentrl.errors import ConfigError
from agentrl.jobs.plan.basis import DEFAULT_GPU, assumed_basis, gpus_per_server, local_gpu, sizes_that_fit, with_dp
from agentrl.jobs.plan.gpus import count_gpus
from agentrl.jobs.plan.memory import model_shape_of
from agentrl.jobs.plan.mesh import with_mesh
from agentrl.runs.reading import read_metrics
from agentrl.simulate.costs.settings import shape_of_run
from agentrl.simulate.predict import Cluster, rank_cluster

WINDOW_STEPS = 10
"""Steps of a window in which idle time is measured."""


def resolve_run(run: RunConfig, root: Path = Path("/"), *, resumes: bool = False) -> RunConfig:
    """Return `run` with numbers in place of each `auto` of its split and of its mesh.

    Args:
        run: the run.
        root: of the files that tell this machine's GPUs.
        resumes: whether the run continues; with `cluster.resize: at_restart` it then takes the split that its own idle time
            asks for.

    Raises:
        ConfigError: the GPUs are unknown or too few, or a field contradicts the split.
    """
    if run.cluster.split is None:
        return with_mesh(run, root)
    _check_fields(run)
    # The other axes of the mesh, with dp left to the split.
    run = with_mesh(with_dp(run, 1), root)
    chosen = _named_split(run, root) or _agreeing_split(run, _ranked(run, root))
    if resumes and run.cluster.resize == "at_restart":
        move = advise_move(_with_split(run, chosen), root)
        chosen = chosen if move is None else move.better
    return _with_split(run, chosen)


def split_rows(run: RunConfig, root: Path = Path("/")) -> list[tuple[str, str]]:
    """Return the plan's rows on the split of a resolved run; none where the run file has no `cluster.split`."""
    if run.cluster.split is None:
        return []
    split, gpu = _split_of(run), local_gpu(root)
    after = {"off": "", "advise": "; the end of the run advises", "at_restart": "; a resumed run corrects it"}
    row = ("split", f"{split} of {_total(run, root)}{after[run.cluster.resize]}")
    if model_shape_of(run.model.local_path or run.model.path) is None:
        return [row]
    ranked = _ranked(run, root)
    best = [*(one for one in ranked if one.split == split), *(one for one in ranked if one.split != split)][:3]
    times = "; ".join(f"{one.split}: {one.rollout_s:.3g} s of rollouts, {one.train_s:.3g} s of training" for one in best)
    source = f"data sheet of the {gpu or DEFAULT_GPU}{'' if gpu else ', as the GPU is unknown'}"
    return [row, ("", f"formula, for a step, by the {source}: {times}")]


def advise_move(run: RunConfig, root: Path = Path("/")) -> SplitMove | None:
    """Return the better split on which the last two windows of a run's steps agree; None: there is none.

    Args:
        run: the resolved run, whose directory is read.
        root: of the files that tell this machine's GPU.
    """
    has_run = (run.run_dir / "metrics.jsonl").is_file()
    if not has_run or run.inference.backend != "sglang" or run.inference.urls:
        return None
    windows = busy_windows([line for line in read_metrics(run.run_dir) if line["event"] == "step"])
    if len(windows) < 2:
        return None
    now = _split_of(run)
    sizes = sizes_that_fit(run, now.total, local_gpu(root) or DEFAULT_GPU)
    return advise_resize(now, windows, train_sizes=sizes, server_gpus=gpus_per_server(run))


def busy_windows(steps: Sequence[Mapping[str, Any]]) -> list[BusyShares]:
    """Return how busy both sides were in each full window of `step` lines, the newest last.

    The servers count as saturated in the step with the most tokens/s, so a server that never was looks busier than it is.
    """
    most = max((line["tokens_per_s"] for line in steps), default=0.0)
    first = len(steps) % WINDOW_STEPS
    windows = [steps[at : at + WINDOW_STEPS] for at in range(first, len(steps), WINDOW_STEPS)]
    return [
        BusyShares(
            trainer=sum(line.get("trainer_busy_share", 0.0) for line in window) / WINDOW_STEPS,
            servers=sum(line["tokens_per_s"] for line in window) / WINDOW_STEPS / most,
        )
        for window in windows
        if most
    ]


def _check_fields(run: RunConfig) -> None:
    split, inference = run.cluster.split, run.inference
    assert split is not None
    if inference.backend != "sglang" or inference.urls or inference.device == "cpu" or run.trainer.device == "cpu":
        raise ConfigError(
            "cluster.split divides GPUs between the trainer and SGLang servers that the run launches; remove it, or set "
            "inference.backend: sglang without inference.urls, and no device to cpu"
        )
    named = split.train != "auto" and split.rollout != "auto"
    if run.inference.servers != 1 and not (named and run.inference.servers * gpus_per_server(run) == split.rollout):
        raise ConfigError("inference.servers: cluster.split sets the number of servers; remove one of the two")
    if run.trainer.parallel.dp not in (1, "auto") and not (named and run.trainer.parallel.shape.world == split.train):
        raise ConfigError("trainer.parallel.dp: cluster.split sets it; remove one of the two")


def _total(run: RunConfig, root: Path) -> int:
    """Return the GPUs to divide."""
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


def _ranked(run: RunConfig, root: Path) -> list[RankedSplit]:
    gpu, total = local_gpu(root) or DEFAULT_GPU, _total(run, root)
    cluster = Cluster(gpus=total, train_sizes=sizes_that_fit(run, total, gpu), server_gpus=gpus_per_server(run))
    basis = assumed_basis(run, gpu)
    return rank_cluster(cluster, shape_of_run(run), basis.costs, basis.source)


def _named_split(run: RunConfig, root: Path) -> Split | None:
    """Return the split whose two numbers the run file gives; None where one of them is `auto`."""
    split, mesh, ways = run.cluster.split, run.trainer.parallel.shape, gpus_per_server(run)
    assert split is not None
    if split.train == "auto" or split.rollout == "auto":
        return None
    others, total = mesh.world // mesh.dp, _total(run, root)
    if split.train + split.rollout > total or split.train % others or split.rollout % ways:
        raise ConfigError(
            f"cluster.split: {{train: {split.train}, rollout: {split.rollout}}} of {total} GPUs: their sum must not exceed "
            f"that, train must be a multiple of {others} (trainer.parallel) and rollout of {ways} (GPUs of a server)"
        )
    return Split(train=split.train, rollout=split.rollout)


def _agreeing_split(run: RunConfig, ranked: Sequence[RankedSplit]) -> Split:
    """Return the best split that agrees with the number of the run file, if it gives one."""
    split = run.cluster.split
    assert split is not None
    for one in ranked:
        if split.train in ("auto", one.split.train) and split.rollout in ("auto", one.split.rollout):
            return one.split
    possible = ", ".join(str(one.split) for one in ranked[:3])
    raise ConfigError(
        f"cluster.split: {{train: {split.train}, rollout: {split.rollout}}} does not fit: it must not exceed the GPUs, "
        f"match trainer.parallel and the GPUs of a server ({gpus_per_server(run)}), and leave the trainer enough memory; "
        f"possible are: {possible}"
    )


def _split_of(run: RunConfig) -> Split:
    return Split(train=run.trainer.parallel.shape.world, rollout=run.inference.servers * gpus_per_server(run))


def _with_split(run: RunConfig, split: Split) -> RunConfig:
    """Return `run` with the fields that the split sets; on one machine the servers take the GPUs after the trainer's."""
    mesh, inference = run.trainer.parallel.shape, run.inference
    sized = with_dp(run, split.train // (mesh.world // mesh.dp))
    changed: dict[str, object] = {"servers": split.rollout // gpus_per_server(run)}
    if run.cluster.launcher == "local" and inference.device in ("auto", "cuda"):
        first = int(run.trainer.device.partition(":")[2] or 0)
        changed["device"] = f"cuda:{first + split.train}"
    assert run.cluster.split is not None
    named = run.cluster.split.model_copy(update={"train": split.train, "rollout": split.rollout})
    return sized.model_copy(
        update={
            "inference": inference.model_copy(update=changed),
            "cluster": run.cluster.model_copy(update={"split": named}),
        }
    )
