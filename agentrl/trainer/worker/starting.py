"""Starts the ranks of a trainer on this machine; their standard streams carry the frames.

Invariant: no rank outlives the block that started it.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
from anyio.streams.stapled import StapledByteStream

from agentrl.cluster.base import ProcessSpec
from agentrl.cluster.local import LOOPBACK, LocalChild, LocalLauncher
from agentrl.cluster.network import interface_of
from agentrl.concurrency import task_group
from agentrl.trainer.worker.place import RankPlace
from agentrl.trainer.worker.processes import RankEnd, rank_log
from agentrl.trainer.worker.signs import pulse

WORKER_MODULE = "agentrl.trainer.worker.process"


class LocalRank:
    """A rank on this machine; a `WorkerRank`."""

    def __init__(self, child: LocalChild) -> None:
        """Speak to the standard streams of `child`."""
        self._child = child
        self.where = child.where
        self.pid = child.pid
        self.host: str | None = child.host
        self.stream = StapledByteStream(child.stdin, child.stdout)

    async def ended(self) -> RankEnd:
        """Wait for the exit code."""
        end = await self._child.ended()
        return RankEnd(reason=f"{end.reason}{await self.log_end()}", is_cause=end.was_killed)

    async def log_end(self) -> str:
        """Return the end of its log."""
        return f"; the end of {self._child.spec.log_path}:\n{await self._child.log_tail()}"

    def pulse(self) -> int | None:
        """Return a number that grows while its process works."""
        return pulse(self.pid)

    async def dismiss(self) -> None:
        """Close its standard input."""
        await self._child.stdin.aclose()

    def kill(self) -> None:
        """Kill it."""
        self._child.kill()


@asynccontextmanager
async def local_ranks(specs: Sequence[ProcessSpec]) -> AsyncGenerator[Sequence[LocalRank]]:
    """Yield one rank for each of `specs`, which are processes of this machine; they end with the block.

    Raises:
        ConfigError: a log cannot be written.
        LaunchError: a process cannot be started.

    Cancellation: they are killed.
    """
    children = await LocalLauncher().start(specs)
    try:
        yield [LocalRank(child) for child in children]
    finally:
        with anyio.CancelScope(shield=True):
            async with task_group() as reaping:
                for child in children:
                    reaping.start_soon(child.reap)


@asynccontextmanager
async def ranks_with_pipes(
    world: int, log_path: Path, environment: Mapping[str, str]
) -> AsyncGenerator[Sequence[LocalRank]]:
    """Yield `world` ranks that find each other through a file beside their logs; they end with the block.

    Raises:
        ConfigError: a log cannot be written.
        LaunchError: a process cannot be started.

    Cancellation: they are killed.
    """
    # Beside the logs and not in a temporary directory, which a killed driver would leave behind.
    store = log_path.with_suffix(".ranks").absolute()
    # The name of a machine often stands for its address in a network, and gloo would listen there.
    loopback = interface_of(LOOPBACK)
    environment = environment if loopback is None else {**environment, "GLOO_SOCKET_IFNAME": loopback}
    specs = [
        rank_spec(rank, log_path, RankPlace(rank=rank, world=world, store=str(store)).arguments(), environment)
        for rank in range(world)
    ]
    _remove_store(store)
    try:
        async with local_ranks(specs) as ranks:
            yield ranks
    finally:
        _remove_store(store)


def rank_spec(
    rank: int, log_path: Path, arguments: Sequence[str], environment: Mapping[str, str], *, gpus: int = 0
) -> ProcessSpec:
    """Return what a launcher starts for one rank."""
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
