"""Episodes in worker processes of this machine or of the nodes of a Ray cluster, which each join over TCP.

Invariant: an episode runs in the worker that has the fewest at its start. The death of a worker fails its episodes and no
others; it starts again, and one that dies more than `RESTARTS` times within an hour ends the run. Each
worker ends with the block that started it, and by itself within the limit that it was started with.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TypeAlias

import anyio
import msgspec
from anyio.abc import TaskStatus

from agentrl.client.config import SamplingConfig
from agentrl.errors import ConfigError, LaunchError, RolloutWorkerDied, RunStopped, WorkflowError
from agentrl.inference.backend import Backend
from agentrl.processes.base import RESTART_WINDOW_S, RESTARTS, Launcher, ProcessSpec, module_path
from agentrl.processes.config import ClusterConfig
from agentrl.processes.link import Link
from agentrl.processes.meeting import check_reachable
from agentrl.processes.ray import node_hosts, open_ray
from agentrl.processes.start import launched_links, local_links
from agentrl.rollout.remote.frames import WorkerSetup
from agentrl.rollout.remote.worker import LOST_S, TASK_NAME, RemoteWorker
from agentrl.support.concurrency import task_group
from agentrl.types import Task, Trajectory, Turn

LEAVE_S = 3.0
"""Seconds that episodes and the workflow get to end after the driver has left; then the worker ends itself."""
_EXIT_S = 1.0
"""Seconds that its process gets for that end."""
StartWorker: TypeAlias = Callable[[str, Path], AbstractAsyncContextManager[Link]]
"""Starts the worker of a name, which logs to a file; it ends with the block."""
OpenNodes: TypeAlias = Callable[[], AbstractAsyncContextManager[StartWorker]]
logger = logging.getLogger(__name__)

WORKER_START_S = 300.0
"""Seconds that a worker has to import the workflow and to load the tokenizer."""


@asynccontextmanager
async def this_machine() -> AsyncGenerator[StartWorker]:
    """Yield what starts workers as processes of this machine."""
    yield _local_worker


@asynccontextmanager
async def ray_nodes(config: ClusterConfig) -> AsyncGenerator[StartWorker]:
    """Yield what starts workers on the nodes of a Ray cluster; they join the driver at the host of `cluster.listen`."""
    async with open_ray(config) as launcher:
        check_reachable(config, await node_hosts())
        yield partial(launched_worker, launcher, config)


@asynccontextmanager
async def launched_worker(
    launcher: Launcher, config: ClusterConfig, name: str, log_path: Path, *, leave_s: float = LEAVE_S
) -> AsyncGenerator[Link]:
    """Yield a worker that `launcher` starts and that joins at the host of `cluster.listen`, on a port of its own."""
    spec = _worker_spec(name, log_path, leave_s)
    async with launched_links(launcher, config, [spec], names=name, port=0, leave_s=leave_s + _EXIT_S) as [link]:
        yield link


@asynccontextmanager
async def _local_worker(name: str, log_path: Path) -> AsyncGenerator[Link]:
    async with local_links([_worker_spec(name, log_path, LEAVE_S)], leave_s=LEAVE_S + _EXIT_S) as [link]:
        yield link


def _worker_spec(name: str, log_path: Path, leave_s: float) -> ProcessSpec:
    return ProcessSpec(
        name=name,
        role="rollout",
        command=(sys.executable, "-P", "-m", "agentrl.rollout.remote.process", f"--leave={leave_s}"),
        environment={"PYTHONPATH": module_path()},
        log_path=log_path,
    )


class RemoteRunner:
    """A `PolicyRunner` whose episodes run in workers."""

    def __init__(
        self, setup: WorkerSetup, *, num_workers: int, nodes: OpenNodes, log_dir: Path, lost_s: float = LOST_S
    ) -> None:
        """Describe the workers; worker n appends its output to `rollout-<n>.log` in `log_dir`.

        A worker that owes an episode and stays silent for `lost_s` seconds counts as dead.
        """
        self._lost_s = lost_s
        self._setup, self._num_workers, self._nodes, self._log_dir = setup, num_workers, nodes, log_dir
        self._workers: dict[int, RemoteWorker] = {}
        self._arrived = anyio.Event()

    @asynccontextmanager
    async def opened(self, backend: Backend) -> AsyncGenerator[None]:
        """Start the workers, which load the workflow, and keep them while the block runs.

        Raises:
            AgentRLError: the error of a worker that cannot load the workflow or start.
            RunStopped: a worker is not ready in time, or dies again and again.
            InvariantError: a worker breaks the protocol, or a model call met an error that ends the run.

        Cancellation: the workers end, within 5 seconds.
        """
        async with self._nodes() as start, task_group() as workers:
            async with task_group() as starting:
                for index in range(self._num_workers):
                    keep = partial(workers.start, self._keep, index, start, backend, name=TASK_NAME)
                    starting.start_soon(keep, name=TASK_NAME)
            yield
            workers.cancel_scope.cancel()

    async def play(
        self, task: Task, *, episode_id: str, sampling: SamplingConfig, on_turn: Callable[[Turn], None]
    ) -> Trajectory:
        """Return the trajectory of one episode; a failed one has `failure` set, such as where its worker died.

        Cancellation: a workflow that ignores it is left to its worker after 5 seconds.
        """
        worker = await self._least_busy()
        return await worker.play(task, episode_id=episode_id, sampling=sampling, on_turn=on_turn)

    async def score(self, task: Task, episodes: tuple[Trajectory, ...]) -> tuple[Trajectory, ...]:
        worker = await self._least_busy()
        return await worker.score(task, episodes)

    async def _least_busy(self) -> RemoteWorker:
        while not (alive := [worker for worker in self._workers.values() if worker.alive]):
            await self._arrived.wait()  # for as long as a new start may take: then the run ends
        return min(alive, key=lambda worker: worker.num_episodes)

    async def _keep(self, index: int, start: StartWorker, backend: Backend, *, task_status: TaskStatus[None]) -> None:
        name, log_path = f"rollout worker {index}", self._log_dir / f"rollout-{index}.log"
        deaths: list[float] = []
        first = True
        while True:
            try:
                async with start(name, log_path) as link:
                    max_bytes = self._setup.max_message_bytes
                    worker = RemoteWorker(name, link, backend, max_message_bytes=max_bytes, lost_s=self._lost_s)
                    await self._set_up(worker, name, log_path)
                    self._arrive(index, worker)
                    if first:
                        task_status.started()
                        first = False
                    try:
                        how = f"{name} died: {await worker.serve()}"
                    finally:
                        del self._workers[index]
            except RolloutWorkerDied as error:
                how = str(error)
            except (LaunchError, ConfigError, WorkflowError) as error:  # from its start, or from its setup
                # At its first start nothing has worked yet, so the user reads the error itself; later the run may go on
                # with the others.
                if first:
                    raise
                how = f"{name} cannot be started again: {error}"
            now = anyio.current_time()
            # Only deaths of the last hour count: a run of weeks survives one now and then, and a workflow that always
            # crashes ends it.
            deaths = [*(death for death in deaths if now - death < RESTART_WINDOW_S), now]
            if len(deaths) > RESTARTS:
                raise RunStopped(f"{how}\nIt has died {len(deaths)} times within an hour, so the run ends")
            logger.warning("%s\nIts episodes have failed, and it is started again", how)

    async def _set_up(self, worker: RemoteWorker, name: str, log_path: Path) -> None:
        with anyio.move_on_after(WORKER_START_S) as deadline:
            await worker.set_up(msgspec.structs.replace(self._setup, name=name))
        if deadline.cancelled_caught:
            raise RunStopped(
                f"{name} has not loaded {self._setup.workflow} within {WORKER_START_S:g} s; its output is in {log_path}"
            )

    def _arrive(self, index: int, worker: RemoteWorker) -> None:
        self._workers[index] = worker
        self._arrived.set()
        self._arrived = anyio.Event()
