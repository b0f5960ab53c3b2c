"""The loop of a run: it connects the parts and starts them.

Invariant: however `Engine.run` ends, everything that it started has ended and its records are on disk.

Who waits for what. The dispatcher waits for a free episode slot and for admission (the staleness bound): an episode that
ends, a version that is published or a group that is dropped lets it continue. Then it waits for the task, if an endless
source makes it. Each group waits for its episodes, and each episode for its workflow, which waits for model calls; the
episode's deadline ends that wait. The trainer waits for a batch, then for its worker, then for a frozen evaluation, whose
episodes have deadlines, then for the servers. The stall timer
ends the run when nothing moves, and names these waits.
"""

from __future__ import annotations

from functools import partial

import anyio
from anyio.abc import TaskGroup

from agentrl.client.config import SamplingConfig
from agentrl.data.draw import TaskDraw
from agentrl.engine.buffer import Ticket
from agentrl.engine.evaluate import EvalReport, EvaluationQueue, evaluate_with
from agentrl.engine.filter import FILTERED, load_filter
from agentrl.engine.journal import LoopState
from agentrl.engine.parts import EngineParts, GroupIntake
from agentrl.engine.report import RunReport
from agentrl.engine.skipped import EqualScores
from agentrl.engine.training import TrainLoop
from agentrl.errors import RunStopped
from agentrl.rollout.episode import LocalRunner
from agentrl.rollout.group import DroppedGroup, run_group
from agentrl.support.concurrency import STRAY_CANCELLATION, finishing, task_group
from agentrl.types import Task, Trajectory
from agentrl.workflow import GroupWorkflow


class Engine:
    """One run: episodes in flight, groups in the buffer, a trainer that consumes them, servers that take its weights.

    A batch whose groups all have zero variance has a gradient of exactly zero. The engine skips and counts that step and
    publishes the unchanged weights as the next version, so that each version is one publication.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._filter = None if parts.algorithm.slots.keep.name == "all" else load_filter(parts.algorithm)
        self._parts, self._state = parts, LoopState(parts)
        self._board, self._buffer, self._journal = self._state.board, self._state.buffer, self._state.journal
        self._runner = parts.runner or LocalRunner(
            parts.workflow, renderer=parts.renderer, rollout=parts.rollout, seed=parts.seed
        )
        resume = parts.resume
        self._draw = TaskDraw(parts.tasks, parts.seed, shuffle=parts.shuffle_tasks, resume=resume.draw, digest=resume.tasks)
        self._on_result = self._draw.on_result
        self._slots = anyio.Semaphore(parts.rollout.max_concurrent_episodes)
        self._equal_scores = EqualScores()
        self._evaluations = EvaluationQueue(
            self._evaluate,
            every=parts.engine.eval_every,
            on_result=self._evaluated,
            on_skip=self._journal.evaluation_skipped,
            due=resume.evaluations_due,
            frozen=parts.engine.eval_weights == "frozen",
        )
        self._training = TrainLoop(parts, self._state, evaluations=self._evaluations, draw=self._draw)

    def report(self) -> RunReport:
        """Return the report of the run so far, also after it failed or was cancelled."""
        return self._journal.report()

    async def run(self) -> RunReport:
        """Train for the configured number of steps and return the report.

        Raises:
            ErrorBudgetExceeded: too many episodes failed.
            StallError: nothing moved for `stall_timeout_s`; the message names each wait.

        Cancellation: all episodes, evaluations and waits end; the trainer finishes its step and saves it, for at most
            `interrupt_s` seconds; the records are on disk.
        """
        journal = self._journal
        finished = False
        try:
            journal.start()
            async with task_group() as background:
                background.start_soon(journal.write)
                background.start_soon(self._state.watchdog.watch)
                background.start_soon(self._parts.progress.show, journal.snapshot)
                await self._training.publish_first()
                async with self._runner.opened(self._state.backend):
                    await self._work()
                finished = True
                background.cancel_scope.cancel()
            if not finished:
                raise RunStopped(STRAY_CANCELLATION)
        except BaseException as error:
            await journal.close(error)
            raise
        await journal.close(None)
        return journal.report()

    async def _work(self) -> None:
        async with task_group() as work:
            work.start_soon(self._evaluations.serve)
            if self._parts.source is None:
                work.start_soon(self._dispatch, work)
            else:
                work.start_soon(self._parts.source.fill, self._intake())
            async with finishing(self._parts.interrupt_s, self._training.interrupt):
                await self._training.run()
            self._evaluations.close()  # those that are due are still done
            self._buffer.close()
        if work.cancel_scope.cancel_called:
            raise RunStopped(STRAY_CANCELLATION)

    def _intake(self) -> GroupIntake:
        """Return what a source of groups works with."""
        state = self._state
        return GroupIntake(
            buffer=self._buffer,
            clock=state.clock,
            backend=state.backend,
            release=state.backend.release,
            flight=state.flights.episode,
            on_episode=lambda trajectory, index: self._journal.episode(trajectory, group=index),
            resumed_step=self._parts.resume.step,
        )

    async def _dispatch(self, work: TaskGroup) -> None:
        """Open groups as fast as slots and the bound allow, each after the one before has all its slots."""
        while True:
            slot = self._journal.during("dispatcher", "wait_for_slot")
            with self._board.waiting("the dispatcher", "a free episode slot"), slot:
                async with self._slots:
                    pass
            with self._board.waiting("the dispatcher", self._describe_admission), self._journal.timed("rollout_wait_s"):
                ticket = await self._buffer.admit()
            if ticket is None:
                return
            with self._board.waiting("the dispatcher", f"the task of group {ticket.index}"):
                task = await self._draw.task(ticket.index)
            started = anyio.Event()
            work.start_soon(self._group, task, ticket, started)
            slots = self._journal.during("dispatcher", "wait_for_slot")
            with self._board.waiting("the dispatcher", f"episode slots for group {ticket.index}"), slots:
                await started.wait()

    async def _group(self, task: Task, ticket: Ticket, started: anyio.Event) -> None:
        outcome = await run_group(
            task,
            index=ticket.index,
            group_size=self._parts.algorithm.group_size,
            admitted_version=ticket.version,
            run=partial(self._episode, sampling=self._parts.sampling, group=ticket.index),
            rollout=self._parts.rollout,
            slots=self._slots,
            score=self._score if isinstance(self._parts.workflow, GroupWorkflow) else None,
            on_episode=partial(self._journal.episode, group=ticket.index),
            on_started=started.set,
        )
        if isinstance(outcome, DroppedGroup):
            self._buffer.drop(outcome.index, outcome.reason)
        else:
            if self._on_result is not None:
                self._on_result(outcome)
            if self._filter is None or self._filter.keeps(outcome, self._state.clock.trainer_version):
                self._buffer.complete(outcome)
                self._journal.completed()
            else:
                self._buffer.drop(outcome.index, FILTERED)

    async def _score(self, task: Task, episodes: tuple[Trajectory, ...]) -> tuple[Trajectory, ...]:
        with self._board.waiting(f"the group of task {task.id}", "its scores"):
            scored = await self._runner.score(task, episodes)
        self._equal_scores.see(scored)
        return scored

    async def _episode(self, task: Task, *, episode_id: str, sampling: SamplingConfig, group: int | None) -> Trajectory:
        with self._state.flights.episode(episode_id, task.id, group) as on_turn:
            try:
                return await self._runner.play(task, episode_id=episode_id, sampling=sampling, on_turn=on_turn)
            finally:
                self._state.backend.release(episode_id)

    async def _evaluate(self, step: int) -> EvalReport:
        """Evaluate in at most a quarter of the slots; training continues and may change the weights meanwhile."""
        version = self._state.clock.version
        report = await evaluate_with(
            partial(self._episode, sampling=self._parts.sampling, group=None),
            self._parts.eval_tasks,
            max_concurrent=max(1, self._parts.rollout.max_concurrent_episodes // 4),
            slots=self._slots,
            episodes=self._parts.engine.eval_episodes,
            name=f"eval.{step}",
            on_episode=partial(self._journal.episode, group=None),
        )
        if self._parts.engine.eval_weights == "frozen":
            report.check_frozen(version)
        return report

    async def _evaluated(self, step: int, report: EvalReport) -> None:
        self._parts.progress.evaluation(await self._journal.evaluation(step, report))

    def _describe_admission(self) -> str:
        if self._buffer.may_admit:
            return "a free slot"
        return f"the staleness bound: {self._buffer.num_outstanding} groups are open at version {self._state.clock.version}"
