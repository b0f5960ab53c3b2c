"""Task files are checked line by line before anything starts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agentrl.config import TasksConfig
from agentrl.errors import ConfigError
from agentrl.jobs.files import read_jsonl
from agentrl.jobs.tasks import load_tasks, read_tasks
from agentrl.types import Task


def make(count: int, prefix: str = "t") -> list[Task]:
    return [Task(id=f"{prefix}{number}", data={"number": number}) for number in range(count)]


def make_trouble() -> list[Task]:
    raise ValueError("no")


def make_nonsense() -> int:
    return 3


def test_tasks_keep_their_ids_and_unnamed_ones_take_the_line_number(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"id": "a", "q": 1}\n\n{"q": 2}\n')
    assert [(task.id, task["q"]) for task in read_tasks(file)] == [("a", 1), ("3", 2)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"q": 1}\n{"q": \n', "tasks.jsonl:2: expected a JSON object, got b'{\"q\": '"),
        ("[1]\n", "tasks.jsonl:1: expected a JSON object, got list"),
        ('{"id": 1}\n{"id": "1"}\n', "two tasks have the id '1'"),
        ("\n", "holds no tasks"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(expected)):
        read_tasks(file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        list(read_jsonl(tmp_path / "none.jsonl"))


def test_a_factory_makes_both_sets() -> None:
    config = TasksConfig(
        factory=f"{__name__}:make", factory_args={"count": 3}, eval_factory_args={"count": 2, "prefix": "e"}
    )
    sets = load_tasks(config)
    assert [task.id for task in sets.train] == ["t0", "t1", "t2"]
    assert [task.id for task in sets.evaluation] == ["e0", "e1"]


@pytest.mark.parametrize(
    ("factory", "arguments", "expected"),
    [
        ("make", {}, "expected module:function"),
        ("no_such_module:make", {}, "tasks.factory: there is no module 'no_such_module'"),
        (f"{__name__}:none", {}, "cannot import"),
        (f"{__name__}:make", {"size": 3}, "check factory_args"),
        (f"{__name__}:make_trouble", {}, "raised ValueError: no"),
        (f"{__name__}:make_nonsense", {}, "must return a sequence of agentrl.Task"),
        (f"{__name__}:__name__", {}, "is not callable"),
    ],
)
def test_a_factory_that_cannot_be_used_is_explained(factory: str, arguments: dict[str, int], expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        load_tasks(TasksConfig(factory=factory, factory_args=arguments))
