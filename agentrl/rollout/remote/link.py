"""One rollout worker as the driver sees it: its episodes in flight and the model calls that they wait for.

Invariant: an episode ends as the trajectory that the worker sends, or, where the worker dies, as a failure with the turns
that were recorded until then. What a worker says about an episode or a call that has ended is dropped.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import anyio
import msgspec
from anyio.abc import TaskGroup

from agentrl.client.config import SamplingConfig
from agentrl.concurrency import task_group
from agentrl.errors import AgentRLError, InvariantError, RolloutWorkerDied, WorkflowError
from agentrl.inference.backend import Backend, GenerateRequest, SamplingParams
from agentrl.rollout.failure import RUN_ENDING
from agentrl.rollout.remote.calls import failed_call, named_error
from agentrl.rollout.remote.frames import (
    MAX_MESSAGE_BYTES,
    AbortCall,
    CallAnswered,
    CallPiece,
    CancelEpisode,
    EpisodeCancelled,
    EpisodeEnded,
    EpisodeRaised,
    FrameBuffer,
    GroupScored,
    ModelCall,
    ScoreGroup,
    StartEpisode,
    ToDriver,
    ToWorker,
    TurnRecorded,
    WorkerLogged,
    WorkerReady,
    WorkerRefused,
    WorkerSetup,
    framed,
    read_to_driver,
)
from agentrl.rollout.remote.packing import (
    ids_bytes,
    pack_generation,
    pack_task,
    pack_trajectory,
    unpack_trajectory,
    unpack_turn,
    with_score,
)
from agentrl.rollout.remote.pending import Outcome, Pending, RemoteFlight, RemoteScoring
from agentrl.rollout.remote.wire import STREAM_ENDS, Wire
from agentrl.types import Task, Trajectory, Turn

logger = logging.getLogger(__name__)

CANCEL_S = 5.0
"""Seconds that a cancelled episode gets to end in its worker; after that the driver does not wait for it."""
TASK_NAME = "agentrl.remote"
"""Name of the tasks of a link; the watchdog takes tasks of `agentrl.rollout` for code of the user."""

EpisodeMessage: TypeAlias = TurnRecorded | EpisodeEnded | GroupScored | EpisodeRaised | EpisodeCancelled


class WorkerLink:
    """A worker that was started; it takes episodes after `set_up`, while `serve` runs."""

    def __init__(self, name: str, wire: Wire, backend: Backend, *, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        """Speak over `wire`; `backend` answers model calls. `name` is for messages."""
        self._name, self._wire, self._backend = name, wire, backend
        self._max_message_bytes = max_message_bytes
        self._numbers = itertools.count()
        self._pending: dict[int, Pending[Any]] = {}
        self._calls: dict[int, anyio.CancelScope] = {}
        self._buffer = FrameBuffer()
        self._unsent: list[bytes] = []
        """Frames that wait for the stream. An episode waits for each answer to its calls, so there are few of them."""
        self._has_unsent = anyio.Event()
        self._clock_offset_s = 0.0
        self.alive = False
        """Whether it takes episodes."""

    @property
    def num_episodes(self) -> int:
        """Episodes in flight, and groups that are scored."""
        return len(self._pending)

    async def set_up(self, setup: WorkerSetup) -> None:
        """Have the worker load workflow and tokenizer.

        Raises:
            AgentRLError: the error of the worker, such as `ConfigError`.
            RolloutWorkerDied: it ended.

        Cancellation: the worker is not set up.
        """
        try:
            await self._wire.send(framed(setup))
            answer: ToDriver | None = None
            while answer is None:
                for body in self._buffer.cut(await self._wire.receive()):
                    message = read_to_driver(body)
                    if isinstance(message, WorkerLogged):
                        self._log(message)
                    else:
                        answer = message
        except STREAM_ENDS:
            raise RolloutWorkerDied(f"{self._name} died while it was set up: {await self._wire.obituary()}") from None
        if isinstance(answer, WorkerRefused):
            raise named_error(answer.kind, f"{self._name}: {answer.message}")
        if not isinstance(answer, WorkerReady):
            raise InvariantError(f"{self._name}: expected WorkerReady, got {type(answer).__name__}")
        if not self._wire.shares_clock:
            self._clock_offset_s = time.perf_counter() - answer.clock_s
        self.alive = True

    async def serve(self) -> str:
        """Pass messages on until the worker ends, and return how it ended; its episodes have failed then.

        Raises:
            InvariantError: the worker sends what is no message, or a model call met an error that ends the run.

        Cancellation: the calls in flight are aborted.
        """
        how = "its stream was closed"
        try:
            async with task_group() as tasks:
                tasks.start_soon(self._write, name=TASK_NAME)
                try:
                    while True:
                        for body in self._buffer.cut(await self._wire.receive()):
                            self._handle(tasks, read_to_driver(body))
                except STREAM_ENDS:
                    self.alive = False
                    how = await self._wire.obituary()
                tasks.cancel_scope.cancel()
        finally:
            self.alive = False
            self._fail_pending(how)
        return how

    async def play(
        self, task: Task, *, episode_id: str, sampling: SamplingConfig, on_turn: Callable[[Turn], None]
    ) -> Trajectory:
        """Return the trajectory of one episode; a failed one has `failure` set.

        Raises:
            ConfigError: the task cannot be sent.
            InvariantError: the episode met an error that ends the run.

        Cancellation: the worker cancels the episode; this waits `CANCEL_S` at most for its end.
        """
        number = next(self._numbers)
        flight = RemoteFlight(task, episode_id, on_turn)
        start = StartEpisode(number, episode_id, task.id, pack_task(task), sampling.model_dump_json())
        return await self._await(number, start, flight, f"episode {episode_id}")

    async def score(self, task: Task, episodes: tuple[Trajectory, ...]) -> tuple[Trajectory, ...]:
        """Return the episodes of a group with their scores, or all as failures.

        Raises:
            InvariantError: the scoring met an error that ends the run.

        Cancellation: as for `play`.
        """
        number = next(self._numbers)
        packed = tuple(map(pack_trajectory, episodes))
        start = ScoreGroup(number, task.id, pack_task(task), packed)
        return await self._await(number, start, RemoteScoring(episodes), f"the scoring of task {task.id}")

    async def _await(self, number: int, start: StartEpisode | ScoreGroup, pending: Pending[Outcome], what: str) -> Outcome:
        try:
            self._send(start)
        except WorkflowError as error:
            return pending.failed(WorkflowError(f"{what} cannot be sent to {self._name}: {error}"))
        self._pending[number] = pending
        try:
            await pending.wait()
        except anyio.get_cancelled_exc_class():
            self._send(CancelEpisode(number))
            with anyio.move_on_after(CANCEL_S, shield=True):
                await pending.wait()
            if not pending.is_over:
                logger.warning("%s: %s still runs %g s after its cancellation", self._name, what, CANCEL_S)
            raise
        finally:
            del self._pending[number]
        return pending.result()

    def _send(self, message: ToWorker) -> None:
        self._unsent.append(framed(message, self._max_message_bytes))
        self._has_unsent.set()

    async def _write(self) -> None:
        """Send what waits; one task writes, because a send that is cancelled would break the stream."""
        try:
            while True:
                await self._has_unsent.wait()
                self._has_unsent = anyio.Event()
                frames, self._unsent = self._unsent, []
                await self._wire.send(b"".join(frames))
        except STREAM_ENDS:
            return  # `serve` notices, too

    def _handle(self, tasks: TaskGroup, message: ToDriver) -> None:
        match message:
            case ModelCall():
                scope = self._calls[message.call] = anyio.CancelScope()
                tasks.start_soon(self._answer, message, scope, name=TASK_NAME)
            case AbortCall():
                if message.call in self._calls:
                    self._calls[message.call].cancel()
            case WorkerLogged():
                self._log(message)
            case WorkerReady() | WorkerRefused():
                raise InvariantError(f"{self._name}: sent {type(message).__name__} a second time")
            case _:
                pending = self._pending.get(message.number)
                if pending is not None and not pending.is_over:
                    self._advance(pending, message)

    def _advance(self, pending: Pending[Any], message: EpisodeMessage) -> None:
        match message, pending:
            case TurnRecorded(), RemoteFlight():
                turn = unpack_turn(message.turn, self._clock_offset_s)
                pending.turns.append(turn)
                pending.on_turn(turn)
            case EpisodeEnded(), RemoteFlight():
                pending.end(unpack_trajectory(message.trajectory, pending.task, self._clock_offset_s))
            case GroupScored(), RemoteScoring():
                scored = zip(pending.episodes, message.scores, strict=True)
                pending.end(tuple(with_score(episode, score) for episode, score in scored))
            case EpisodeRaised(), _:
                pending.end(named_error(message.kind, f"{self._name}: {message.message}"))
            case EpisodeCancelled(), _:
                pending.end(None)
            case _:
                raise InvariantError(f"{self._name}: sent {type(message).__name__} about {type(pending).__name__}")

    def _log(self, message: WorkerLogged) -> None:
        logger.log(message.level, "%s: %s", self._name, message.text)

    async def _answer(self, call: ModelCall, scope: anyio.CancelScope) -> None:
        try:
            with scope:
                await self._complete(call)
        except RUN_ENDING:
            raise
        except AgentRLError as error:
            self._send(failed_call(call.call, error))
        finally:
            del self._calls[call.call]

    async def _complete(self, call: ModelCall) -> None:
        request = _request(call)
        if not call.streamed:
            generation = await self._backend.generate(request)
            self._send(CallAnswered(call.call, b"", pack_generation(generation)))
            return
        async with self._backend.stream(request) as chunks:
            async for chunk in chunks:
                if chunk.generation is not None:
                    packed = pack_generation(chunk.generation)
                    self._send(CallAnswered(call.call, ids_bytes(chunk.output_ids), packed))
                    return
                self._send(CallPiece(call.call, ids_bytes(chunk.output_ids)))

    def _fail_pending(self, how: str) -> None:
        for pending in self._pending.values():
            pending.end(pending.failed(RolloutWorkerDied(f"{self._name} died: {how}")))


def _request(call: ModelCall) -> GenerateRequest:
    context = call.context
    num_bytes = sum(map(len, context.packed))
    if num_bytes != 4 * context.size:
        raise InvariantError(f"a rollout worker sent a context of {context.size} ids with {num_bytes} bytes")
    try:
        sampling = msgspec.json.decode(call.sampling, type=SamplingParams)
    except msgspec.DecodeError as error:
        raise InvariantError(f"a rollout worker sent sampling parameters that are none: {error}") from error
    return GenerateRequest(request_id=call.request_id, episode_id=call.episode_id, context=context, sampling=sampling)
