"""One rollout worker as the driver sees it: its episodes in flight and the model calls that they wait for.

Invariant: an episode ends as the trajectory that the worker sends, or, where the worker dies, as a failure with the turns
that were recorded until then. What a worker says about an episode or a call that has ended is dropped.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeAlias, TypeVar

import anyio
import msgspec
from anyio.abc import TaskGroup

from agentrl.client.config import SamplingConfig
from agentrl.episode.codec import pack_trajectory, packed, unpack_trajectory, unpack_turn, with_score
from agentrl.errors import AgentRLError, InvariantError, RolloutWorkerDied, WorkflowError
from agentrl.inference.backend import Backend, GenerateRequest, GivesUp, SamplingParams
from agentrl.processes.link import SILENT_S, STREAM_ENDS, Link, Silences, SilenceWords
from agentrl.rollout.failure import RUN_ENDING, failure_stop_reason
from agentrl.rollout.remote.calls import failed_call, rollout_error
from agentrl.rollout.remote.frames import (
    MAX_MESSAGE_BYTES,
    AbortCall,
    CallAnswered,
    CallPiece,
    CancelEpisode,
    EpisodeCancelled,
    EpisodeEnded,
    EpisodeRaised,
    GiveUpCall,
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
    encode_message,
    ids_bytes,
    pack_task,
    read_to_driver,
)
from agentrl.support.concurrency import task_group
from agentrl.types import EpisodeFailure, Task, Trajectory, Turn

logger = logging.getLogger(__name__)

CANCEL_S = 5.0
"""Seconds that a cancelled episode gets to end in its worker; after that the driver does not wait for it."""
LOST_S = 60.0
"""Seconds without a sign of life or of work after which a worker that owes an episode is killed, and another one started."""
TASK_NAME = "agentrl.remote"
"""Name of the tasks of this package; the watchdog takes tasks of `agentrl.rollout` for code of the user."""

EpisodeMessage: TypeAlias = TurnRecorded | EpisodeEnded | GroupScored | EpisodeRaised | EpisodeCancelled


Outcome = TypeVar("Outcome")


class Pending(Generic[Outcome]):
    """A result for which the driver waits: of an episode, or of the scoring of a group."""

    def __init__(self, failed: Callable[[AgentRLError], Outcome]) -> None:
        """Wait; `failed` returns the outcome where the worker dies first, or cannot get it."""
        self.failed = failed
        self._ended = anyio.Event()
        self._outcome: Outcome | AgentRLError | None = None

    @property
    def is_over(self) -> bool:
        return self._ended.is_set()

    def end(self, outcome: Outcome | AgentRLError | None) -> None:
        """Let `wait` return or raise `outcome`; None where the worker cancelled it."""
        self._outcome = outcome
        self._ended.set()

    async def wait(self) -> None:
        await self._ended.wait()

    def result(self) -> Outcome:
        """Return the outcome, or raise the error that the worker reported."""
        if isinstance(self._outcome, AgentRLError):
            raise self._outcome
        if self._outcome is None:
            raise InvariantError("a rollout worker cancelled an episode, or the scoring of a group, by itself")
        return self._outcome


class EpisodeUnderWay(Pending[Trajectory]):
    """An episode in flight in a worker."""

    def __init__(self, task: Task, episode_id: str, on_turn: Callable[[Turn], None]) -> None:
        super().__init__(self._failed)
        self.task, self.on_turn = task, on_turn
        self.turns: list[Turn] = []
        self._episode_id, self._started_s = episode_id, time.perf_counter()

    def _failed(self, error: AgentRLError) -> Trajectory:
        return Trajectory(
            episode_id=self._episode_id,
            task_id=self.task.id,
            turns=tuple(self.turns),
            stop_reason=failure_stop_reason(error),
            failure=_failure_of(error),
            task=self.task,
            started_s=self._started_s,
            ended_s=time.perf_counter(),
        )


class ScoringUnderWay(Pending[tuple[Trajectory, ...]]):
    """The scoring of a group in a worker."""

    def __init__(self, episodes: tuple[Trajectory, ...]) -> None:
        super().__init__(self._failed)
        self.episodes = episodes

    def _failed(self, error: AgentRLError) -> tuple[Trajectory, ...]:
        reason, failure = failure_stop_reason(error), _failure_of(error)
        return tuple(replace(each, stop_reason=reason, final_reward=None, failure=failure) for each in self.episodes)


def _failure_of(error: AgentRLError) -> EpisodeFailure:
    return EpisodeFailure(kind=type(error).__name__, message=str(error), traceback="")


class RemoteWorker:
    """A worker that was started; it takes episodes after `set_up`, while `serve` runs."""

    def __init__(
        self,
        name: str,
        link: Link,
        backend: Backend,
        *,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        silent_s: float = SILENT_S,
        lost_s: float = LOST_S,
    ) -> None:
        """Speak to the worker over `link`; it is reported after `silent_s` seconds of silence, and killed after `lost_s`."""
        link.limit(MAX_MESSAGE_BYTES)
        self._name, self._link, self._backend = name, link, backend
        self._max_message_bytes = max_message_bytes
        self._numbers = itertools.count()
        self._pending: dict[int, Pending[Any]] = {}
        self._calls: dict[int, _DrivenCall] = {}
        self._unsent: list[bytes] = []
        """Messages that wait for the link. An episode waits for each answer to its calls, so there are few of them."""
        self._has_unsent = anyio.Event()
        self._clock_offset_s = 0.0
        words = SilenceWords(names=[name])
        self._silences = Silences([link], words, silent_s=silent_s, lost_s=lost_s, on_lost=self._lose)
        self._lost = ""
        """How the worker was lost; empty where it was not."""
        self.alive = False

    @property
    def num_episodes(self) -> int:
        """Episodes in flight, and groups that are scored."""
        return len(self._pending)

    async def set_up(self, setup: WorkerSetup) -> None:
        """Have the worker load workflow and tokenizer; raises the error that it reports."""
        try:
            await self._link.send(encode_message(setup))
            while isinstance(answer := read_to_driver(await self._link.receive()), WorkerLogged):
                self._log(answer)
        except STREAM_ENDS:
            raise RolloutWorkerDied(f"{self._name} died while it was set up: {await self._link.obituary()}") from None
        if isinstance(answer, WorkerRefused):
            raise rollout_error(answer.kind, f"{self._name}: {answer.message}")
        if not isinstance(answer, WorkerReady):
            raise InvariantError(f"{self._name}: expected WorkerReady, got {type(answer).__name__}")
        # Times of another machine are moved to this clock, so that the spans of the timeline fit together.
        if not self._link.shares_clock:
            self._clock_offset_s = time.perf_counter() - answer.clock_s
        self.alive = True

    async def serve(self) -> str:
        """Pass messages on until the worker ends, and return how it ended; its episodes have failed then."""
        how = "its stream was closed"
        try:
            async with task_group() as tasks:
                tasks.start_soon(self._write, name=TASK_NAME)
                tasks.start_soon(self._silences.follow, 0, name=TASK_NAME)
                try:
                    while True:
                        self._handle(tasks, read_to_driver(await self._link.receive()))
                except STREAM_ENDS:
                    self.alive = False
                    how = self._lost or await self._link.obituary()
                tasks.cancel_scope.cancel()
        finally:
            self.alive = False
            # Its episodes end as failures with the turns that arrived; no episode may wait for a dead worker.
            self._fail_pending(how)
        return how

    async def play(
        self, task: Task, *, episode_id: str, sampling: SamplingConfig, on_turn: Callable[[Turn], None]
    ) -> Trajectory:
        """Return the trajectory of one episode; a failed one has `failure` set.

        Cancellation: the worker cancels the episode; this waits `CANCEL_S` at most for its end.
        """
        number = next(self._numbers)
        flight = EpisodeUnderWay(task, episode_id, on_turn)
        start = StartEpisode(number, episode_id, task.id, pack_task(task), sampling.model_dump_json())
        return await self._await(number, start, flight, f"episode {episode_id}")

    async def score(self, task: Task, episodes: tuple[Trajectory, ...]) -> tuple[Trajectory, ...]:
        number = next(self._numbers)
        start = ScoreGroup(number, task.id, pack_task(task), tuple(map(pack_trajectory, episodes)))
        return await self._await(number, start, ScoringUnderWay(episodes), f"the scoring of task {task.id}")

    async def _await(self, number: int, start: StartEpisode | ScoreGroup, pending: Pending[Outcome], what: str) -> Outcome:
        try:
            self._send(start)
        except WorkflowError as error:
            return pending.failed(WorkflowError(f"{what} cannot be sent to {self._name}: {error}"))
        self._pending[number] = pending
        try:
            with self._silences.working(f"the driver waits for {what}", math.inf):
                await pending.wait()
        except anyio.get_cancelled_exc_class():
            # The workflow's cleanup runs in the worker, so its end is waited for; one that ignores the cancellation is
            # left behind.
            self._send(CancelEpisode(number))
            with anyio.move_on_after(CANCEL_S, shield=True):
                await pending.wait()
            if not pending.is_over:
                logger.warning("%s: %s still runs %g s after its cancellation", self._name, what, CANCEL_S)
            raise
        finally:
            del self._pending[number]
        return pending.result()

    def _lose(self, _: int, reason: str) -> None:
        self._lost = f"{self._link.where}, {reason}"
        self._link.kill()

    def _send(self, message: ToWorker) -> None:
        self._unsent.append(encode_message(message, self._max_message_bytes))
        self._has_unsent.set()

    async def _write(self) -> None:
        """Send what waits; one task writes, because a send that is cancelled would break the stream."""
        try:
            while True:
                await self._has_unsent.wait()
                self._has_unsent = anyio.Event()
                bodies, self._unsent = self._unsent, []
                await self._link.send(*bodies)
        except STREAM_ENDS:
            return  # `serve` notices, too

    def _handle(self, tasks: TaskGroup, message: ToDriver) -> None:
        match message:
            case ModelCall():
                call = self._calls[message.call] = _DrivenCall(message.request_id)
                tasks.start_soon(self._answer, message, call.scope, name=TASK_NAME)
            case AbortCall():
                if message.call in self._calls:
                    self._calls[message.call].scope.cancel()
            case GiveUpCall():
                if message.call in self._calls and isinstance(self._backend, GivesUp):
                    tasks.start_soon(self._give_up, self._backend, self._calls[message.call], name=TASK_NAME)
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
            case TurnRecorded(), EpisodeUnderWay():
                turn = unpack_turn(message.turn, self._clock_offset_s)
                pending.turns.append(turn)
                pending.on_turn(turn)
            case EpisodeEnded(), EpisodeUnderWay():
                pending.end(unpack_trajectory(message.trajectory, pending.task, self._clock_offset_s))
            case GroupScored(), ScoringUnderWay():
                scored = zip(pending.episodes, message.scores, strict=True)
                pending.end(tuple(with_score(episode, score) for episode, score in scored))
            case EpisodeRaised(), _:
                pending.end(rollout_error(message.kind, f"{self._name}: {message.message}"))
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
            self._calls.pop(call.call).giving_up.cancel()

    async def _give_up(self, backend: GivesUp, call: _DrivenCall) -> None:
        with call.giving_up:
            await backend.give_up(call.request_id)

    async def _complete(self, call: ModelCall) -> None:
        request = _request(call)
        if not call.streamed:
            generation = await self._backend.generate(request)
            self._send(CallAnswered(call.call, b"", packed(generation)))
            return
        async with self._backend.stream(request) as chunks:
            async for chunk in chunks:
                if chunk.generation is not None:
                    self._send(CallAnswered(call.call, ids_bytes(chunk.output_ids), packed(chunk.generation)))
                    return
                self._send(CallPiece(call.call, ids_bytes(chunk.output_ids)))

    def _fail_pending(self, how: str) -> None:
        for pending in self._pending.values():
            pending.end(pending.failed(RolloutWorkerDied(f"{self._name} died: {how}")))


@dataclass(slots=True)
class _DrivenCall:
    """A model call that this process makes for a worker."""

    request_id: str
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    giving_up: anyio.CancelScope = field(default_factory=anyio.CancelScope)


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
