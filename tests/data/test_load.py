"""The tasks of a run come from files or functions, are mapped, filtered and limited, and bad ones are named."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from agentrl.data.config import SourceConfig, TasksConfig
from agentrl.data.digest import TaskDigest
from agentrl.data.load import given_tasks, load_held_out, load_tasks, load_training, read_tasks, write_task_files
from agentrl.errors import ConfigError
from agentrl.types import Task


def make(count: int, prefix: str = "t") -> list[Task]:
    return [Task(id=f"{prefix}{number}", data={"number": number, "level": number % 3}) for number in range(count)]


def make_trouble() -> list[Task]:
    raise ValueError("no")


def make_nonsense() -> int:
    return 3


def count_up(start: int = 0) -> Iterator[dict[str, int]]:
    return ({"number": number} for number in itertools.count(start))


def count_and_break() -> Iterator[Task]:
    yield Task(id="0", data={})
    raise RuntimeError("the well is dry")


class Squares:
    """A stream with random access."""

    def __init__(self, first: int = 0) -> None:
        self._first = first

    def task(self, index: int) -> Task:
        return Task(id=str(index), data={"number": (self._first + index) ** 2})


class NoTasks:
    """A stream of something else."""

    def task(self, index: int) -> int:
        return index


def ask(row: dict[str, Any]) -> dict[str, Any] | None:
    return None if row["number"] % 2 else {"id": f"n{row['number']}", "question": f"{row['number']}?", **row}


def as_task(row: Mapping[str, Any]) -> Task:
    return Task(id=f"own-{row['number']}", data={"n": row["number"]})


def lose_all(row: object) -> None:
    del row


def answer_three(row: object) -> int:
    del row
    return 3


def write_rows(path: Path, count: int, **more: object) -> str:
    path.write_text("".join(json.dumps({"number": number, **more}) + "\n" for number in range(count)))
    return str(path)


def ids(config: dict[str, Any]) -> list[str]:
    return [task.id for task in load_training(TasksConfig.model_validate(config)).first(6)]


def here(name: str) -> str:
    return f"{__name__}:{name}"


def test_tasks_keep_their_ids_and_unnamed_ones_take_the_line_number(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"id": "a", "q": 1}\n\n{"q": 2}\n')
    tasks = load_training(TasksConfig(path=str(file))).finite
    assert [(task.id, task["q"]) for task in tasks] == [("a", 1), ("3", 2)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"q": 1}\n{"q": \n', "tasks.jsonl:2: expected a JSON object, got b'{\"q\":'"),
        ("[1]\n", "tasks.jsonl:1: expected a JSON object, got list"),
        ('{"id": 1}\n{"id": "1"}\n', "2 tasks have the id '1'"),
        ("\n", "holds no tasks"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"^tasks.path: .*{re.escape(expected)}"):
        load_training(TasksConfig(path=str(file)))
    with pytest.raises(ConfigError, match=r"^tasks.eval.path: "):
        load_held_out(TasksConfig.model_validate({"path": "train.jsonl", "eval": {"path": str(file)}}))


def test_a_factory_makes_both_sets() -> None:
    config = TasksConfig.model_validate(
        {
            "factory": here("make"),
            "factory_args": {"count": 3},
            "eval": {"factory_args": {"count": 2, "prefix": "e"}},
        }
    )
    sets = load_tasks(config)
    assert [task.id for task in sets.train.finite] == ["t0", "t1", "t2"]
    assert [task.id for task in sets.evaluation] == ["e0", "e1"]


@pytest.mark.parametrize(
    ("former", "present"),
    [
        (
            {"path": "t.json", "format": "harbor", "map": "m:f", "filter": {"level": 1}, "eval_path": "e.json"},
            {"path": "e.json", "format": "harbor", "map": "m:f"},
        ),
        (
            {"factory": "m:f", "factory_args": {"a": 1}, "map": "m:g", "limit": 3, "eval_factory_args": {"b": 2}},
            {"factory": "m:f", "factory_args": {"b": 2}, "map": "m:g"},
        ),
        ({"factory": "m:f", "eval_factory_args": {}}, {"factory": "m:f", "factory_args": {}}),
    ],
)
def test_what_named_the_held_out_tasks_before_means_the_same_and_warns(
    former: dict[str, Any], present: dict[str, Any]
) -> None:
    with pytest.warns(FutureWarning, match=r"tasks\.eval_\w+ is tasks\.eval\.\w+ now; write eval: "):
        config = TasksConfig.model_validate({**former, "eval": None})
    assert config.eval == SourceConfig.model_validate(present)


def test_held_out_tasks_of_the_training_factory_need_only_their_arguments() -> None:
    tasks = {"factory": "m:f", "factory_args": {"a": 1}, "map": "m:g", "limit": 3, "eval": {"factory_args": {"b": 2}}}
    held_out = TasksConfig.model_validate(tasks).eval
    assert held_out == SourceConfig(factory="m:f", factory_args={"b": 2}, map="m:g")


@pytest.mark.parametrize(
    ("factory", "arguments", "expected"),
    [
        ("make", {}, "expected module:name"),
        ("no_such_module:make", {}, "tasks.factory: there is no module 'no_such_module'"),
        (here("none"), {}, "has no 'none'"),
        (here("make"), {"size": 3}, "check factory_args"),
        (here("make_trouble"), {}, "raised ValueError: no"),
        (here("make_nonsense"), {}, "must return a sequence of agentrl.Task"),
        (here("__name__"), {}, "is not callable"),
        (here("NoTasks"), {}, "NoTasks.task(0): expected an agentrl.Task, got int"),
    ],
)
def test_a_factory_that_cannot_be_used_is_explained(factory: str, arguments: dict[str, int], expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        load_tasks(TasksConfig(factory=factory, factory_args=arguments))


def test_a_map_makes_tasks_of_rows_and_leaves_rows_out(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "train.jsonl", 5)
    assert ids({"path": path, "map": here("ask")}) == ["n0", "n2", "n4"]
    assert ids({"path": path, "map": here("as_task"), "limit": 2}) == ["own-0", "own-1"]
    assert ids({"factory": here("make"), "factory_args": {"count": 3}, "map": here("as_task")}) == [
        "own-0",
        "own-1",
        "own-2",
    ]
    config = TasksConfig.model_validate({"path": path, "eval": {"path": path, "map": here("ask")}})
    assert [task["question"] for task in load_held_out(config)] == ["0?", "2?", "4?"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("make", "train.jsonl:1: tasks.map: .*:make raised TypeError"),
        ("answer_three", "expected an agentrl.Task, a dict of its fields, or None to leave the row out, got int"),
        ("lose_all", "tasks: map and filter leave out all 3 tasks of .*train.jsonl"),
        ("none", "tasks.map: module .* has no 'none'"),
    ],
)
def test_a_map_that_cannot_be_used_is_named_with_the_row(tmp_path: Path, name: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        load_training(TasksConfig(path=write_rows(tmp_path / "train.jsonl", 3), map=here(name)))


def test_the_mappings_of_known_data_sets_are_maps(tmp_path: Path) -> None:
    file = tmp_path / "test.csv"
    file.write_text("question,answer\nHow many?,It is 2.\n#### 2\n".replace("It is 2.\n", '"It is 2.\n').rstrip() + '"\n')
    mapped = "agentrl_workflows.tasks.math_files:gsm8k_task"
    [task] = load_training(TasksConfig(path=str(file), map=mapped)).finite
    assert (task.id, task["answer"]) == ("gsm8k-1", "2")
    bad = write_rows(tmp_path / "bad.jsonl", 1, question="?")
    with pytest.raises(ConfigError, match=r"^tasks.path: .*bad.jsonl:1: expected text in the field 'answer'"):
        load_training(TasksConfig(path=bad, map=mapped))


def test_a_filter_keeps_tasks_by_the_values_of_their_fields(tmp_path: Path) -> None:
    made = {"factory": here("make"), "factory_args": {"count": 9}}
    assert ids({**made, "filter": {"level": 1}}) == ["t1", "t4", "t7"]
    assert ids({**made, "filter": {"level": [0, 1], "number": [1, 2, 3]}}) == ["t1", "t3"]
    assert ids({**made, "filter": {"level": [1, 2]}, "limit": 3}) == ["t1", "t2", "t4"]
    with pytest.raises(ConfigError, match=r"tasks.filter: task t0 has no field 'grade'; it has number, level"):
        ids({**made, "filter": {"grade": 1}})
    with pytest.raises(ConfigError, match="map and filter leave out all 9 tasks"):
        ids({**made, "filter": {"level": 5}})


def test_several_sources_keep_their_tasks_apart_by_the_number_in_the_id(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "train.jsonl", 2)
    sources = [{"path": path, "weight": 3}, {"path": path, "limit": 1}, {"factory": here("Squares")}]
    training = load_training(TasksConfig.model_validate({"sources": sources}))
    assert [task.id for task in training.first(5)] == ["1/1", "1/2", "2/1", "3/0", "3/1"]
    assert training.describe() == "3, and one endless source"
    with pytest.raises(ConfigError, match=r"^tasks.sources.1.path: cannot read none.jsonl"):
        load_training(TasksConfig.model_validate({"sources": [{"path": path}, {"path": "none.jsonl"}]}))


def test_a_factory_without_an_end_is_endless_and_a_limit_ends_it() -> None:
    endless = load_training(TasksConfig(factory=here("count_up"), factory_args={"start": 5}))
    assert endless.is_endless
    assert endless.describe() == "endless"
    assert [(task.id, task["number"]) for task in endless.first(3)] == [("1", 5), ("2", 6), ("3", 7)]
    limited = load_training(TasksConfig(factory=here("count_up"), limit=4))
    assert (limited.is_endless, len(limited.finite)) == (False, 4)
    evens = load_training(TasksConfig(factory=here("count_up"), map=here("ask")))
    assert [task["number"] for task in evens.first(3)] == [0, 2, 4]
    squares = load_training(TasksConfig(factory=here("Squares"), factory_args={"first": 2}))
    assert squares.first(2)[1]["number"] == 9
    assert [task["n"] for task in load_training(TasksConfig(factory=here("Squares"), map=here("as_task"))).first(3)] == [
        0,
        1,
        4,
    ]


def test_an_endless_factory_that_cannot_be_used_is_explained() -> None:
    with pytest.raises(ConfigError, match=r"tasks.filter: task 1 has no field 'level'"):
        load_training(TasksConfig(factory=here("count_up"), filter={"level": 1}))
    with pytest.raises(ConfigError, match="map and filter leave out 100000 tasks in a row"):
        load_training(TasksConfig(factory=here("count_up"), filter={"number": -1}))
    with pytest.raises(ConfigError, match="task 2 raised RuntimeError: the well is dry"):
        load_training(TasksConfig(factory=here("count_and_break"))).first(2)
    with pytest.raises(ConfigError, match=r"count_up never ends, but an evaluation needs a fixed set; set tasks.eval with"):
        load_held_out(TasksConfig.model_validate({"factory": here("count_up"), "eval": {"factory_args": {}}}))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"sources": [{"path": "a"}], "path": "b"}, "sources replaces path"),
        ({"sources": [{"path": "a"}], "limit": 3}, "sources replaces limit, which each source has of its own"),
        ({"sources": [{"path": "a"}], "eval_path": "b"}, "eval_path does not say enough here; set eval"),
        ({"sources": [{}]}, "expected exactly one of path and factory"),
        ({"sources": [{"path": "a", "weight": 0}]}, "greater than 0"),
        (
            {"path": "a", "eval": {"path": "b"}, "eval_path": "c"},
            "eval replaces eval_path, and only one can count",
        ),
        ({"factory": "a:b", "eval_path": "c"}, "eval_path does not say enough here; set eval"),
        ({"path": "a", "eval_factory_args": {}}, "eval_factory_args does not say enough here; set eval"),
        ({"path": "a", "eval": {"factory_args": {}}}, "expected exactly one of path and factory"),
        ({"path": "a", "eval": {"path": "b", "factory": "c:d"}}, "expected exactly one of path and factory"),
        ({"path": "a", "curriculum_args": {"low": 0}}, "curriculum_args need tasks.curriculum"),
        ({"path": "a", "limit": 0}, "greater than or equal to 1"),
    ],
)
def test_fields_that_exclude_each_other_are_refused(config: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        TasksConfig.model_validate(config)


class Broken:
    def __init__(self, first: int = 0) -> None:
        self.first = first

    def task(self, index: int) -> Task:
        if index < self.first:
            return Task(id=str(index), data={})
        raise OSError("the well is dry")


def test_a_stream_that_raises_is_named() -> None:
    expected = r"Broken\.task\(0\) raised OSError: the well is dry"
    with pytest.raises(ConfigError, match=expected):
        load_training(TasksConfig(factory=here("Broken")))
    with pytest.raises(ConfigError, match=expected):
        load_training(TasksConfig(factory=here("Broken"), limit=2))
    with pytest.raises(ConfigError, match=r"Broken\.task\(2\) raised OSError"):
        load_training(TasksConfig(factory=here("Broken"), factory_args={"first": 2})).first(3)


def test_a_file_may_leave_out_any_number_of_rows(tmp_path: Path) -> None:
    file = tmp_path / "long.jsonl"
    file.write_text('{"keep": 0}\n' * 100_001 + '{"keep": 1}\n')
    assert [task.id for task in load_training(TasksConfig(path=str(file), filter={"keep": 1})).finite] == ["100002"]


def test_an_id_that_is_null_is_no_id(tmp_path: Path) -> None:
    file = tmp_path / "null.jsonl"
    file.write_text('{"id": null}\n{"id": "b"}\n')
    assert ids({"path": str(file)}) == ["1", "b"]
    assert [task.id for task in given_tasks([{"id": None}, {"id": 7}], "tasks")] == ["1", "7"]


def test_tasks_are_written_and_read_with_the_same_ids_and_fields(tmp_path: Path) -> None:
    tasks = given_tasks(
        [Task(id="a", data={"q": 1}), Task(id="b", data={"id": "other"}), Task(id="c", data={"data": {"id": 3}}), {}],
        "tasks",
    )
    write_task_files(tmp_path, tasks, ())
    read = read_tasks(tmp_path / "tasks.jsonl")
    assert read == tasks
    assert TaskDigest.of(read) == TaskDigest.of(tasks)
