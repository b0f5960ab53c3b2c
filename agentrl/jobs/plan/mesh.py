"""The mesh of a run's trainer: `auto` resolved, and what the model or the machine forbids.

Invariant: nothing is started; a mesh without problems here is one that every trainer process accepts.
"""

from __future__ import annotations

from pathlib import Path

from agentrl.config import RunConfig
from agentrl.errors import ConfigError
from agentrl.jobs.plan.gpus import trainer_gpus


def with_mesh(run: RunConfig, root: Path = Path("/")) -> RunConfig:
    """Return `run` with a number for each axis of `trainer.parallel` that is `auto`.

    `dp: auto` takes the GPUs that the other axes leave, from `trainer.device` to the next GPU of a server, and 1 on the CPU;
    the other axes become 1.

    Raises:
        ConfigError: the number of GPUs is unknown, as it is on a Ray cluster, or the other axes do not divide it.
    """
    parallel = run.trainer.parallel
    if "auto" not in (parallel.dp, parallel.tp, parallel.cp, parallel.replicate):
        return run
    tp, cp, replicate = (1 if ways == "auto" else ways for ways in (parallel.tp, parallel.cp, parallel.replicate))
    dp = _remaining(run, tp * cp * replicate, root) if parallel.dp == "auto" else parallel.dp
    resolved = parallel.model_copy(update={"dp": dp, "tp": tp, "cp": cp, "replicate": replicate})
    return run.model_copy(update={"trainer": run.trainer.model_copy(update={"parallel": resolved})})


def _remaining(run: RunConfig, others: int, root: Path) -> int:
    if run.cluster.launcher == "ray" and run.trainer.device != "cpu":
        raise ConfigError(
            "trainer.parallel.dp: auto counts the GPUs of one machine; under cluster.launcher: ray give a number"
        )
    gpus = trainer_gpus(run, root)
    if gpus is None:
        raise ConfigError("trainer.parallel.dp: auto, and the number of this machine's GPUs is unknown; give a number")
    if gpus == 0:
        return 1
    if gpus % others:
        raise ConfigError(
            f"trainer.parallel.dp: auto, and the trainer has {gpus} GPU(s), which tp x cp x replicate of {others} does not "
            "divide; change one of the three, or give dp a number"
        )
    return gpus // others
