"""`agentrl train` on one machine: servers and trainer are supervised subprocesses, the engine runs in this process.

Invariant: bad input is reported before any process starts. However the run ends, every process that it started has
ended when `train` returns, and the run directory holds what was recorded, with a `summary.json` that says why the run
ended. Ctrl-C, SIGTERM to the command and a workflow that blocks the event loop all end a run in this way; only SIGKILL
leaves no summary. A resumed run keeps the order of its tasks and the shape of its batches, and starts from a whole
checkpoint.
"""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import anyio
import orjson
import yaml
from msgspec.structs import replace

from agentrl.concurrency import enter_both
from agentrl.config import RunConfig
from agentrl.data.load import TaskSets, load_tasks, write_task_files
from agentrl.engine.engine import Engine
from agentrl.engine.parts import EngineParts
from agentrl.engine.report import RunReport, Totals
from agentrl.engine.resume import NEW_RUN, RunState
from agentrl.errors import AgentRLError, ConfigError, RunStopped, TrainerDied, TrainError
from agentrl.folders import make_private
from agentrl.inference.launch.pool import launch_pool
from agentrl.inference.launch.sglang import find_sglang_python
from agentrl.inference.pool.pool import ServerPool
from agentrl.jobs.ending import describe_end
from agentrl.jobs.errors import describe_error
from agentrl.jobs.files import write_json
from agentrl.jobs.rollouts import check_tasks_travel, make_runner
from agentrl.jobs.run_lock import run_lock
from agentrl.observe.progress import Progress, make_progress
from agentrl.observe.resuming import last_wall_s
from agentrl.observe.trackers.base import Tracker
from agentrl.plan.plan import Plan, plan_run
from agentrl.plan.resizing import record_split
from agentrl.plan.text import describe_plan, resolved_yaml
from agentrl.plan.trackers import load_trackers, make_feed
from agentrl.processes.base import Launcher
from agentrl.processes.start import open_launcher
from agentrl.runs.reading import read_metrics
from agentrl.tokens.renderer import Renderer
from agentrl.trainer.checkpoints.read import latest_checkpoint
from agentrl.trainer.worker.client import RemoteTrainer, launch_trainer
from agentrl.trainer.worker.ranks import worker_ended
from agentrl.watchdog.garbage_collector import tuned_garbage_collector
from agentrl.watchdog.loop import watched_loop
from agentrl.watchdog.signals import describe_results
from agentrl.workflow import RolloutWorkflow, load_workflow

logger = logging.getLogger(__name__)

RESTART_WINDOW_S = 3600.0
"""Seconds in which the restarts of the trainer are counted together."""


class Parts(NamedTuple):
    """The parts of a run that are checked without starting anything."""

    renderer: Renderer
    tasks: TaskSets
    workflow: RolloutWorkflow
    trackers: Mapping[str, Tracker]


class RunObjects(NamedTuple):
    """A workflow and tasks that a Python program gives as objects."""

    workflow: RolloutWorkflow
    tasks: TaskSets | None
    """None: those that the run names. Others are written into the run directory, where the run's config names them."""


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
    trackers = load_trackers(run)
    renderer = load_renderer(run, run.model.directory)
    tasks = load_tasks(run.tasks) if objects is None or objects.tasks is None else objects.tasks
    check_tasks_travel(run, tasks)
    workflow = load_workflow(run.workflow, run.workflow_args) if objects is None else objects.workflow
    return Parts(renderer, tasks, workflow, trackers)


def load_renderer(run: RunConfig, model: str | Path) -> Renderer:
    """Return the renderer of `model`, with the context limit of the run's servers.

    Raises:
        ConfigError: a tokenizer file is missing, or the limit exceeds the positions of the model.
    """
    limit = run.inference.context_limit
    renderer = Renderer.load(model, template_options=run.sampling.template_options, max_context=limit)
    asked, positions = run.inference.max_context_tokens, renderer.model_positions
    if asked is not None and positions is not None and asked > positions:
        raise ConfigError(
            f"inference.max_context_tokens: {asked} is more than the {positions} positions of {model}; lower it"
        )
    return renderer


Existing: TypeAlias = Literal["error", "replace", "use", "resume"]
"""What to do with an existing run directory: refuse it, delete it, write into it, or resume from its newest checkpoint."""


async def train_run(
    run: RunConfig,
    *,
    existing: Existing = "error",
    accept_changed_tasks: bool = False,
    progress: Progress | None = None,
    max_block_s: float | None = None,
    may_exit: bool = False,
    objects: RunObjects | None = None,
) -> RunReport:
    """Train as `run` says and return the report.

    Where the trainer worker dies, the run starts its processes again and continues from its newest checkpoint, at most
    `trainer.restarts` times within an hour.

    `run.run_dir` gets config.yaml, plan.txt, metrics.jsonl, episodes/, weights/, checkpoints/, logs/, summary.json.

    Args:
        run: the whole run.
        existing: what to do with an existing run directory.
        accept_changed_tasks: whether a resumed run may continue with tasks that differ from those of its checkpoint.
        progress: how to show the run; None: live on a terminal, one line a step elsewhere.
        max_block_s: seconds the event loop may be blocked by code that does not await; None: `engine.stall_timeout_s`.
        may_exit: whether the process may write the summary and exit when a workflow ignores every interrupt.
        objects: workflow and tasks, in place of what `run` names.

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
            return await _train_once(plan, objects, existing, accept_changed_tasks, progress, max_block_s, may_exit)
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
) -> RunReport:
    run = plan.run
    watched = partial(watched_loop, run.engine.stall_timeout_s if max_block_s is None else max_block_s)
    engine: Engine | None = None

    def conclude(error: BaseException | None) -> str:
        _write_summary(run, None if engine is None else engine.report(), error)
        return describe_results(run.run_dir)

    with ExitStack() as stack:
        async with watched():
            parts = load_parts(plan, objects)
            stack.enter_context(run_lock(run.run_dir))
            await _earlier_trainer_ended(run)
            checkpoint = find_checkpoint(run, parts.tasks, accept_changed_tasks) if existing == "resume" else None
            if checkpoint is not None and checkpoint.is_complete(run):
                return _conclude_complete(run, checkpoint)
            _prepare_directory(plan, existing, objects, 0 if checkpoint is None else checkpoint.state.step)
        try:
            async with (
                watched(on_exit=conclude if may_exit else None) as watch,
                open_launcher(run.cluster) as launcher,
                enter_both(_pool(run, parts.renderer, launcher), _trainer(plan, launcher)) as (pool, trainer),
            ):
                if checkpoint is not None:
                    await trainer.restore(str(checkpoint.path))
                engine = _engine(plan, parts, pool, trainer, progress, checkpoint)
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
) -> Engine:
    run, renderer = plan.run, parts.renderer.within(pool.max_context_tokens)
    resume = NEW_RUN if checkpoint is None else checkpoint.state
    engine_parts = EngineParts(
        workflow=parts.workflow,
        runner=make_runner(run, parts.workflow, renderer, model=run.model.directory, log_dir=run.run_dir / "logs"),
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
        engine=run.resolved_engine,
        seed=run.seed,
        name=run.name,
        progress=progress,
        send_dtype=run.resolved_inference.dtype if plan.route.method == "distributed" else None,
        resume=resume,
        trackers=make_feed(run, parts.trackers, parts.renderer, resume.step),
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


def _prepare_directory(plan: Plan, existing: Existing, objects: RunObjects | None, step: int) -> None:
    run, folder = plan.run, plan.run.run_dir
    used = (folder / "metrics.jsonl").exists() or (folder / "checkpoints").exists()
    if used and existing == "error":
        raise ConfigError(
            f"{folder} exists; choose another --name, pass --resume to continue from its newest checkpoint, or pass "
            "--replace to delete it first (in Python: name=, existing='resume', existing='replace')"
        )
    if folder.exists() and existing == "replace":
        _check_inputs_survive(run, folder, {} if objects is not None and objects.tasks is not None else _task_files(run))
    try:
        if folder.exists() and existing == "replace":
            shutil.rmtree(folder)
        make_private(folder)
        (folder / "config.yaml").write_text(resolved_yaml(run))
        (folder / "plan.txt").write_text(describe_plan(plan) + "\n")
        record_split(run, step)
        if objects is not None and objects.tasks is not None:
            write_task_files(folder, objects.tasks.train.finite, objects.tasks.evaluation)
    except OSError as error:
        raise ConfigError(f"cannot write the run directory {folder}: {error.strerror}") from error


def _task_files(run: RunConfig) -> dict[str, str | None]:
    tasks = run.tasks
    files = {"tasks.path": tasks.path, "tasks.eval_path": tasks.eval_path, "tasks.eval.path": tasks.eval and tasks.eval.path}
    return files | {f"path of tasks.sources.{number}": source.path for number, source in enumerate(tasks.sources)}


def _check_inputs_survive(run: RunConfig, folder: Path, task_files: Mapping[str, str | None]) -> None:
    """Refuse to delete a file that the run reads."""
    inputs = {"model.path": run.model.path, **task_files, "sft.data": run.sft.data if run.sft else None}
    for name, path in inputs.items():
        if path is not None and Path(path).resolve().is_relative_to(folder.resolve()):
            raise ConfigError(f"--replace would delete {name} = {path}, which is inside {folder}; choose another --name")


def _write_summary(run: RunConfig, report: RunReport | None, error: BaseException | None) -> None:
    summary: dict[str, Any] = {"name": run.name, "seed": run.seed, "error": None if error is None else describe_error(error)}
    if report is not None:
        summary |= asdict(report)
        summary["dropped_groups"] = sum(report.dropped_groups.values())
        summary["dropped_groups_by_reason"] = dict(report.dropped_groups)
    try:
        write_json(run.run_dir / "summary.json", summary)
    except OSError as failed:
        message = f"cannot write {run.run_dir / 'summary.json'}: {failed.strerror}"
        if error is None:
            raise RunStopped(message) from failed
        logger.warning(message)  # the error that ended the run is the one to raise


_FIXED = (
    ("seed",),
    ("model", "path"),
    ("workflow",),
    ("tasks",),
    ("algorithm", "group_size"),
    ("algorithm", "groups_per_step"),
)
"""Fields that a resumed run cannot change; others, such as `engine.steps` and `trainer.lr`, it can."""


class ResumePoint(NamedTuple):
    """A whole checkpoint, and the state of its run."""

    path: Path
    state: RunState

    def is_complete(self, run: RunConfig) -> bool:
        """Return whether neither a step nor an evaluation is left."""
        return self.state.step >= run.engine.steps and not self.state.evaluations_due


def find_checkpoint(run: RunConfig, tasks: TaskSets, accept_changed_tasks: bool = False) -> ResumePoint:
    """Return the newest checkpoint of `run` that is whole.

    Raises:
        ConfigError: there is none, none is whole, or a field that must not change, or a task, has changed.
    """
    root = run.run_dir / "checkpoints"
    if not root.is_dir():
        raise ConfigError(f"--resume: {root} does not exist; there is no run named {run.name!r} to resume")
    _check_fixed_fields(run)
    try:
        found = latest_checkpoint(root)
        if found is None:
            raise ConfigError(f"--resume: {root} holds no checkpoint; start again with --replace")
        state = RunState.from_note(found.note, where=str(found.path))
    except TrainError as error:
        raise ConfigError(f"--resume: {error}") from error
    if not accept_changed_tasks:
        state.check_tasks(tasks.train, tasks.evaluation, where=str(found.path))
    else:
        state = state.with_tasks(tasks.train)
    due = tuple(step for step in state.evaluations_due if step not in _evaluated(run))
    return ResumePoint(found.path, replace(state, evaluations_due=due))


def _evaluated(run: RunConfig) -> set[int]:
    """Return the steps whose evaluation was recorded, perhaps after the checkpoint."""
    if not (run.run_dir / "metrics.jsonl").is_file():
        return set()
    return {event["step"] for event in read_metrics(run.run_dir) if event["event"] == "evaluation"}


def _conclude_complete(run: RunConfig, checkpoint: ResumePoint) -> RunReport:
    """Write the summary of a run that has nothing left to do, unless it has one, and return its report."""
    state, file = checkpoint.state, run.run_dir / "summary.json"
    report = Totals(first_step=state.step, steps=state.step, checkpoint=str(checkpoint.path)).report(
        policy_version=state.policy_version,
        max_staleness=run.algorithm.max_staleness,
        dropped_groups={},
        failed_episodes={},
        sampled_tokens=0,
        evaluation_tokens=0,
        in_flight_tokens=0,
        wall_seconds=0.0,
        run_seconds=last_wall_s(run.run_dir),
    )
    if not _is_concluded(file):
        _write_summary(run, report, None)
    print(
        f"Run {run.name} is complete: {checkpoint.path} has {state.step} of {run.engine.steps} steps done. Its summary is "
        f"in {file}; raise --engine.steps to train on.",
        file=sys.stderr,
    )
    return report


def _is_concluded(summary: Path) -> bool:
    try:
        found: object = orjson.loads(summary.read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return False
    return isinstance(found, dict) and cast("dict[str, object]", found).get("error", "") is None


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


def _check_fixed_fields(run: RunConfig) -> None:
    file = run.run_dir / "config.yaml"
    try:
        before: object = yaml.safe_load(file.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"--resume: cannot read the config of the run from {file}: {error}") from error
    now: object = yaml.safe_load(resolved_yaml(run))
    for path in _FIXED:
        was, wanted = _at(before, path), _at(now, path)
        if was != wanted:
            raise ConfigError(
                f"--resume: {'.'.join(path)} was {was!r} and is now {wanted!r}; a resumed run cannot change it. Set it "
                "back, or start another run with --name"
            )


def _at(tree: object, path: tuple[str, ...]) -> object:
    for key in path:
        tree = cast("dict[str, object]", tree).get(key) if isinstance(tree, dict) else None
    return tree
