"""`agentrl train`: the engine runs in this process; it starts servers and trainer here or on Ray, or lets them attach.

Invariant: bad input is reported before any process starts. However the run ends, every process that it started has
ended when `train` returns, and the run directory holds what was recorded, with a `summary.json` that says why the run
ended. Ctrl-C, SIGTERM to the command and a workflow that blocks the event loop all end a run in this way; only SIGKILL
leaves no summary.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeAlias

import anyio

from agentrl.commands.ending import describe_end, describe_interrupted_run
from agentrl.commands.rollouts import check_tasks_travel, make_runner
from agentrl.commands.run_directory import (
    Existing,
    ResumePoint,
    RunObjects,
    conclude_complete,
    find_checkpoint,
    prepare_directory,
    write_summary,
)
from agentrl.commands.running import Overrides, load_run, run_job
from agentrl.config import RunConfig
from agentrl.data.load import TaskSets, load_tasks
from agentrl.data.playable import playable_tasks
from agentrl.engine.engine import Engine
from agentrl.engine.parts import NEW_RUN, EngineParts, GroupSource
from agentrl.engine.report import RunReport
from agentrl.errors import AgentRLError, ConfigError, TrainerDied, TrainError
from agentrl.inference.launch.pool import launch_pool
from agentrl.inference.launch.sglang import find_sglang_python
from agentrl.inference.pool.pool import ServerPool
from agentrl.observe.progress import Progress, make_progress
from agentrl.observe.runs.run_lock import run_lock
from agentrl.observe.trackers.base import Tracker
from agentrl.plan.checks import left_out_here, missing_here, reward_warnings, task_remarks
from agentrl.plan.plan import Plan, plan_run
from agentrl.plan.text import describe_plan, resolved_yaml
from agentrl.plan.trackers import load_trackers, make_feed
from agentrl.processes.base import RESTART_WINDOW_S, Launcher
from agentrl.processes.start import open_launcher
from agentrl.processes.watchdog.delays import tuned_garbage_collector
from agentrl.processes.watchdog.loop import watched_loop
from agentrl.processes.watchdog.signals import describe_results
from agentrl.support.concurrency import enter_both
from agentrl.tokens.renderer import Renderer
from agentrl.trainer.checkpoints.read import latest_checkpoint
from agentrl.trainer.worker.client import RemoteTrainer, launch_trainer
from agentrl.trainer.worker.ranks import worker_ended
from agentrl.workflow import RolloutWorkflow, load_workflow

logger = logging.getLogger(__name__)


def train_command(
    config: Path,
    /,
    *overrides: Overrides,
    dry_run: bool = False,
    replace: bool = False,
    resume: bool = False,
    accept_changed_tasks: bool = False,
) -> None:
    """Train a model on a workflow: start servers and trainer, run, and write runs/NAME/.

    Args:
        config: YAML file that describes the run.
        overrides: Fields of the file to override, such as --trainer.lr 1e-5 --name second-try.
        dry_run: Print the resolved plan and start nothing; errors and what this machine lacks come last (exit status 1).
        replace: Delete an existing runs/NAME/ first; without this flag an existing one is an error.
        resume: Continue from the newest checkpoint in runs/NAME/; a complete run only prints where its summary is.
        accept_changed_tasks: With --resume, continue with tasks that are not those of the checkpoint.
    """
    if replace and resume:
        raise ConfigError("--replace deletes the run that --resume would continue; pass only one of them")
    run = load_run(config, overrides)
    if dry_run:
        from agentrl.plan.model_defaults import toy_values  # a run that trains does not enter it

        plan = plan_run(run, resumes=resume)
        missing, problems, remarks = missing_here(plan), list(plan.problems), list[str]()
        try:
            remarks = task_remarks(plan.run)
        except ConfigError as error:
            problems.append(str(error))
        lacks = "".join([f"error: {line}\n" for line in problems] + [f"not on this machine: {line}\n" for line in missing])
        doubts = [*reward_warnings(plan.run), *toy_values(plan.run, plan.model)]
        warnings = "".join(f"warning: {line}\n" for line in doubts)
        said = describe_plan(plan, remarks, left_out_here(plan.run))
        print(f"{said}\n\n{resolved_yaml(plan.run)}{warnings}{lacks}", end="")
        sys.exit(1 if problems or missing else 0)
    existing = "replace" if replace else "resume" if resume else "error"
    job = partial(train_run, run, existing=existing, accept_changed_tasks=accept_changed_tasks, may_exit=True)
    run_job(job, partial(describe_interrupted_run, run))


MakeSource: TypeAlias = Callable[[RunConfig, Renderer], GroupSource]
"""Makes the source of the groups of a run, which gets the renderer with the context limit of the servers."""


class Parts(NamedTuple):
    """The parts of a run that are checked without starting anything."""

    renderer: Renderer
    tasks: TaskSets
    workflow: RolloutWorkflow
    trackers: Mapping[str, Tracker]
    remarks: Sequence[str]
    """Of the workflow, on the tasks."""


def load_parts(plan: Plan, objects: RunObjects | None = None) -> Parts:
    """Return tokenizer, tasks, workflow and trackers of a planned run; `objects` replace what it names.

    Raises:
        ConfigError: one of them, a GPU or the SGLang to launch is missing or wrong.
    """
    run = plan.run
    if plan.missing_gpus:
        raise ConfigError("; ".join(plan.missing_gpus) + "; set it to auto or cpu, or run on a machine that has the GPUs")
    if plan.problems:
        raise ConfigError("; ".join(plan.problems))
    if run.inference.backend == "sglang" and not run.inference.urls and run.cluster.launcher != "ray":
        find_sglang_python(run.inference)
    trackers = load_trackers(run) if run.track else {}
    renderer = load_renderer(run, run.model.directory)
    tasks = load_tasks(run.tasks) if objects is None or objects.tasks is None else objects.tasks
    workflow = load_workflow(run.workflow, run.workflow_args) if objects is None else objects.workflow
    if run.tasks.skips_unreadable and (objects is None or objects.tasks is None):
        tasks = playable_tasks(tasks, run.tasks, workflow.refusal)
    check_tasks_travel(run, tasks)
    return Parts(renderer, tasks, workflow, trackers, workflow.check_tasks(tasks.finite))


def load_renderer(run: RunConfig, model: str | Path) -> Renderer:
    """Return the renderer of `model`, with the context limit of the run's servers.

    Raises:
        ConfigError: a tokenizer file is missing, or the limit exceeds the positions of the model.
    """
    limit = run.inference.context_limit
    sampling = run.sampling
    renderer = Renderer.load(
        model, template_options=sampling.template_options, max_context=limit, tool_format=sampling.tool_format
    )
    asked, positions = run.inference.max_context_tokens, renderer.model_positions
    if asked is not None and positions is not None and asked > positions:
        raise ConfigError(
            f"inference.max_context_tokens: {asked} is more than the {positions} positions of {model}; lower it"
        )
    return renderer


async def train_run(
    run: RunConfig,
    *,
    existing: Existing = "error",
    accept_changed_tasks: bool = False,
    progress: Progress | None = None,
    max_block_s: float | None = None,
    may_exit: bool = False,
    objects: RunObjects | None = None,
    make_source: MakeSource | None = None,
) -> RunReport:
    """Train as `run` says and return the report.

    Where the trainer worker dies, the run starts its processes again and continues from its newest checkpoint, at most
    `trainer.restarts` times within an hour. `make_source` makes what brings the groups; None: they are those of the tasks.

    `run.run_dir` gets config.yaml, plan.txt, metrics.jsonl, episodes/, weights/, checkpoints/, logs/, summary.json.

    Raises:
        ConfigError: before anything is started; also where another process runs this run, whose files stay as they are.
        AgentRLError: what ended the run.
        KeyboardInterrupt: a signal ended it, in the main thread.

    Cancellation: servers and trainer are ended, within 5 seconds; the run directory keeps what was recorded. A signal first
        ends the engine, which saves a checkpoint within 20 seconds.
    """
    given, deaths, death = run, list[float](), None
    progress = progress or make_progress()
    while True:
        # In a thread, because it may connect to a Ray cluster, which takes seconds.
        make_plan = partial(plan_run, given, resumes=existing == "resume")
        try:
            plan = await anyio.to_thread.run_sync(make_plan, abandon_on_cancel=True)
        except ConfigError as error:
            if death is not None:  # such as a cluster that has too little left without the node that died
                progress.end(describe_end(run, death))
            raise error from death
        run = plan.run
        try:
            return await _train_once(
                plan, objects, existing, accept_changed_tasks, progress, max_block_s, may_exit, make_source
            )
        except TrainerDied as error:
            deaths = [*(death for death in deaths if anyio.current_time() - death < RESTART_WINDOW_S), anyio.current_time()]
            if len(deaths) > run.trainer.restarts or not _has_checkpoint(run):
                progress.end(describe_end(run, error))
                raise
            logger.warning("%s\nThe run continues from its newest checkpoint (trainer.restarts)", error)
            existing, death = "resume", error
        except ConfigError:
            raise  # nothing has started
        except AgentRLError as error:
            progress.end(describe_end(run, error))
            raise


async def _train_once(
    plan: Plan,
    objects: RunObjects | None,
    existing: Existing,
    accept_changed_tasks: bool,
    progress: Progress,
    max_block_s: float | None,
    may_exit: bool,
    make_source: MakeSource | None,
) -> RunReport:
    run = plan.run
    watched = partial(watched_loop, run.engine.stall_timeout_s if max_block_s is None else max_block_s)
    engine: Engine | None = None

    def conclude(error: BaseException | None) -> str:
        write_summary(run, None if engine is None else engine.report(), error)
        return describe_results(run.run_dir)

    with ExitStack() as stack:
        async with watched():
            parts = load_parts(plan, objects)
            stack.enter_context(run_lock(run.run_dir))
            await _earlier_trainer_ended(run)
            checkpoint = None
            if existing == "resume":
                may_begin = make_source is not None
                checkpoint = find_checkpoint(run, parts.tasks, accept_changed_tasks, may_begin=may_begin)
            if checkpoint is not None and checkpoint.is_complete(run):
                return conclude_complete(run, checkpoint)
            step = 0 if checkpoint is None else checkpoint.state.step
            prepare_directory(plan, existing, objects, step, parts.remarks, parts.tasks.left_out)
        try:
            async with (
                watched(on_exit=conclude if may_exit else None) as watch,
                open_launcher(run.cluster) as launcher,
                enter_both(_pool(run, parts.renderer, launcher), _trainer(plan, launcher)) as (pool, trainer),
            ):
                if checkpoint is not None and checkpoint.path is not None:
                    await trainer.restore(str(checkpoint.path))
                engine = _engine(plan, parts, pool, trainer, progress, checkpoint, make_source)
                # A signal ends the engine first: it saves a checkpoint, for which the trainer must still run.
                with tuned_garbage_collector(), watch.ends_first():
                    report = await engine.run()
        except BaseException as error:
            conclude(error)
            raise
        conclude(None)
        progress.end(describe_end(run, None))
    return report


def _has_checkpoint(run: RunConfig) -> bool:
    try:
        return latest_checkpoint(run.run_dir / "checkpoints") is not None
    except TrainError as error:
        logger.warning("the run cannot continue: %s", error)
        return False


def _engine(
    plan: Plan,
    parts: Parts,
    pool: ServerPool,
    trainer: RemoteTrainer,
    progress: Progress,
    checkpoint: ResumePoint | None,
    make_source: MakeSource | None,
) -> Engine:
    run, renderer = plan.run, parts.renderer.within(pool.max_context_tokens)
    resume = NEW_RUN if checkpoint is None else checkpoint.state
    engine_parts = EngineParts(
        workflow=parts.workflow,
        runner=make_runner(run, parts.workflow, renderer, model=run.model.directory, log_dir=run.run_dir / "logs"),
        source=None if make_source is None else make_source(run, renderer),
        tasks=parts.tasks.train,
        shuffle_tasks=run.tasks.shuffle,
        eval_tasks=parts.tasks.evaluation,
        inference=pool,
        renderer=renderer,
        trainer=trainer,
        run_dir=run.run_dir,
        algorithm=run.algorithm,
        rollout=run.rollout,
        sampling=run.sampling,
        engine=run.engine,
        compute_type=run.compute_type,
        seed=run.seed,
        name=run.name,
        progress=progress,
        send_dtype=run.resolved_inference.dtype if plan.route.method == "distributed" else None,
        resume=resume,
        trackers=make_feed(run, parts.trackers, parts.renderer, resume.step) if parts.trackers else None,
    )
    return Engine(engine_parts)


def _pool(run: RunConfig, renderer: Renderer, launcher: Launcher) -> AbstractAsyncContextManager[ServerPool]:
    return launch_pool(
        run.resolved_inference,
        model_path=run.model.directory,
        vocab_size=renderer.vocab_size,
        seed=run.seed,
        log_dir=run.run_dir / "logs",
        launcher=launcher,
        max_adapter_lag=run.max_adapter_lag,
    )


def _trainer(plan: Plan, launcher: Launcher) -> AbstractAsyncContextManager[RemoteTrainer]:
    run = plan.run
    return launch_trainer(
        run.trainer,
        run.algorithm,
        model_path=run.model.directory,
        total_steps=run.engine.steps,
        seed=run.seed,
        log_path=run.run_dir / "logs" / "trainer.log",
        sync=plan.route.sync,
        cluster=run.cluster,
        launcher=launcher,
    )


async def _earlier_trainer_ended(run: RunConfig) -> None:
    """Wait until the trainer of a killed process has finished its last request, which may write a checkpoint."""
    try:
        with anyio.fail_after(run.trainer.call_timeout_s):
            await worker_ended(run.run_dir / "logs" / "trainer.log")
    except TimeoutError:
        raise ConfigError(
            f"the trainer worker of an earlier process still writes to {run.run_dir}; end it (python -m "
            "agentrl.trainer.worker.process), or choose another --name"
        ) from None
