"""Python arguments as a run: a workflow and tasks that may be objects, a model, and overrides of a run file's fields.

Invariant: what a call is given becomes a `RunConfig`, with the errors that a run file gets. A workflow that a run file
cannot name is written in angle brackets, which no command takes for a name.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, cast

import orjson

from agentrl.commands.run_directory import RunObjects
from agentrl.config import RunConfig, parse_config
from agentrl.data.config import TasksConfig
from agentrl.data.curriculum import load_curriculum
from agentrl.data.load import TASK_FILES, TaskSets, TrainingTasks, given_tasks, read_tasks
from agentrl.errors import ConfigError
from agentrl.types import Task
from agentrl.workflow import RolloutWorkflow, as_workflow, load_workflow

GivenTasks: TypeAlias = "str | Path | Sequence[Mapping[str, Any] | Task]"
"""A JSONL file, or a list of mappings or of `Task`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenRun:
    """A run as a Python call describes it."""

    config: RunConfig
    objects: RunObjects


def read_run(
    call: str,
    workflow: object,
    tasks: GivenTasks,
    eval_tasks: GivenTasks | None,
    model: str | Path,
    overrides: Mapping[str, object],
) -> GivenRun:
    """Return the run that the arguments of `call`, its name in errors, describe.

    `overrides` are fields of a run file: `trainer={"lr": 1e-5}`, `trainer__lr=1e-5` or `**{"trainer.lr": 1e-5}`.

    Raises:
        ConfigError: one line for each error, with the field and the fix.
    """
    fields = nested_fields(call, overrides)
    arguments = _workflow_arguments(call, fields.pop("workflow_args", {}))
    played = given_workflow(workflow, arguments)
    name, shown = _workflow_name(workflow, played, arguments)
    sets = _task_sets(tasks, eval_tasks)
    set_field(call, fields, "workflow", name)
    if shown:
        set_field(call, fields, "workflow_args", shown)
    set_field(call, fields, "model.path", str(model))
    place = Path(str(fields.get("runs_dir", "runs"))) / str(fields.get("name", "run"))
    for key, given, file in (("path", tasks, TASK_FILES[0]), ("eval.path", eval_tasks, TASK_FILES[1])):
        if given is not None:
            set_field(call, fields, f"tasks.{key}", str(given if sets is None else place / file))
    if sets is None and eval_tasks is not None:
        _read_held_out_alike(fields["tasks"])
    config = parse_config(fields, source=call)
    if sets is not None:
        _check_held_out(call, eval_tasks, config.tasks)
        sets = _with_curriculum(call, sets, config.tasks)
    return GivenRun(config=config, objects=RunObjects(played, sets))


def given_workflow(workflow: object, arguments: Mapping[str, Any] | None) -> RolloutWorkflow:
    """Return the workflow that a call is given: an object, or `module:Name`.

    Raises:
        ConfigError: it is none, or does not take `arguments`.
    """
    return load_workflow(workflow, arguments) if isinstance(workflow, str) else as_workflow(workflow, arguments)


def _workflow_arguments(call: str, given: object) -> Mapping[str, Any]:
    """Return `workflow_args`, which the run file holds as they are."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"{call}: workflow_args: expected a mapping of names to values, got {type(given).__name__}")
    arguments = cast("Mapping[str, Any]", given)
    for name, value in arguments.items():
        if not _is_json(value):
            raise ConfigError(
                f"{call}: workflow_args.{name}: expected a value that JSON can hold, got {repr(value)[:200]}; pass an "
                "instance of the workflow instead"
            )
    return arguments


def nested_fields(call: str, overrides: Mapping[str, object]) -> dict[str, Any]:
    """Return keyword arguments as the nested mapping of a run file.

    Raises:
        ConfigError: a field is given twice, or a single value is given a field.

    Example:
        >>> nested_fields("train", {"seed": 1, "trainer": {"lr": 0.1}, "trainer__threads": 2, "engine.steps": 3})
        {'seed': 1, 'trainer': {'lr': 0.1, 'threads': 2}, 'engine': {'steps': 3}}
    """
    fields: dict[str, Any] = {}
    for key, value in overrides.items():
        set_field(call, fields, key.replace("__", "."), _changeable(value))
    return fields


def _changeable(value: object) -> object:
    """Return a value with paths as text and mappings as dictionaries that may be changed."""
    if isinstance(value, Mapping):
        return {str(key): _changeable(inner) for key, inner in cast("Mapping[object, object]", value).items()}
    return str(value) if isinstance(value, Path) else value


def set_field(call: str, fields: dict[str, Any], path: str, value: object) -> None:
    """Set a dotted field of a nested mapping; a mapping is merged into what is there.

    Raises:
        ConfigError: the field is there already, or one of its sections is a single value.
    """
    *sections, name = path.split(".")
    for section in sections:
        below = fields.setdefault(section, {})
        if not isinstance(below, dict):
            raise ConfigError(f"{call}: {path}: {section} is a single value and has no field {name}")
        fields = cast("dict[str, Any]", below)
    if isinstance(value, dict) and isinstance(fields.get(name), dict):
        for inner, inner_value in cast("dict[str, object]", value).items():
            set_field(call, fields[name], inner, inner_value)
        return
    if name in fields:
        raise ConfigError(f"{call}: {path} is given twice: {fields[name]!r} and {value!r}; pass it once")
    fields[name] = value


def _task_sets(tasks: GivenTasks, eval_tasks: GivenTasks | None) -> TaskSets | None:
    """Return tasks where one set is a list; None where files hold all of them."""
    if isinstance(tasks, (str, Path)) and (eval_tasks is None or isinstance(eval_tasks, (str, Path))):
        return None
    held_out = () if eval_tasks is None else one_task_set(eval_tasks, "eval_tasks")
    return TaskSets(TrainingTasks.of(one_task_set(tasks, "tasks")), held_out)


def _read_held_out_alike(fields: dict[str, Any]) -> None:
    """Let a file of held-out tasks be read as that of the training tasks is, where the call does not say how."""
    for name in ("format", "map"):
        if name in fields:
            fields["eval"].setdefault(name, fields[name])


def _check_held_out(call: str, eval_tasks: GivenTasks | None, config: TasksConfig) -> None:
    """Refuse held-out tasks of a run file next to tasks that are objects, which replace them."""
    if config.eval is not None and (eval_tasks is None or config.eval.model_fields_set != {"path"}):
        raise ConfigError(f"{call}: tasks.eval applies to files; pass the held-out tasks as eval_tasks")


def _with_curriculum(call: str, sets: TaskSets, config: TasksConfig) -> TaskSets:
    """Return tasks that are objects with the curriculum of the run, and refuse what only files take."""
    given = [name for name in ("map", "filter", "limit") if getattr(config, name)]
    if given:
        raise ConfigError(f"{call}: tasks.{given[0]} applies to files; pass the list of tasks as it should be")
    curriculum = None if config.curriculum is None else load_curriculum(config.curriculum, config.curriculum_args)
    return sets._replace(train=replace(sets.train, curriculum=curriculum, skip_passes=config.skip_passes))


def one_task_set(given: GivenTasks, where: str) -> tuple[Task, ...]:
    """Return the tasks of a file or a list; `where` names them in errors.

    Raises:
        ConfigError: they are neither, or an entry cannot be used.
    """
    if isinstance(given, (str, Path)):
        return read_tasks(given)
    if not isinstance(cast("object", given), Sequence):
        raise ConfigError(f"{where}: expected a list of mappings or tasks, or a file, got {type(given).__name__}")
    return given_tasks(given, where)


def _workflow_name(given: object, workflow: RolloutWorkflow, arguments: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return how a run file names a workflow, and its `workflow_args`; a name in angle brackets if it cannot."""
    if isinstance(given, str):
        return given, arguments
    named = type(given) if isinstance(given, RolloutWorkflow) else given
    module, name = str(getattr(named, "__module__", "")), str(getattr(named, "__qualname__", ""))
    importable = module != "__main__" and getattr(sys.modules.get(module), name, None) is named
    if isinstance(given, RolloutWorkflow):
        attributes = vars(workflow)
        importable = importable and type(given).__init__ is object.__init__ and _is_json(attributes)
        arguments = attributes if importable else {}
    return (f"{module}:{name}", arguments) if importable else (f"<{workflow.name} of {module}>", arguments)


def _is_json(value: object) -> bool:
    """Return whether JSON gives the value back as it is: it turns a tuple into a list and a date into text."""
    try:
        return _reads_back(orjson.loads(orjson.dumps(value)), value)
    except TypeError:
        return False


def _reads_back(read: object, given: object) -> bool:
    if isinstance(given, dict) and isinstance(read, dict):
        mine, other = cast("dict[str, object]", given), cast("dict[str, object]", read)
        return mine.keys() == other.keys() and all(_reads_back(other[key], value) for key, value in mine.items())
    if isinstance(given, list) and isinstance(read, list):
        return all(map(_reads_back, cast("list[object]", read), cast("list[object]", given)))
    return type(read) is type(given) and read == given
