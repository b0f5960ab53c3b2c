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

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import anyio
import msgspec
from anyio.abc import TaskGroup

from agentrl.algo.config import AlgorithmConfig
from agentrl.client.config import SamplingConfig
from agentrl.concurrency import STRAY_CANCELLATION, finishing, task_group
from agentrl.data.digest import TaskDigest, check_unique
from agentrl.data.draw import TaskDraw
from agentrl.data.load import TrainingTasks
from agentrl.engine.buffer import GroupBuffer, Signal, Ticket, VersionClock
from agentrl.engine.config import INTERRUPT_S, EngineConfig
from agentrl.engine.equal_scores import EqualScores
from agentrl.engine.evaluate import EvalReport, EvaluationQueue, evaluate_with
from agentrl.engine.inflight import InFlight, WatchedBackend
from agentrl.engine.journal import Journal
from agentrl.engine.publications import Publications
from agentrl.engine.publishing.publisher import PROBE_TEXT, WeightPublisher
from agentrl.engine.report import RunReport
from agentrl.engine.resume import RunState
from agentrl.engine.staleness import Admission
from agentrl.engine.training import SpotCheck, TrainLoop
from agentrl.errors import ConfigError, RunStopped
from agentrl.inference.backend import Inference
from agentrl.observe.progress import NoProgress, Progress
from agentrl.observe.stall import StallTimer, WaitBoard
from agentrl.observe.trackers.feed import TrackerFeed
from agentrl.observe.versions import last_version
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.episode import LocalRunner
from agentrl.rollout.group import DroppedGroup, run_group
from agentrl.rollout.runner import PolicyRunner
from agentrl.tokens.renderer import Renderer
from agentrl.trainer.base import Trainer
from agentrl.types import Task, Trajectory
from agentrl.workflow import GroupWorkflow, RolloutWorkflow


class Engine:
    """One run: episodes in flight, groups in the buffer, a trainer that consumes them, servers that take its weights.

    A batch whose groups all have zero variance has a gradient of exactly zero. The engine skips and counts that step and
    publishes the unchanged weights as the next version, so that each version is one publication.

    Args:
        workflow: drives each episode.
        tasks: training tasks, drawn in an order fixed by `seed`, in their own, or by a curriculum.
        inference: the running servers; they get the trainer's weights before the first episode.
        renderer: chat template and tokenizer of the model.
        trainer: owns the weights.
        run_dir: directory of the metrics, episodes, weights and checkpoints.
        algorithm: groups, advantage, staleness.
        rollout: budgets and failures.
        sampling: defaults of the model calls.
        engine: length, evaluation, checkpoints, patience.
        shuffle_tasks: whether each pass over the training tasks has an order of its own.
        eval_tasks: held-out tasks; needed when `engine.eval_every` is set.
        seed: of the task order and of the model calls.
        name: of the run, for the display.
        progress: the display; None shows nothing.
        probe_ids: token ids whose log-probs are compared after each update; None: a fixed sentence.
        send_dtype: type in which weights are sent from the trainer's memory; None: through files.
        resume: the state that an earlier process saved with the checkpoint of `trainer`; None: a new run.
        interrupt_s: seconds that a cancelled or failing run has to end its training step and save it; 0: it saves nothing.
        trackers: get what the run records, beside its files; None: there are none.
        runner: runs the episodes of `workflow`; None: on the event loop of this process.

    Raises:
        ConfigError: when there are no tasks, two have the same id, or neither a step nor an evaluation is left after
            `resume`.
        RunStopped: when the run directory cannot be written.
    """

    def __init__(
        self,
        *,
        workflow: RolloutWorkflow,
        tasks: Sequence[Task] | TrainingTasks,
        inference: Inference,
        renderer: Renderer,
        trainer: Trainer,
        run_dir: Path,
        algorithm: AlgorithmConfig,
        rollout: RolloutConfig,
        sampling: SamplingConfig,
        engine: EngineConfig,
        shuffle_tasks: bool = True,
        eval_tasks: Sequence[Task] = (),
        seed: int = 0,
        name: str = "run",
        progress: Progress | None = None,
        probe_ids: Sequence[int] | None = None,
        resume: RunState | None = None,
        send_dtype: str | None = None,
        interrupt_s: float = INTERRUPT_S,
        trackers: TrackerFeed | None = None,
        runner: PolicyRunner | None = None,
    ) -> None:
        """Wire a run; `run` starts it."""
        self._workflow = workflow
        self._runner = runner or LocalRunner(workflow, renderer=renderer, rollout=rollout, seed=seed)
        self._algorithm, self._rollout, self._sampling, self._config = algorithm, rollout, sampling, engine
        self._interrupt_s = interrupt_s
        self._resume = resume or RunState(step=0, policy_version=0, groups_admitted=0, groups_open=())
        self._draw = _make_draw(tasks, seed, shuffle_tasks, self._resume)
        self._on_result = self._draw.on_result
        if self._resume.step >= engine.steps and not self._resume.evaluations_due:
            raise ConfigError(
                f"engine.steps: {engine.steps}, but the checkpoint has done {self._resume.step} steps; raise it to continue"
            )
        self._eval_tasks = tuple(eval_tasks)
        if engine.eval_every or self._resume.evaluations_due:
            check_unique(self._eval_tasks, "the evaluation")
        self._slots = anyio.Semaphore(rollout.max_concurrent_episodes)
        self._progress = progress or NoProgress()
        self._board = WaitBoard()
        self._equal_scores = EqualScores()
        self._watchdog = StallTimer(timeout_s=engine.stall_timeout_s, describe=self._describe_waits)
        self._flights = InFlight(on_progress=self._watchdog.progress)
        self._backend = WatchedBackend(inference, self._flights)
        changed = Signal()
        self._clock = VersionClock(start=_first_version(self._resume, inference, run_dir), changed=changed)
        self._buffer = self._make_buffer(changed)
        self._journal = self._make_journal(run_dir, name, trackers)
        probe = probe_ids or renderer.encode_content(PROBE_TEXT)
        weights = WeightPublisher(
            trainer=trainer, inference=inference, run_dir=run_dir, config=engine, probe_ids=probe, send_dtype=send_dtype
        )
        self._evaluations = self._make_evaluations()
        self._publications = self._make_publications(weights)
        self._training = self._make_training(trainer, inference, weights)

    def _make_publications(self, weights: WeightPublisher) -> Publications:
        return Publications(
            weights=weights,
            clock=self._clock,
            journal=self._journal,
            board=self._board,
            watchdog=self._watchdog,
            on_failure=self._buffer.close,
        )

    def _make_evaluations(self) -> EvaluationQueue:
        return EvaluationQueue(
            self._evaluate,
            every=self._config.eval_every,
            on_result=self._evaluated,
            on_skip=self._journal.evaluation_skipped,
            due=self._resume.evaluations_due,
            frozen=self._config.eval_weights == "frozen",
        )

    def _make_training(self, trainer: Trainer, inference: Inference, weights: WeightPublisher) -> TrainLoop:
        return TrainLoop(
            trainer=trainer,
            weights=weights,
            publications=self._publications,
            buffer=self._buffer,
            clock=self._clock,
            journal=self._journal,
            board=self._board,
            watchdog=self._watchdog,
            progress=self._progress,
            algorithm=self._algorithm,
            config=self._config,
            evaluations=self._evaluations,
            draw=self._draw,
            state=msgspec.structs.replace(
                self._resume,
                eval_tasks=TaskDigest.of(self._eval_tasks) if self._config.eval_every else None,
            ),
            spot_check=SpotCheck(
                trainer=trainer,
                inference=inference,
                calls=self._backend.finished,
                config=self._config,
                episodes_per_step=self._algorithm.groups_per_step * self._algorithm.group_size,
            ),
        )

    def _make_buffer(self, changed: Signal) -> GroupBuffer:
        admission = Admission(
            groups_per_step=self._algorithm.groups_per_step,
            max_staleness=self._algorithm.max_staleness,
            first_version=self._clock.version,
            total_groups=max(0, self._config.steps - self._resume.step) * self._algorithm.groups_per_step,
        )
        return GroupBuffer(
            clock=self._clock,
            changed=changed,
            admission=admission,
            policy=self._algorithm.staleness_policy,
            on_drop=lambda index, reason: self._journal.dropped(index, reason),
            first_index=self._resume.groups_admitted,
            reopen=self._resume.groups_open,
        )

    def _make_journal(self, run_dir: Path, name: str, trackers: TrackerFeed | None) -> Journal:
        return Journal(
            run_dir=run_dir,
            name=name,
            config=self._config,
            max_staleness=self._algorithm.max_staleness,
            rollout=self._rollout,
            clock=self._clock,
            buffer=self._buffer,
            flights=self._flights,
            waits=self._waits,
            resume=self._resume,
            trackers=trackers,
        )

    def report(self) -> RunReport:
        """Return the report of the run so far, also after it failed or was cancelled."""
        return self._journal.report()

    async def run(self) -> RunReport:
        """Train for the configured number of steps and return the report.

        Raises:
            ErrorBudgetExceeded: when too many episodes failed.
            StallError: when nothing moved for `stall_timeout_s`; the message names each wait.
            TrainError, WeightSyncError, ServerError: from the trainer or the servers.
            InvariantError, StaleDataError: when recorded data is wrong.
            RunStopped: when records cannot be written.

        Cancellation: all episodes, evaluations and waits end; the trainer finishes its step and saves it, for at most
            `interrupt_s` seconds; the records are on disk.
        """
        journal = self._journal
        finished = False
        try:
            journal.start()
            async with task_group() as background:
                background.start_soon(journal.write)
                background.start_soon(self._watchdog.watch)
                background.start_soon(self._progress.show, journal.snapshot)
                await self._publications.first()
                async with self._runner.opened(self._backend):
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
            work.start_soon(self._dispatch, work)
            async with finishing(self._interrupt_s, self._training.interrupt):
                await self._training.run()
            self._evaluations.close()  # those that are due are still done
            self._buffer.close()
        if work.cancel_scope.cancel_called:
            raise RunStopped(STRAY_CANCELLATION)

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
            group_size=self._algorithm.group_size,
            admitted_version=ticket.version,
            run=partial(self._episode, sampling=self._sampling, group=ticket.index),
            rollout=self._rollout,
            slots=self._slots,
            score=self._score if isinstance(self._workflow, GroupWorkflow) else None,
            on_episode=partial(self._journal.episode, group=ticket.index),
            on_started=started.set,
        )
        if isinstance(outcome, DroppedGroup):
            self._buffer.drop(outcome.index, outcome.reason)
        else:
            if self._on_result is not None:
                self._on_result(outcome)
            self._buffer.complete(outcome)
            self._journal.completed()

    async def _score(self, task: Task, episodes: tuple[Trajectory, ...]) -> tuple[Trajectory, ...]:
        with self._board.waiting(f"the group of task {task.id}", "its scores"):
            scored = await self._runner.score(task, episodes)
        self._equal_scores.see(scored)
        return scored

    async def _episode(self, task: Task, *, episode_id: str, sampling: SamplingConfig, group: int | None) -> Trajectory:
        with self._flights.episode(episode_id, task.id, group) as on_turn:
            try:
                return await self._runner.play(task, episode_id=episode_id, sampling=sampling, on_turn=on_turn)
            finally:
                self._backend.release(episode_id)

    async def _evaluate(self, step: int) -> EvalReport:
        """Evaluate with at most a quarter of the slots, beside training, which changes live weights meanwhile."""
        version = self._clock.version
        report = await evaluate_with(
            partial(self._episode, sampling=self._sampling, group=None),
            self._eval_tasks,
            max_concurrent=max(1, self._rollout.max_concurrent_episodes // 4),
            slots=self._slots,
            episodes=self._config.eval_episodes,
            name=f"eval.{step}",
            on_episode=partial(self._journal.episode, group=None),
        )
        if self._config.eval_weights == "frozen":
            report.check_frozen(version)
        return report

    async def _evaluated(self, step: int, report: EvalReport) -> None:
        self._progress.evaluation(await self._journal.evaluation(step, report))

    def _waits(self) -> list[str]:
        return self._board.lines() + self._flights.describe(self._buffer.waits_for())

    def _describe_admission(self) -> str:
        if self._buffer.may_admit:
            return "a free slot"
        return f"the staleness bound: {self._buffer.num_outstanding} groups are open at version {self._clock.version}"

    def _describe_waits(self) -> str:
        return "\n".join(f"  {line}" for line in (*self._waits(), *self._backend.describe()))


def _make_draw(tasks: Sequence[Task] | TrainingTasks, seed: int, shuffle: bool, resume: RunState) -> TaskDraw:
    training = TrainingTasks.of(tasks)
    if not training.is_endless:
        check_unique(training.finite, "the training")
    return TaskDraw(training, seed, shuffle=shuffle, resume=resume.draw, digest=resume.tasks)


def _first_version(resume: RunState, inference: Inference, run_dir: Path) -> int:
    """Return the version of the run's first publication: at least 1, and above every version that the servers have had.

    Weights that a server was launched with are version 0, so a server that was restarted never passes for the run's. The
    weights of a checkpoint keep their version unless the run used later ones, whose weights were lost.
    """
    used = last_version(run_dir) if resume.step else 0
    continued = used + 1 if used > resume.policy_version else resume.policy_version
    return max(continued, inference.policy_version + 1)
