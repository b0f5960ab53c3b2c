"""A rollout worker: `python -m agentrl.rollout.remote.process` plays the episodes that the driver gives it.

Invariant: each episode that the driver starts ends with one message, unless the process ends. The process ends when its
driver does, within `--leave` seconds, whatever its workflow does. A thread writes the messages, so that the warning about
code that blocks the event loop reaches the driver while it blocks.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial

import anyio
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectReceiveStream

from agentrl.client.config import SamplingConfig
from agentrl.episode.codec import pack_score, pack_trajectory, pack_turn, unpack_trajectory
from agentrl.errors import AgentRLError, ConfigError, InvariantError, WorkflowError
from agentrl.processes.frames import READ_BYTES, ByteSource, FrameWriter, read_frames, read_in_thread, take_standard_streams
from agentrl.processes.joining import RankNumbers, join_at
from agentrl.processes.watchdog.delays import tuned_garbage_collector
from agentrl.processes.watchdog.loop import watched_loop
from agentrl.processes.watchdog.signals import run_without_waiting
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.episode import LocalRunner
from agentrl.rollout.failure import RUN_ENDING, episode_failure
from agentrl.rollout.group import run_recorded
from agentrl.rollout.remote.calls import DriverBackend
from agentrl.rollout.remote.frames import (
    MAX_MESSAGE_BYTES,
    CallAnswered,
    CallFailed,
    CallPiece,
    CancelEpisode,
    EpisodeCancelled,
    EpisodeEnded,
    EpisodeRaised,
    GroupScored,
    ScoreGroup,
    StartEpisode,
    ToDriver,
    ToWorker,
    TurnRecorded,
    WorkerLogged,
    WorkerReady,
    WorkerRefused,
    WorkerSetup,
    encode_message,
    read_to_worker,
    unpack_task,
)
from agentrl.support.concurrency import task_group
from agentrl.support.foreign import shortened
from agentrl.support.user_code import boundary
from agentrl.tokens.renderer import Renderer
from agentrl.types import StopReason, Trajectory, Turn
from agentrl.workflow import load_workflow

logger = logging.getLogger(__name__)

WORKER_JOIN_S = 60.0
"""Seconds that a worker tries to join its driver, which listens before it starts the worker."""
_MAX_LOGGED_CHARS = 8_000


def sender(writer: FrameWriter, max_bytes: int = MAX_MESSAGE_BYTES) -> Callable[[ToDriver], None]:
    """Return what sends a message to the driver, and raises WorkflowError where it is longer than `max_bytes`."""
    return lambda message: writer.send(encode_message(message, max_bytes))


class _DriverLog(logging.Handler):
    """Sends warnings to the driver, from whichever thread logs them."""

    def __init__(self, send: Callable[[ToDriver], None]) -> None:
        super().__init__(logging.WARNING)
        self._send_message = send

    def emit(self, record: logging.LogRecord) -> None:
        self._send_message(WorkerLogged(record.levelno, record.getMessage()[:_MAX_LOGGED_CHARS]))


class RolloutWorker:
    """The episodes of one worker."""

    def __init__(self, setup: WorkerSetup, send: Callable[[ToDriver], None]) -> None:
        self._send = send
        self._backend = DriverBackend(send)
        self._stall_timeout_s = setup.stall_timeout_s
        renderer = Renderer.load(
            setup.model, template_options=json.loads(setup.template_options), tool_format=setup.tool_format
        )
        workflow = load_workflow(setup.workflow, json.loads(setup.workflow_args))
        self._name = workflow.name
        self._runner = LocalRunner(
            workflow,
            renderer=renderer.within(setup.max_context),
            rollout=RolloutConfig.model_validate_json(setup.rollout),
            seed=setup.seed,
        )
        self._scopes: dict[int, anyio.CancelScope] = {}

    async def serve(self, frames: Iterator[bytes], leave_s: float) -> None:
        """Play episodes until `frames` end; the process ends `leave_s` seconds after that, if this has not returned."""
        ended = threading.Event()
        async with watched_loop(self._stall_timeout_s), AsyncExitStack() as stack:
            with refusals(self._send), boundary(WorkflowError, f"{self._name}.opened"):
                await stack.enter_async_context(self._runner.opened(self._backend))
            # After `opened`: an episode must not meet a workflow whose pools are not there yet.
            self._send(WorkerReady(time.perf_counter()))
            async with task_group() as tasks:
                with _messages_of(frames, ended, leave_s) as messages:
                    async for message in messages:
                        self._handle(tasks, message)
                tasks.cancel_scope.cancel()
        ended.set()

    def _handle(self, tasks: TaskGroup, message: ToWorker) -> None:
        match message:
            case StartEpisode() | ScoreGroup():
                # Made here and not in the task: a cancellation may come before the task has begun.
                scope = self._scopes[message.number] = anyio.CancelScope()
                tasks.start_soon(self._work_on, message, scope)
            case CancelEpisode():
                if message.number in self._scopes:
                    self._scopes[message.number].cancel()
            case CallAnswered() | CallPiece() | CallFailed():
                self._backend.deliver(message)
            case WorkerSetup():
                raise InvariantError("the rollout worker was set up twice")

    async def _work_on(self, message: StartEpisode | ScoreGroup, scope: anyio.CancelScope) -> None:
        number = message.number
        cancelled = True
        try:
            with scope:
                if isinstance(message, StartEpisode):
                    self._send_end(number, await self._trajectory(message))
                else:
                    self._send_scores(number, await self._scored(message))
                cancelled = False
        except RUN_ENDING as error:
            logger.exception("the run ends")  # for the log of this worker
            self._send(EpisodeRaised(number, type(error).__name__, shortened(str(error))))
            cancelled = False
        finally:
            del self._scopes[number]
        if cancelled:
            self._send(EpisodeCancelled(number))

    def _send_end(self, number: int, trajectory: Trajectory) -> None:
        """Send the trajectory; where it is too long, or a value of the workflow cannot be sent, a failure without turns."""
        try:
            with boundary(WorkflowError, f"episode {trajectory.episode_id}: sending its trajectory to the driver"):
                self._send(EpisodeEnded(number, pack_trajectory(trajectory)))
        except WorkflowError as error:
            failed = Trajectory(
                episode_id=trajectory.episode_id,
                task_id=trajectory.task_id,
                turns=(),
                stop_reason=StopReason.WORKFLOW_ERROR,
                failure=episode_failure(error),
                started_s=trajectory.started_s,
                ended_s=trajectory.ended_s,
            )
            self._send(EpisodeEnded(number, pack_trajectory(failed)))

    def _send_scores(self, number: int, scored: Sequence[Trajectory]) -> None:
        """Send the scores; where they are too long, failures of all episodes."""
        try:
            self._send(GroupScored(number, tuple(map(pack_score, scored))))
        except WorkflowError as error:
            changes = {"stop_reason": StopReason.WORKFLOW_ERROR, "failure": episode_failure(error), "metrics": {}}
            failed = (replace(each, **changes, final_reward=None, advantage=None) for each in scored)
            self._send(GroupScored(number, tuple(map(pack_score, failed))))

    async def _scored(self, message: ScoreGroup) -> tuple[Trajectory, ...]:
        task = unpack_task(message.task_id, message.task)
        episodes = tuple(unpack_trajectory(episode, task) for episode in message.episodes)
        return await self._runner.score(task, episodes)

    async def _trajectory(self, start: StartEpisode) -> Trajectory:
        def on_turn(turn: Turn) -> None:
            with boundary(WorkflowError, f"episode {start.episode_id}: sending a turn to the driver"):
                self._send(TurnRecorded(start.number, pack_turn(turn)))

        play = partial(self._runner.play, sampling=SamplingConfig.model_validate_json(start.sampling), on_turn=on_turn)
        return await run_recorded(play, unpack_task(start.task_id, start.task), episode_id=start.episode_id)


def _messages_of(frames: Iterator[bytes], ended: threading.Event, leave_s: float) -> MemoryObjectReceiveStream[ToWorker]:
    """Return a stream of the messages in `frames`; `leave_s` after its end the process ends, unless `ended`.

    A thread reads, so that the process ends even while its workflow blocks the event loop.
    """
    loop = asyncio.get_running_loop()
    # Without a bound: the driver sends as much as its episodes in flight wait for.
    inbox, messages = anyio.create_memory_object_stream[ToWorker](float("inf"))

    def put(message: ToWorker) -> None:
        with suppress(anyio.BrokenResourceError):  # an error has ended the worker
            inbox.send_nowait(message)

    def take(body: bytes) -> None:
        message = read_to_worker(body)
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(put, message)

    def leave(problem: BaseException | None) -> None:
        if problem is not None:
            traceback.print_exception(problem)  # to the log, whose end the driver shows
            os._exit(1)
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(inbox.close)
        if not ended.wait(leave_s):
            os._exit(0)  # the workflow ignores its cancellation, or blocks the event loop

    read_in_thread(frames, take, leave)
    return messages


def set_up_worker(frames: Iterator[bytes], writer: FrameWriter) -> RolloutWorker | None:
    """Return the worker that the first of `frames` describes; None where the driver has left."""
    with refusals(sender(writer)), boundary(WorkflowError, "the setup of a rollout worker"):
        body = None
        with suppress(ConnectionError):  # the driver has left in the middle of it
            body = next(frames, None)
        if body is None:
            return None
        setup = read_to_worker(body)
        if not isinstance(setup, WorkerSetup):
            raise InvariantError(f"the first message to a rollout worker must be its setup, not {type(setup).__name__}")
        try:
            os.chdir(setup.directory)
        except OSError as error:
            raise ConfigError(
                f"cannot work in {setup.directory} on {socket.gethostname()}: {error.strerror}; a rollout worker "
                "starts in the driver's working directory, so every node needs it under the same path"
            ) from error
        return RolloutWorker(setup, sender(writer, setup.max_message_bytes))


@contextmanager
def refusals(send: Callable[[ToDriver], None]) -> Generator[None]:
    """Report an error of the setup to the driver, and its traceback to the log of this worker."""
    try:
        yield
    except AgentRLError as error:
        traceback.print_exc()
        send(WorkerRefused(type(error).__name__, shortened(str(error))))
        raise


def _link(arguments: Sequence[str], leave_s: float) -> tuple[Iterator[bytes], FrameWriter]:
    """Return the ends of the link to the driver: a connection with `--attach HOST:PORT`, else the standard streams."""
    requests, replies = take_standard_streams()
    if arguments:
        lifeline, only = requests, RankNumbers(rank=0, world=1, local=0)
        threading.Thread(target=_end_with, args=(lifeline, leave_s), name="agentrl lifeline", daemon=True).start()
        _, address = arguments
        connection = join_at(address, os.environ, only, WORKER_JOIN_S, hosts_store=False).connection
        requests, replies = connection.makefile("rb"), connection.makefile("wb")
    return read_frames(requests, MAX_MESSAGE_BYTES), FrameWriter(replies)


def _end_with(lifeline: ByteSource, leave_s: float) -> None:
    """End this process soon after its launcher or the driver closes its standard input, whatever the process does."""
    while lifeline.read1(READ_BYTES):
        pass
    threading.Event().wait(leave_s)
    os._exit(0)


def main() -> None:
    """Run the worker."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # what reaches a whole terminal ends the driver, which ends its workers
    leave, *arguments = sys.argv[1:]
    leave_s = float(leave.removeprefix("--leave="))
    try:
        frames, writer = _link(arguments, leave_s)
    except AgentRLError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    logging.getLogger("agentrl").addHandler(_DriverLog(sender(writer)))
    try:
        with writer.beating():
            worker = set_up_worker(frames, writer)
            if worker is not None:
                with tuned_garbage_collector():
                    run_without_waiting(partial(worker.serve, frames, leave_s))
    except AgentRLError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    finally:
        writer.close()


if __name__ == "__main__":
    main()
