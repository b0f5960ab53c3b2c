"""Checks that import the user's modules and read task files: parts that are missing here, and rewards that do not fit.

Invariant: no factory is called and nothing is started. What this machine lacks is listed and is no error.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from textwrap import dedent

from agentrl.config import RunConfig
from agentrl.config.names import local_file, model_file
from agentrl.data.left_out import LeftOutTask
from agentrl.data.load import load_held_out, load_tasks, load_training
from agentrl.data.playable import playable_tasks
from agentrl.data.source import find_function
from agentrl.engine.skipped import TURN_REWARDS_ADVICE
from agentrl.errors import ConfigError
from agentrl.inference.launch.sglang import find_sglang_python
from agentrl.plan.disk_space import disk_problems
from agentrl.plan.plan import Plan
from agentrl.plan.trackers import load_trackers
from agentrl.support.user_code import import_user_module
from agentrl.workflow import RolloutWorkflow, load_workflow


def missing_here(plan: Plan) -> list[str]:
    """Return the parts of the run that this machine lacks, as far as that can be found without starting anything."""
    config = plan.run
    tasks, inference = config.tasks, config.inference
    probes: list[Callable[[], object]] = [partial(load_workflow, config.workflow, config.workflow_args)]
    if all(source.factory is None for source in tasks.training):
        probes.append(partial(load_training, tasks))
    if tasks.eval is not None and tasks.eval.factory is None:
        probes.append(partial(load_held_out, tasks))
    named = {"factory": tasks.factory, "map": tasks.map, "curriculum": tasks.curriculum}
    named |= {f"sources.{number}.factory": source.factory for number, source in enumerate(tasks.sources)}
    probes += [partial(find_function, name, f"tasks.{field}") for field, name in named.items() if name is not None]
    probes.append(partial(load_trackers, config))
    if inference.backend == "sglang" and not inference.urls and config.cluster.launcher != "ray":
        probes.append(partial(find_sglang_python, inference))
    missing: list[str] = []
    try:
        form = model_file(config.model.path)
        if form is not None:
            form.config(local_file(config.model.path))
        elif not Path(config.model.directory).is_dir():
            missing.append(
                f"model.path: there is no directory {config.model.path}; put a HF checkpoint there, or name a model of the "
                "hub (hf://org/name) after `agentrl download hf://org/name`"
            )
    except ConfigError as error:
        text = str(error)
        missing.append(text if text.startswith("model.path: ") else f"model.path: {text}")
    missing += plan.missing_gpus
    if plan.memory is not None:
        missing += plan.memory.snapshot.problems(config.trainer) + disk_problems(config, plan.memory, plan.route)
    for probe in probes:
        try:
            probe()
        except ConfigError as error:
            missing.append(str(error))
    return missing


def task_remarks(config: RunConfig) -> list[str]:
    """Return what the workflow remarks on the tasks of a run; what cannot be loaded here is in `missing_here`.

    Raises:
        ConfigError: the workflow refuses a task.
    """
    try:
        workflow = load_workflow(config.workflow, config.workflow_args)
        if type(workflow).check_tasks is RolloutWorkflow.check_tasks:
            return []
        if any(source.factory is not None for source in config.tasks.training):
            return []
        sets = load_tasks(config.tasks)
    except ConfigError:
        return []
    return list(workflow.check_tasks(playable_tasks(sets, config.tasks, workflow.refusal).finite))


def left_out_here(config: RunConfig) -> list[LeftOutTask]:
    """Return the tasks that `unreadable: skip` leaves out; none where `missing_here` names them as missing."""
    left_out: list[LeftOutTask] = []
    tasks = config.tasks
    sources = [*tasks.training, *([tasks.eval] if tasks.eval else [])]
    if all(source.unreadable == "refuse" or source.factory is not None for source in sources):
        return []
    if all(source.factory is None for source in sources):
        with suppress(ConfigError):  # one set may be missing, or none of its tasks can be played
            workflow = load_workflow(config.workflow, config.workflow_args)
            return list(playable_tasks(load_tasks(tasks), tasks, workflow.refusal).left_out)
    for load, sources in ((load_training, tasks.training), (load_held_out, [tasks.eval] if tasks.eval else [])):
        if any(source.unreadable == "skip" for source in sources) and all(source.factory is None for source in sources):
            with suppress(ConfigError):
                load(tasks, left_out)
    return left_out


def reward_warnings(config: RunConfig) -> list[str]:
    """Return a warning where the workflow rewards single turns and the estimator gives every turn the whole return."""
    if config.algorithm.advantage_name != "episode":
        return []
    module, _, name = config.workflow.partition(":")
    try:
        found: object = getattr(import_user_module(module), name)
        source = dedent(inspect.getsource(found if inspect.isfunction(found) or inspect.isclass(found) else type(found)))
    except (ConfigError, AttributeError, OSError, TypeError):  # reported elsewhere, or without a source
        return []
    if not _rewards_turns(source):
        return []
    return [f"{config.workflow} rewards single turns (`client.reward`), but {TURN_REWARDS_ADVICE}"]


def _rewards_turns(source: str) -> bool:
    """Return whether the source calls `reward` of some object with a completion and a value.

    Example:
        >>> _rewards_turns("client.reward(completion, 1.0)"), _rewards_turns("grader.reward(text)")
        (True, False)
    """
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return any(
        isinstance(call.func, ast.Attribute) and call.func.attr == "reward" and len(call.args) + len(call.keywords) == 2
        for call in calls
    )
