"""What can be a workflow, and how it is found."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from agentrl.client import Client
from agentrl.errors import ConfigError, WorkflowError
from agentrl.types import Task
from agentrl.workflow import RolloutWorkflow, as_workflow, load_workflow

SOURCE = """
from agentrl.workflow import RolloutWorkflow

class Agent(RolloutWorkflow):
    max_turns: int = 6
    mood = "good"
    async def run(self, task, client):
        return 1.0

class Built(RolloutWorkflow):
    def __init__(self, depth, width=2):
        self.depth, self.width = depth, width
    async def run(self, task, client):
        return 1.0

class Unfinished(RolloutWorkflow):
    pass

async def solve(task, client, bonus=0.0):
    return 1.0 + bonus

def plain(task, client):
    return 1.0

class NotOne:
    pass

number = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A module of workflows in the current directory."""
    name = f"my_agent_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


def test_a_class_is_found_in_the_current_directory_and_its_attributes_are_set(module: str) -> None:
    workflow = load_workflow(f"{module}:Agent", {"max_turns": 3})
    assert (workflow.name, vars(workflow)) == ("Agent", {"max_turns": 3})


def test_a_class_with_a_constructor_gets_its_arguments(module: str) -> None:
    assert vars(load_workflow(f"{module}:Built", {"depth": 4})) == {"depth": 4, "width": 2}


def test_an_async_function_is_a_workflow(module: str) -> None:
    assert load_workflow(f"{module}:solve", {"bonus": 0.5}).name == "solve"


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("Nothing", {}, "has no 'Nothing'; it has Agent, Built, solve"),
        ("NotOne", {}, "derive it from RolloutWorkflow"),
        ("plain", {}, "a function without `async`"),
        ("number", {}, "expected a RolloutWorkflow class or instance"),
        ("Unfinished", {}, "does not implement run"),
        ("Agent", {"max_turn": 3}, "has no attribute 'max_turn' to set; it has deadline_reward, full_reward, limit_reward"),
        ("Built", {}, "missing a required argument: 'depth'"),
        ("solve", {"bonsu": 1}, "unexpected keyword argument 'bonsu'"),
    ],
)
def test_what_cannot_be_used_is_named_with_the_mend(module: str, name: str, args: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_workflow(f"{module}:{name}", args)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("my_agent", "expected module:Name"),
        (":Agent", "expected module:Name"),
        ("there_is_no_such_module:Agent", "there is no module 'there_is_no_such_module'"),
    ],
)
def test_a_spec_that_names_no_module_says_so(spec: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ConfigError, match=message):
        load_workflow(spec)


@pytest.mark.parametrize(
    ("source", "message"),
    [("import nowhere_to_be_found", "needs 'nowhere_to_be_found'"), ("1 / 0", "raised ZeroDivisionError: division by zero")],
)
def test_a_module_that_cannot_be_imported_says_why(
    source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"broken_{abs(hash(source))}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ConfigError, match=message):
        load_workflow(f"{name}:Agent")


def test_an_instance_is_taken_as_it_is() -> None:
    class Agent(RolloutWorkflow):
        async def run(self, task: Task, client: Client) -> float:
            return 1.0

    agent = Agent()
    assert as_workflow(agent) is agent
    assert isinstance(as_workflow(Agent), Agent)


class Unready(RolloutWorkflow):
    def __init__(self, path: str) -> None:
        self.text = Path(path).read_text()

    async def run(self, task: Task, client: Client) -> float:
        return 0.0


def test_a_workflow_that_cannot_be_made_is_named_with_its_arguments_and_its_error(tmp_path: Path) -> None:
    wrong = tmp_path / "none.txt"
    with pytest.raises(WorkflowError, match=r"Unready\(\*\*\{'path': .*none\.txt.*raised FileNotFoundError") as caught:
        as_workflow(Unready, {"path": str(wrong)})
    assert isinstance(caught.value.__cause__, FileNotFoundError)
