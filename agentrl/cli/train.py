"""`agentrl train` on one machine: servers and trainer as supervised subprocesses, the engine here.

Invariant: bad input is reported before a process is started; whatever happens then, every process started here has ended
when `train` returns, and the run directory holds what was recorded, with a `summary.json` that says how it ended. Ctrl-C,
SIGTERM under the command line and a workflow that blocks the event loop are ways to end; only SIGKILL leaves no summary.

The checkpoint a run goes on from.

Invariant: a run goes on only as the run it was: what decides the order of its tasks or the shape of its batches is as it was
when it began, and the checkpoint is whole.

Open two async context managers at once: a server and a trainer each take seconds to start.

Invariant: when the block is left, both have been closed, each in the task that opened it; a failure of one ends the
other.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar, cast

import anyio
import orjson
import yaml
from anyio.abc import TaskStatus

from agentrl.cli.plan import describe_plan, missing_gpus, resolved_yaml
from agentrl.cli.tasks import TaskSets, load_tasks
from agentrl.concurrency import task_group
from agentrl.config import RunConfig
from agentrl.engine.engine import Engine
from agentrl.engine.report import RunReport
from agentrl.engine.resume import RunState
from agentrl.errors import AgentRLError, ConfigError, RunStopped, TrainError
from agentrl.inference.launch.pool import launch_pool
from agentrl.inference.launch.sglang import find_sglang_python
from agentrl.inference.pool.pool import ServerPool
from agentrl.observe.progress import Progress, make_progress
from agentrl.tokens.renderer import Renderer
from agentrl.train.checkpoint import latest_checkpoint
from agentrl.train.worker.client import RemoteTrainer, launch_trainer
from agentrl.watchdog.loop import watched_loop
from agentrl.watchdog.signals import results_in, stop_word
from agentrl.workflow import RolloutWorkflow, load_workflow

_FIXED = (
    ("seed",),
    ("model", "path"),
    ("workflow",),
    ("tasks",),
    ("algorithm", "group_size"),
    ("algorithm", "groups_per_step"),
)
"""Fields a run cannot change when it goes on; others, such as `engine.steps` and `trainer.lr`, may be set anew."""


class ResumePoint(NamedTuple):
    """A whole checkpoint and where its run stood."""

    path: Path
    state: RunState


def find_checkpoint(run: RunConfig) -> ResumePoint:
    """Return the newest sound checkpoint of `run`.

    Raises:
        ConfigError: there is none, none is sound, or the run was another one.
    """
    root = run.run_dir / "checkpoints"
    if not root.is_dir():
        raise ConfigError(
            f"--resume: {root} does not exist; there is no run named {run.name!r} with a checkpoint to go on from"
        )
    _check_same(run)
    try:
        found = latest_checkpoint(root)
        if found is None:
            raise ConfigError(f"--resume: {root} holds no checkpoint; start anew with --replace")
        state = RunState.from_note(found.note, where=str(found.path))
    except TrainError as error:
        raise ConfigError(f"--resume: {error}") from error
    if state.step >= run.engine.steps:
        raise ConfigError(
            f"--resume: {found.path} has {state.step} of {run.engine.steps} steps done; raise --engine.steps to train on"
        )
    return ResumePoint(found.path, state)


def _check_same(run: RunConfig) -> None:
    file = run.run_dir / "config.yaml"
    try:
        before: object = yaml.safe_load(file.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"--resume: cannot read how the run was configured from {file}: {error}") from error
    now: object = yaml.safe_load(resolved_yaml(run))
    for path in _FIXED:
        was, wanted = _at(before, path), _at(now, path)
        if was != wanted:
            raise ConfigError(
                f"--resume: {'.'.join(path)} was {was!r} and is now {wanted!r}; a run goes on with what it began with. "
                "Set it back, or start another run with --name"
            )


def _at(tree: object, path: tuple[str, ...]) -> object:
    for key in path:
        tree = cast("dict[str, object]", tree).get(key) if isinstance(tree, dict) else None
    return tree


First = TypeVar("First")
Second = TypeVar("Second")


class Pair(NamedTuple, Generic[First, Second]):
    """What the two context managers gave."""

    first: First
    second: Second


@asynccontextmanager
async def opened_together(
    first: AbstractAsyncContextManager[First], second: AbstractAsyncContextManager[Second]
) -> AsyncGenerator[Pair[First, Second], None]:
    """Yield what both give, having entered them concurrently.

    Raises:
        What either raised on entry, in its background or on exit, or what the block raised; of several, ours first.

    Cancellation: both are closed.
    """
    values: dict[int, Any] = {}
    leave = anyio.Event()

    async def hold(index: int, manager: AbstractAsyncContextManager[object], *, task_status: TaskStatus[None]) -> None:
        async with manager as values[index]:
            task_status.started()
            await leave.wait()

    async with task_group() as holders:
        async with anyio.create_task_group() as starters:
            for index, manager in enumerate((first, second)):
                starters.start_soon(holders.start, hold, index, manager)
        try:
            yield Pair(values[0], values[1])
        finally:
            leave.set()


logger = logging.getLogger(__name__)


class Parts(NamedTuple):
    """What a run needs that can be checked without starting anything."""

    renderer: Renderer
    tasks: TaskSets
    workflow: RolloutWorkflow


def load_parts(run: RunConfig) -> Parts:
    """Return tokenizer, tasks and workflow of a run.

    Raises:
        ConfigError: naming what is missing or wrong, an SGLang to launch and GPUs included.
    """
    if missing := missing_gpus(run):
        raise ConfigError("; ".join(missing) + "; set it to auto or cpu, or run where the GPUs are")
    if run.inference.backend == "sglang" and not run.inference.urls:
        find_sglang_python(run.inference)
    return Parts(load_renderer(run, run.model.path), load_tasks(run.tasks), load_workflow(run.workflow, run.workflow_args))


def load_renderer(run: RunConfig, model: str | Path) -> Renderer:
    """Return the renderer of `model` with the context limit its servers will have.

    Raises:
        ConfigError: a tokenizer file is missing, or the servers' limit is more than the model has positions.
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
"""What to do about a run directory that is there: refuse, delete it, write into it, or go on from its newest checkpoint."""


async def train(
    run: RunConfig,
    *,
    existing: Existing = "error",
    progress: Progress | None = None,
    max_block_s: float | None = None,
    may_exit: bool = False,
) -> RunReport:
    """Train as `run` says and return what was done.

    `run.run_dir` gets config.yaml, plan.txt, metrics.jsonl, trajectories.jsonl, weights/, checkpoints/, logs/, summary.json.

    Args:
        run: the whole run.
        existing: what to do about a run directory that is there.
        progress: how to show the run; None: live on a terminal, a line a step elsewhere.
        max_block_s: seconds the event loop may be blocked by code that does not await; None: `engine.stall_timeout_s`.
        may_exit: whether the process may end as a whole, its summary written, for a workflow that ignores every interrupt.

    Raises:
        ConfigError: before anything is started.
        AgentRLError: what ended the run.
        KeyboardInterrupt: a signal ended it, in the main thread.

    Cancellation: servers and trainer are ended, within 5 seconds; the run directory keeps what was recorded.
    """
    watched = partial(watched_loop, run.engine.stall_timeout_s if max_block_s is None else max_block_s)
    engine: Engine | None = None

    def conclude(error: BaseException | None) -> str:
        _write_summary(run, None if engine is None else engine.report(), error)
        return results_in(run.run_dir)

    async with watched():
        parts = load_parts(run)
        checkpoint = find_checkpoint(run) if existing == "resume" else None
        _prepare_directory(run, existing)
    try:
        training = watched(last_words=conclude if may_exit else None)
        async with training, opened_together(_pool(run, parts.renderer), _trainer(run)) as (pool, trainer):
            if checkpoint is not None:
                await trainer.restore(str(checkpoint.path))
            resume = None if checkpoint is None else checkpoint.state
            engine = _engine(run, parts, pool, trainer, progress or make_progress(), resume)
            report = await engine.run()
    except BaseException as error:
        conclude(error)
        raise
    conclude(None)
    return report


def _engine(
    run: RunConfig, parts: Parts, pool: ServerPool, trainer: RemoteTrainer, progress: Progress, resume: RunState | None
) -> Engine:
    return Engine(
        workflow=parts.workflow,
        tasks=parts.tasks.train,
        eval_tasks=parts.tasks.evaluation,
        inference=pool,
        renderer=parts.renderer.within(pool.max_context_tokens),
        trainer=trainer,
        run_dir=run.run_dir,
        algorithm=run.algorithm,
        rollout=run.rollout,
        sampling=run.sampling,
        engine=run.resolved_engine,
        seed=run.seed,
        name=run.name,
        progress=progress,
        send_dtype=run.resolved_inference.dtype if run.route.method == "distributed" else None,
        resume=resume,
    )


def _pool(run: RunConfig, renderer: Renderer) -> AbstractAsyncContextManager[ServerPool]:
    return launch_pool(
        run.resolved_inference,
        model_path=run.model.path,
        vocab_size=renderer.vocab_size,
        seed=run.seed,
        log_dir=run.run_dir / "logs",
    )


def _trainer(run: RunConfig) -> AbstractAsyncContextManager[RemoteTrainer]:
    return launch_trainer(
        run.trainer,
        run.algorithm,
        model_path=run.model.path,
        total_steps=run.engine.steps,
        seed=run.seed,
        log_path=run.run_dir / "logs" / "trainer.log",
        sync=run.route.sync,
    )


def _prepare_directory(run: RunConfig, existing: Existing) -> None:
    folder = run.run_dir
    used = (folder / "metrics.jsonl").exists() or (folder / "checkpoints").exists()
    if used and existing == "error":
        raise ConfigError(
            f"{folder} exists; choose another --name, pass --resume to go on from its newest checkpoint, or pass --replace "
            "to delete it first"
        )
    if folder.exists() and existing == "replace":
        _keep_inputs(run, folder)
    try:
        if folder.exists() and existing == "replace":
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(resolved_yaml(run))
        (folder / "plan.txt").write_text(describe_plan(run) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write the run directory {folder}: {error.strerror}") from error


def _keep_inputs(run: RunConfig, folder: Path) -> None:
    """Refuse to delete what the run is about to read."""
    inputs = {
        "model.path": run.model.path,
        "tasks.path": run.tasks.path,
        "tasks.eval_path": run.tasks.eval_path,
        "sft.data": run.sft.data if run.sft else None,
    }
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


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a readable JSON file that appears whole or not at all.

    Raises:
        OSError: it cannot be written; nothing is left of the attempt.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    written = orjson.dumps(values, option=orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
    try:
        temporary.write_bytes(written)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def first_of_ours(error: BaseException) -> AgentRLError | None:
    """Return the first agentrl error inside an exception or exception group; None if there is none."""
    if isinstance(error, AgentRLError):
        return error
    if isinstance(error, BaseExceptionGroup):
        return next((found for inner in error.exceptions if (found := first_of_ours(inner)) is not None), None)
    return None


def describe_error(error: BaseException) -> str:
    """Return what went wrong, or what interrupted it, in one message, whatever wraps it."""
    if isinstance(error, KeyboardInterrupt):
        return stop_word(error)
    ours = first_of_ours(error)
    return str(ours) if ours is not None else f"{type(error).__name__}: {error}"
