"""`agentrl.train`: a training run from a script or a notebook.

Invariant: the run is that of `agentrl train` on `result.config.to_yaml()`: the same files, the same errors, the same end.
When the call returns or raises, every process that it started has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from anyio.from_thread import start_blocking_portal

from agentrl.commands.ending import describe_interrupted_run
from agentrl.commands.open_run import open_run
from agentrl.commands.python.arguments import GivenTasks, read_run
from agentrl.commands.run_directory import Existing
from agentrl.commands.train import train_run
from agentrl.config import RunConfig
from agentrl.engine.report import RunReport
from agentrl.episode.summary import Purpose
from agentrl.errors import RunStopped
from agentrl.observe.progress import Progress
from agentrl.observe.runs.table import EpisodeTable, MetricLines
from agentrl.processes.watchdog.delays import blocks_named
from agentrl.processes.watchdog.signals import interrupt_note, run_without_waiting, sigterm_raises

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedRun:
    """A run that has ended."""

    config: RunConfig
    """The whole run; `config.to_yaml()` writes it down for the command line."""
    report: RunReport = field(repr=False)

    @property
    def path(self) -> Path:
        """The run directory."""
        return self.config.run_dir

    @property
    def checkpoint(self) -> Path:
        """The last checkpoint.

        Raises:
            RunStopped: the run wrote none.
        """
        if self.report.checkpoint is None:
            raise RunStopped(f"{self.path} has no checkpoint")
        return Path(self.report.checkpoint)

    def metrics(self, event: str | None = None) -> MetricLines:
        """Return the lines of `metrics.jsonl`, those of one event (`step`, `evaluation`, ...) if given."""
        return open_run(self.path).metrics(event)

    def episodes(self, step: int | None = None, purpose: Purpose | None = None) -> EpisodeTable:
        """Return the finished attempts, as `agentrl.open_run(path).episodes` does."""
        return open_run(self.path).episodes(step, purpose)


def train(
    workflow: object,
    tasks: GivenTasks,
    *,
    model: str | Path,
    eval_tasks: GivenTasks | None = None,
    existing: Existing = "error",
    accept_changed_tasks: bool = False,
    progress: Progress | None = None,
    **overrides: object,
) -> TrainedRun:
    """Train `model` on `workflow` and `tasks`, and return when the run has ended.

    In a script it runs an event loop of its own, as `agentrl train` does. Where a loop runs already, as in a notebook, the
    run has its own loop in a worker thread, and the call blocks: a program that has other things to do on its loop awaits
    `train_async`.

    Args:
        workflow: a RolloutWorkflow class or instance, an `async def solve(task, client) -> float`, or `module:Name`.
        tasks: a JSONL file, or a list of mappings or of `Task`, which is written into the run directory.
        model: local directory of a HF checkpoint.
        eval_tasks: held-out tasks, of the same kinds.
        existing: what to do with an existing run directory: `error`, `replace` it, or `resume` from its newest checkpoint.
        accept_changed_tasks: whether a resumed run may continue with tasks that differ from those of its checkpoint.
        progress: how to show the run; None: live on a terminal, one line a step elsewhere.
        **overrides: fields of a run file: `name="first"`, `trainer={"lr": 1e-5}`, `trainer__lr=1e-5`.

    Raises:
        ConfigError: before anything is started; one line for each error, with the field and the fix.
        AgentRLError: what ended the run.
        KeyboardInterrupt: Ctrl-C ended it. In a script the run first saves a checkpoint; in a notebook it ends at once.
    """
    given = read_run("agentrl.train", workflow, tasks, eval_tasks, model, overrides)
    job = partial(
        train_run,
        given.config,
        existing=existing,
        accept_changed_tasks=accept_changed_tasks,
        progress=progress,
        objects=given.objects,
    )
    with interrupt_note(partial(describe_interrupted_run, given.config)):
        report = run_blocking(job)
    return TrainedRun(config=given.config, report=report)


async def train_async(
    workflow: object,
    tasks: GivenTasks,
    *,
    model: str | Path,
    eval_tasks: GivenTasks | None = None,
    existing: Existing = "error",
    accept_changed_tasks: bool = False,
    progress: Progress | None = None,
    **overrides: object,
) -> TrainedRun:
    """Train on the running event loop, which must be asyncio's; arguments, result and errors are those of `train`.

    Cancellation: servers and trainer are ended, within 5 seconds; the run directory keeps what was recorded.
    """
    given = read_run("agentrl.train_async", workflow, tasks, eval_tasks, model, overrides)
    with blocks_named():
        report = await train_run(
            given.config,
            existing=existing,
            accept_changed_tasks=accept_changed_tasks,
            progress=progress,
            objects=given.objects,
        )
    return TrainedRun(config=given.config, report=report)


def run_blocking(job: Callable[[], Awaitable[Result]]) -> Result:
    """Run an async job to its end: on a loop of this thread, or in a worker thread where this thread's loop runs already.

    Raises:
        KeyboardInterrupt: Ctrl-C; the job was cancelled and has ended.
    """

    async def named() -> Result:
        with blocks_named():
            return await job()

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        with sigterm_raises():
            return run_without_waiting(named)
    with start_blocking_portal(backend="asyncio") as portal:  # an interrupt here cancels the job, and waits for its end
        return portal.start_task_soon(named).result()
