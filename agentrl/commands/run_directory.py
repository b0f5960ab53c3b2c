"""The directory of a run: how it begins, how it is resumed from a checkpoint, and its summary.

Invariant: nothing that exists is written over or deleted unless that was asked for. A resumed run keeps the order of its
tasks and the shape of its batches, and starts from a whole checkpoint.
"""

from __future__ import annotations

import logging
import shutil
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias, cast

import orjson
import yaml
from msgspec.structs import replace
from pydantic import ValidationError

from agentrl.commands.running import describe_error
from agentrl.config import RunConfig
from agentrl.data.config import TasksConfig
from agentrl.data.left_out import LeftOutTask
from agentrl.data.load import TaskSets, write_task_files
from agentrl.engine.parts import BEGUN_RUN, RunState
from agentrl.engine.report import RunReport, Totals
from agentrl.errors import ConfigError, RunStopped, TrainError
from agentrl.observe.resuming import last_wall_s
from agentrl.observe.runs.reading import read_metrics
from agentrl.plan.plan import Plan
from agentrl.plan.resizing import record_split
from agentrl.plan.text import describe_plan, resolved_yaml
from agentrl.support.files import write_json
from agentrl.support.folders import make_private
from agentrl.trainer.checkpoints.read import latest_checkpoint
from agentrl.workflow import RolloutWorkflow

logger = logging.getLogger(__name__)

Existing: TypeAlias = Literal["error", "replace", "use", "resume"]
"""The treatment of an existing run directory: refuse it, delete it, write into it, or resume from its newest checkpoint."""


_LEFT_OUT: Final = "left_out_tasks.jsonl"


class RunObjects(NamedTuple):
    """A workflow and tasks that a Python program gives as objects."""

    workflow: RolloutWorkflow
    tasks: TaskSets | None
    """None: those that the run names. Others are written into the run directory, where the run's config names them."""


def prepare_directory(
    plan: Plan,
    existing: Existing,
    objects: RunObjects | None,
    step: int,
    remarks: Sequence[str] = (),
    left_out: Sequence[LeftOutTask] = (),
) -> None:
    """Make the directory of a run that begins after `step` steps, and write its run file, plan, tasks and `left_out` ones.

    The plan has the `remarks` of the workflow on the tasks.

    Raises:
        ConfigError: it exists, would be deleted with a file that the run reads, or cannot be written.
    """
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
        (folder / "plan.txt").write_text(describe_plan(plan, remarks, left_out) + "\n")
        _write_left_out(folder / _LEFT_OUT, left_out)
        if run.cluster.split is not None:
            record_split(run, step)
        if objects is not None and objects.tasks is not None:
            write_task_files(folder, objects.tasks.train.finite, objects.tasks.evaluation)
    except OSError as error:
        raise ConfigError(f"cannot write the run directory {folder}: {error.strerror}") from error


def _write_left_out(file: Path, left_out: Sequence[LeftOutTask]) -> None:
    """Write a line for each task that cannot be read; no file where there is none."""
    if left_out:
        file.write_bytes(b"".join(orjson.dumps(task._asdict()) + b"\n" for task in left_out))
    else:
        file.unlink(missing_ok=True)  # of the run before it was resumed


def _task_files(run: RunConfig) -> dict[str, str | None]:
    tasks = run.tasks
    files = {"tasks.path": tasks.path, "tasks.eval.path": tasks.eval and tasks.eval.path}
    return files | {f"path of tasks.sources.{number}": source.path for number, source in enumerate(tasks.sources)}


def _check_inputs_survive(run: RunConfig, folder: Path, task_files: Mapping[str, str | None]) -> None:
    """Refuse to delete a file that the run reads."""
    inputs = {"model.path": run.model.path, **task_files, "sft.data": run.sft.data if run.sft else None}
    for name, path in inputs.items():
        if path is not None and Path(path).resolve().is_relative_to(folder.resolve()):
            raise ConfigError(f"--replace would delete {name} = {path}, which is inside {folder}; choose another --name")


def write_summary(run: RunConfig, report: RunReport | None, error: BaseException | None) -> None:
    """Write `summary.json`; `error` is what ended the run.

    Raises:
        RunStopped: it cannot be written, and no error ended the run.
    """
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

    path: Path | None
    """None: the run lost its process before its first checkpoint, and begins again from its model."""
    state: RunState

    def is_complete(self, run: RunConfig) -> bool:
        """Return whether neither a step nor an evaluation is left."""
        return self.state.step >= run.engine.steps and not self.state.evaluations_due


def find_checkpoint(
    run: RunConfig, tasks: TaskSets, accept_changed_tasks: bool = False, *, may_begin: bool = False
) -> ResumePoint:
    """Return the newest checkpoint of `run` that is whole; with `may_begin`, the first weights where there is none.

    Raises:
        ConfigError: there is none, none is whole, or a field that must not change, or a task, has changed.
    """
    root = run.run_dir / "checkpoints"
    begun = ResumePoint(None, BEGUN_RUN)
    if may_begin and not root.is_dir() and (run.run_dir / "config.yaml").is_file():
        _check_fixed_fields(run)
        return begun
    if not root.is_dir():
        raise ConfigError(f"--resume: {root} does not exist; there is no run named {run.name!r} to resume")
    _check_fixed_fields(run)
    try:
        checkpoint = latest_checkpoint(root)
        if checkpoint is None and may_begin:
            return begun
        if checkpoint is None:
            raise ConfigError(f"--resume: {root} holds no checkpoint; start again with --replace")
        state = RunState.from_note(checkpoint.note, where=str(checkpoint.path))
    except TrainError as error:
        raise ConfigError(f"--resume: {error}") from error
    if not accept_changed_tasks:
        state.check_tasks(tasks.train, tasks.evaluation, where=str(checkpoint.path))
    else:
        state = state.with_tasks(tasks.train)
    due = tuple(step for step in state.evaluations_due if step not in _evaluated(run))
    return ResumePoint(checkpoint.path, replace(state, evaluations_due=due))


def _evaluated(run: RunConfig) -> set[int]:
    """Return the steps whose evaluation was recorded, perhaps after the checkpoint."""
    if not (run.run_dir / "metrics.jsonl").is_file():
        return set()
    return {event["step"] for event in read_metrics(run.run_dir) if event["event"] == "evaluation"}


def conclude_complete(run: RunConfig, checkpoint: ResumePoint) -> RunReport:
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
        write_summary(run, report, None)
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


def _check_fixed_fields(run: RunConfig) -> None:
    file = run.run_dir / "config.yaml"
    try:
        before: object = yaml.safe_load(file.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"--resume: cannot read the config of the run from {file}: {error}") from error
    now: object = yaml.safe_load(resolved_yaml(run))
    for path in _FIXED:
        was, wanted = _at(before, path), _at(now, path)
        if path == ("tasks",) and was != wanted:
            was = _respelled_tasks(was)
        if was != wanted:
            raise ConfigError(
                f"--resume: {'.'.join(path)} was {was!r} and is now {wanted!r}; a resumed run cannot change it. Set it "
                "back, or start another run with --name"
            )


def _respelled_tasks(recorded: object) -> object:
    """Return tasks that a run recorded, perhaps with fields of an earlier release, as this release records them."""
    try:
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            return TasksConfig.model_validate(recorded).model_dump(mode="json")
    except ValidationError:
        return recorded


def _at(tree: object, path: tuple[str, ...]) -> object:
    for key in path:
        tree = cast("dict[str, object]", tree).get(key) if isinstance(tree, dict) else None
    return tree
