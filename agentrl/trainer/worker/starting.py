"""Starts the ranks of a trainer on this machine or a cluster, or waits for those of a scheduler."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path

from agentrl.processes.base import Launcher, ProcessSpec
from agentrl.processes.config import ClusterConfig
from agentrl.processes.link import Link
from agentrl.processes.machine import LOOPBACK, interface_of
from agentrl.processes.start import attached_links, launched_links, local_links
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.worker.place import RankPlace
from agentrl.trainer.worker.ranks import rank_log

WORKER_MODULE = "agentrl.trainer.worker.process"


def started_ranks(
    config: TrainerConfig, cluster: ClusterConfig, launcher: Launcher, log_path: Path
) -> AbstractAsyncContextManager[Sequence[Link]]:
    """Return the block in which the ranks of `trainer.parallel` run, and which yields their links, rank 0 first."""
    world = config.parallel.shape.world
    if cluster.launcher == "attach":
        return attached_links(cluster, world)
    environment = {"OMP_NUM_THREADS": str(config.threads), "TOKENIZERS_PARALLELISM": "false"}
    if cluster.launcher == "local":
        return _ranks_with_pipes(world, log_path, environment)
    return _launched_ranks(world, cluster, launcher, log_path, environment, device=config.device)


@asynccontextmanager
async def _ranks_with_pipes(world: int, log_path: Path, environment: Mapping[str, str]) -> AsyncGenerator[Sequence[Link]]:
    # Not in a temporary directory, which a killed driver would leave behind.
    store = log_path.with_suffix(".ranks").absolute()
    # The name of a machine often stands for its address in a network, and gloo would listen there.
    loopback = interface_of(LOOPBACK)
    environment = environment if loopback is None else {**environment, "GLOO_SOCKET_IFNAME": loopback}
    specs = [
        _rank_spec(rank, log_path, environment, RankPlace(rank=rank, world=world, store=str(store)).arguments())
        for rank in range(world)
    ]
    _remove_store(store)
    try:
        async with local_links(specs) as links:
            yield links
    finally:
        _remove_store(store)


@asynccontextmanager
async def _launched_ranks(
    world: int, cluster: ClusterConfig, launcher: Launcher, log_path: Path, environment: Mapping[str, str], *, device: str
) -> AsyncGenerator[Sequence[Link]]:
    """Yield ranks that each reserve a GPU, unless `device` is `cpu`, or `auto` and the launcher has none."""
    gpus = 0 if device == "cpu" or (device == "auto" and not await launcher.reserves_gpus()) else 1
    specs = [
        _rank_spec(rank, log_path, {**environment, "RANK": str(rank), "WORLD_SIZE": str(world)}, gpus=gpus)
        for rank in range(world)
    ]
    async with launched_links(launcher, cluster, specs, names="trainer ranks") as links:
        yield links


def _rank_spec(
    rank: int, log_path: Path, environment: Mapping[str, str], arguments: Sequence[str] = (), *, gpus: int = 0
) -> ProcessSpec:
    return ProcessSpec(
        name=f"trainer rank {rank}",
        role="trainer",
        command=(sys.executable, "-m", WORKER_MODULE, *arguments),
        environment=environment,
        log_path=rank_log(log_path, rank),
        gpus=gpus,
    )


def _remove_store(store: Path) -> None:
    with suppress(OSError):  # it is not there, or neither is its folder
        store.unlink()
