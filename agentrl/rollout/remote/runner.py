"""Episodes in worker processes: starts the workers, deals episodes to them, and starts a worker that died again.

Invariant: an episode runs in the worker that has the fewest at its start. The death of a worker fails its episodes and no
others; a worker that dies more than `RESTARTS` times within an hour ends the run.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
import msgspec
from anyio.abc import TaskStatus

from agentrl.client.config import SamplingConfig
from agentrl.concurrency import task_group
from agentrl.errors import ConfigError, LaunchError, RolloutWorkerDied, RunStopped, WorkflowError
from agentrl.inference.backend import Backend
from agentrl.processes.base import RESTART_WINDOW_S
from agentrl.rollout.remote.frames import WorkerSetup
from agentrl.rollout.remote.nodes import OpenNodes, StartWorker
from agentrl.rollout.remote.worker import TASK_NAME, RemoteWorker
from agentrl.types import Task, Trajectory, Turn

logger = logging.getLogger(__name__)

RESTARTS = 3
"""Times within `RESTART_WINDOW_S` that each worker is started again."""
WORKER_START_S = 300.0
"""Seconds that a worker has to import the workflow and to load the tokenizer."""


class RemoteRunner:
    """A `PolicyRunner` whose episodes run in workers."""

    def __init__(self, setup: WorkerSetup, *, num_workers: int, nodes: OpenNodes, log_dir: Path) -> None:
        """Describe the workers; worker n appends its output to `rollout-<n>.log` in `log_dir`."""
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
                    worker = RemoteWorker(name, link, backend, max_message_bytes=self._setup.max_message_bytes)
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
                if first:
                    raise
                how = f"{name} cannot be started again: {error}"
            now = anyio.current_time()
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
