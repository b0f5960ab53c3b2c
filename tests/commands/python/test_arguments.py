"""What a Python call is given becomes a run, or an error that a run file would get."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import yaml

import agentrl
from agentrl import Client, ConfigError, RolloutWorkflow, Task
from agentrl.commands.python.arguments import GivenRun, GivenTasks, read_run
from agentrl.config import parse_config
from agentrl.data.load import read_tasks, write_task_files
from agentrl.workflow import load_workflow

TASKS = [{"question": "a"}, {"question": "b", "id": 7}]


async def solve(task: Task, client: Client, bonus: float = 0.0) -> float:
    return bonus


class Agent(RolloutWorkflow):
    """Has an attribute that a run file sets."""

    max_turns: int = 6

    async def run(self, task: Task, client: Client) -> float:
        return float(self.max_turns)


class Built(RolloutWorkflow):
    """Is made with an argument that a run file cannot know."""

    def __init__(self, depth: object) -> None:
        self.depth = depth

    async def run(self, task: Task, client: Client) -> float:
        return 0.0


def read(
    workflow: object = solve, tasks: GivenTasks = TASKS, eval_tasks: GivenTasks | None = None, **overrides: object
) -> GivenRun:
    return read_run("agentrl.train", workflow, tasks, eval_tasks, "m", overrides)


def test_sections_and_fields_are_given_in_three_ways_that_mean_the_same() -> None:
    nested = read(trainer={"lr": 1e-5, "threads": 2}, seed=3).config
    flat = read(trainer__lr=1e-5, trainer__threads=2, seed=3).config
    fields: dict[str, Any] = {"trainer.lr": 1e-5, "trainer.threads": 2, "seed": 3}
    dotted = read(**fields).config
    assert nested == flat == dotted
    assert (nested.trainer.lr, nested.trainer.threads, nested.seed, nested.model.path) == (1e-5, 2, 3, "m")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"trainer": {"learning_rate": 1}}, "agentrl.train is not a valid run:\n  trainer.learning_rate: there is no such"),
        ({"trainer__lr": "fast"}, "trainer.lr: input should be a valid number"),
        ({"trainer": {"lr": 1}, "trainer__lr": 2}, "trainer.lr is given twice: 1 and 2"),
        ({"seed": 1, "seed__lr": 2}, "seed.lr: seed is a single value and has no field lr"),
        ({"tasks": [1]}, r"tasks\[0\]: expected a mapping or agentrl.Task, got int"),
        ({"tasks": [{"x": object()}]}, r"tasks\[0\]: the fields of a task must be JSON"),
        ({"tasks": []}, "tasks holds no tasks"),
        ({"tasks": [{"id": 1}, {"id": "1"}]}, "tasks: 2 tasks have the id '1'"),
        ({"eval_tasks": "none.jsonl"}, "cannot read none.jsonl"),
        ({"tasks__eval": {"path": "e.jsonl"}}, "tasks.eval applies to files; pass the held-out tasks as eval_tasks"),
        ({"tasks__eval__path": "e.jsonl"}, "tasks.eval applies to files; pass the held-out tasks as eval_tasks"),
        ({"workflow_args": 3}, "workflow_args: expected a mapping of names to values, got int"),
        ({"workflow_args": {"bonus": object()}}, "workflow_args.bonus: expected a value that JSON can hold, got <object"),
        ({"workflow_args": {"bonus": (1, 2)}}, r"workflow_args.bonus: expected a value that JSON can hold, got \(1, 2\)"),
        ({"workflow_args": {"bonsu": 1}}, "unexpected keyword argument 'bonsu'"),
    ],
)
def test_what_is_wrong_is_named_as_in_a_run_file(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(**overrides)


def test_a_workflow_that_is_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="workflow is given twice"):
        read_run("agentrl.train", solve, TASKS, None, "m", {"workflow": "my:Agent"})


def test_a_workflow_of_a_module_is_named_by_a_run_file_that_makes_it_again() -> None:
    agent = Agent()
    agent.max_turns = 3
    for given, arguments in ((agent, {}), (Agent, {"max_turns": 3}), (f"{__name__}:Agent", {"max_turns": 3})):
        config = read(given, workflow_args=arguments).config
        made = load_workflow(config.workflow, config.workflow_args)
        assert isinstance(made, Agent)
        assert made.max_turns == 3
    assert read(solve, workflow_args={"bonus": 0.5}).config.workflow_args == {"bonus": 0.5}


def test_an_attribute_that_json_would_change_is_not_written_into_the_run_file() -> None:
    agent = Agent()
    agent.max_turns = cast("int", (3, 4))
    run = read(agent)
    assert run.config.workflow.startswith("<")
    assert run.config.workflow_args == {}


def test_a_workflow_that_a_run_file_cannot_name_is_told_in_a_comment_and_refused_by_name() -> None:
    class Local(Agent):
        pass

    for given in (Local, Built(object())):
        run = read(given)
        assert run.objects.workflow is given or isinstance(run.objects.workflow, Local)
        text = run.config.to_yaml()
        assert text.startswith("# <")
        assert "is a Python object: save it in a module, and set workflow: module:Name" in text.splitlines()[0]
        with pytest.raises(ConfigError, match="was a Python object; save it in a module"):
            load_workflow(run.config.workflow)


def test_the_yaml_of_a_run_holds_what_was_given_and_reads_back() -> None:
    config = read(eval_tasks="eval.jsonl", tasks="train.jsonl", trainer={"lr": 1e-5}, sync="disk").config
    written = yaml.safe_load(config.to_yaml())
    assert written == {
        "workflow": f"{__name__}:solve",
        "tasks": {"path": "train.jsonl", "eval": {"path": "eval.jsonl"}},
        "model": {"path": "m"},
        "trainer": {"lr": 1e-5},
        "sync": {"method": "disk"},
    }
    assert parse_config(written) == config


def test_tasks_that_are_objects_are_written_where_the_config_names_them(tmp_path: Path) -> None:
    tasks = [*TASKS, Task(id="own", data={"question": "c"})]
    run = read(tasks=tasks, eval_tasks=[{"question": "d"}], name="first", runs_dir=tmp_path)
    assert run.objects.tasks is not None
    run.config.run_dir.mkdir()
    write_task_files(run.config.run_dir, run.objects.tasks.train.finite, run.objects.tasks.evaluation)
    assert run.config.tasks.path == str(tmp_path / "first" / "tasks.jsonl")
    back = read_tasks(str(run.config.tasks.path))
    assert [task.id for task in back] == ["1", "7", "own"] == [task.id for task in run.objects.tasks.train.finite]
    assert [task["question"] for task in back] == ["a", "b", "c"]
    assert read_tasks(str(run.config.tasks.eval and run.config.tasks.eval.path)) == run.objects.tasks.evaluation


def test_the_calls_are_found_at_the_top_also_after_their_modules_were_imported() -> None:
    for name in ("train", "train_async", "evaluate", "serve", "run_episode"):
        assert callable(getattr(agentrl, name))
