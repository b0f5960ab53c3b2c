"""BFCL: tasks from its files, calls compared by its rules, and multi-turn tasks on backends, here in the same form."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agentrl.env import ChatStep, EpisodeEnd
from agentrl.errors import ConfigError
from agentrl.types import Task
from agentrl_envs.bfcl.environment import BfclEnvironment
from agentrl_envs.bfcl.matching import calls_match
from agentrl_envs.bfcl.tasks import CATEGORIES, MULTI_TURN, NEW_FUNCTIONS, bfcl_tasks
from agentrl_envs.bfcl.worker import MODULES, play_turns
from agentrl_envs.data_packages import BFCL_EVAL
from tests.support.wheels import hide_packages, install, write_wheel

FUNCTIONS = [
    {
        "name": "shop.find",
        "description": "Find an article.",
        "parameters": {
            "type": "dict",
            "properties": {
                "name": {"type": "string", "description": "The name."},
                "price": {"type": "float", "description": "At most."},
                "sizes": {"type": "array", "items": {"type": "integer"}, "description": "Sizes."},
                "where": {"type": "dict", "properties": {"city": {"type": "string"}}, "description": "Where."},
            },
            "required": ["name"],
        },
    }
]
ACCEPTED = [
    {
        "shop_find": {
            "name": ["Big Shoe", "Shoe"],
            "price": ["", 5.0],
            "sizes": ["", [1, 2]],
            "where": ["", {"city": ["NY", ""]}],
        }
    }
]
DESCRIBED = [{**FUNCTIONS[0], "name": "shop_find"}]
NOTES = """
class GorillaFileSystem:
    def __init__(self):
        self._description = "notes"

    def _load_scenario(self, scenario, long_context=False):
        self.notes = list(scenario.get("notes", []))

    def add(self, text):
        self.notes.append(text)
        return {"count": len(self.notes)}

    def read(self, number):
        return self.notes[number]

    def secret(self):
        return "not described"
"""
NOTE_FUNCTIONS = [
    {
        "name": name,
        "description": "Of notes.",
        "parameters": {
            "type": "dict",
            "properties": {argument: {"type": kind, "description": "It."}},
            "required": [argument],
        },
    }
    for name, argument, kind in (("add", "text", "string"), ("read", "number", "integer"))
]
MULTI = {
    "id": "multi_turn_miss_func_0",
    "question": [[{"role": "user", "content": "Add a note: milk."}], [{"role": "user", "content": "Read it."}], []],
    "initial_config": {"GorillaFileSystem": {"notes": ["first"]}},
    "missed_function": {"2": ["read"]},
    "involved_classes": ["GorillaFileSystem"],
}
TRUTH = {"id": "multi_turn_miss_func_0", "ground_truth": [["add('milk')"], [], ["read(number=1)"]]}


def rows(*entries: object) -> str:
    return "".join(f"{json.dumps(entry)}\n" for entry in entries)


def files() -> dict[str, str]:
    """The files of the package that the tests read."""
    question = [[{"role": "user", "content": "A shoe?"}]]
    entry = {"question": question, "function": FUNCTIONS}
    data = "bfcl_eval/data"
    impossible = {"shop.find": {"name": [], "price": [""]}}
    return {
        f"{data}/BFCL_v4_simple_python.json": rows({"id": "simple_python_0", **entry}, {"id": "simple_python_1", **entry}),
        f"{data}/possible_answer/BFCL_v4_simple_python.json": rows(
            {"id": "simple_python_0", "ground_truth": [{"shop.find": ACCEPTED[0]["shop_find"]}]},
            {"id": "simple_python_1", "ground_truth": [impossible]},
        ),
        f"{data}/BFCL_v4_irrelevance.json": rows({"id": "irrelevance_0", **entry}),
        f"{data}/BFCL_v4_multi_turn_miss_func.json": rows(MULTI),
        f"{data}/possible_answer/BFCL_v4_multi_turn_miss_func.json": rows(TRUTH),
        **{f"{data}/multi_turn_func_doc/{name}.json": rows(*NOTE_FUNCTIONS) for name in MODULES.values()},
    }


@pytest.fixture
def wheel(tmp_path: Path) -> str:
    return write_wheel(tmp_path, BFCL_EVAL, files())


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package as it is installed, with one backend."""
    folder = tmp_path / "site"
    backend = "bfcl_eval/eval_checker/multi_turn_eval/func_source_code/gorilla_file_system.py"
    install(folder, BFCL_EVAL, {**files(), backend: NOTES})
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))  # for the workers
    return folder


def reply(text: str = "", *calls: tuple[str, str]) -> dict[str, Any]:
    each = [
        {"id": f"call_{at}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for at, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": text, **({"tool_calls": each} if each else {})}


@pytest.mark.parametrize(
    ("arguments", "is_right"),
    [
        ({"name": "shoe"}, True),
        ({"name": "BIG-shoe", "price": 5}, True),
        ({"name": "shoe", "sizes": [1, 2], "where": {"city": "n.y."}}, True),
        ({"name": "shoe", "where": {}}, True),
        ({"name": "boot"}, False),
        ({"name": "shoe", "price": 6.0}, False),
        ({"name": "shoe", "price": True}, False),
        ({"name": "shoe", "price": "5.0"}, False),
        ({"name": "shoe", "sizes": [2, 1]}, False),
        ({"name": "shoe", "sizes": [True, 2]}, False),
        ({"name": "shoe", "where": {"city": "NY", "street": "1"}}, False),
        ({"name": "shoe", "color": "red"}, False),
        ({"price": 5.0}, False),
    ],
)
def test_arguments_count_by_the_rules_of_the_leaderboard(arguments: dict[str, Any], is_right: bool) -> None:
    assert calls_match([("shop_find", arguments)], ACCEPTED, DESCRIBED) is is_right


def test_each_accepted_call_is_made_once_in_any_order() -> None:
    accepted = [{"shop_find": {"name": ["a"]}}, {"shop_find": {"name": ["b"]}}]
    a, b = ("shop_find", {"name": "a"}), ("shop_find", {"name": "b"})
    assert calls_match([b, a], accepted, DESCRIBED)
    assert not calls_match([a, a], accepted, DESCRIBED)
    assert not calls_match([a, b, b], accepted, DESCRIBED)
    assert not calls_match([], accepted, DESCRIBED)


def test_tasks_have_names_that_the_wire_takes_and_what_accepts_no_call_is_left_out(
    wheel: str, caplog: pytest.LogCaptureFixture
) -> None:
    (task,) = bfcl_tasks("simple_python", wheel=wheel)
    assert task["functions"][0]["name"] == "shop_find"
    assert task["reference"] == ['<tool_call>{"name": "shop_find", "arguments": {"name": "Big Shoe"}}</tool_call>']
    assert "left out 1 of 2 tasks of simple_python" in caplog.text


@pytest.mark.parametrize(
    ("category", "message"),
    [
        ("web_search", "web_search cannot be graded here: it needs the web; leave it out"),
        ("simple_java", "literals of Java"),
        ("nothing", "there is no category 'nothing'; there is simple_python"),
    ],
)
def test_what_cannot_be_graded_is_refused_by_name(category: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bfcl_tasks(category)


async def single(task: Task, message: dict[str, Any]) -> ChatStep:
    environment = BfclEnvironment()
    start = await environment.reset(task, seed=0)
    assert start.tools[0]["function"]["parameters"]["properties"]["price"]["type"] == "number"  # pyright: ignore
    return await environment.step(message)


async def test_one_message_is_graded_by_its_calls(wheel: str) -> None:
    (task,) = bfcl_tasks("simple_python", wheel=wheel)
    for message, reward in (
        (reply("", ("shop_find", '{"name": "shoe"}')), 1.0),
        (reply("", ("shop_find", '{"name": ')), 0.0),
        (reply("shoe"), 0.0),
        (reply(), 0.0),
    ):
        step = await single(task, message)
        assert (step.reward, step.end) == (reward, EpisodeEnd.TERMINATED)


async def test_where_no_function_fits_a_text_is_right_and_nothing_or_a_call_is_wrong(wheel: str) -> None:
    (task,) = bfcl_tasks("irrelevance", wheel=wheel)
    rewards = [(await single(task, message)).reward for message in (reply("No."), reply(), reply("", ("shop_find", "{}")))]
    assert rewards == [1.0, 0.0, 0.0]


def spec(task: Task) -> dict[str, Any]:
    told = {name: task[name] for name in ("classes", "initial_config", "long_context", "answers")}
    return json.loads(json.dumps({**told, "methods": ["add", "read"]}))


def test_a_turn_is_right_by_state_and_results(installed: Path) -> None:
    (task,) = bfcl_tasks("multi_turn_miss_func")
    add, read = ["add", {"text": "milk"}], ["read", {"number": 1}]

    def is_right(*turns: Sequence[Any]) -> bool:
        return play_turns(spec(task), turns)["is_right"]  # pyright: ignore

    assert is_right([add], [], [read])
    assert is_right([add, read], [], [["read", {"number": 0}]])  # a result of an earlier turn counts
    assert not is_right([["add", {"text": "tea"}]])
    assert not is_right([add, add])
    assert not is_right([add], [], [])
    assert play_turns(spec(task), [[["secret", {}], ["read", {"number": 9}]]])["results"] == [  # pyright: ignore
        "Error: there is no function 'secret'",
        "Error during execution: list index out of range",
    ]


@pytest.mark.starts
async def test_a_multi_turn_task_is_played_on_the_backends_of_the_package(installed: Path) -> None:
    (task,) = bfcl_tasks("multi_turn_miss_func")
    assert task["reference"] == [
        '<tool_call>{"name": "add", "arguments": {"text": "milk"}}</tool_call>',
        "Done.",
        "Done.",
        '<tool_call>{"name": "read", "arguments": {"number": 1}}</tool_call>',
        "Done.",
    ]
    environment = BfclEnvironment(num_workers=1, max_steps_per_turn=2)
    start = await environment.reset(task, seed=0)
    assert [tool["function"]["name"] for tool in start.tools] == ["add"]  # pyright: ignore
    step = await environment.step(reply("", ("read", '{"number": 0}'), ("add", '{"text": "milk"}'), ("add", "[]")))
    assert [message["content"] for message in step.messages] == [
        "Error: there is no function 'read'",
        '{"count": 2}',
        "Error: the arguments must be a JSON object",
    ]
    step = await environment.step(reply("Done."))
    assert [message["content"] for message in step.messages] == ["Read it."]
    step = await environment.step(reply("There is no function for that."))
    assert NEW_FUNCTIONS in step.messages[0]["content"]
    assert '"name": "read"' in step.messages[0]["content"]
    step = await environment.step(reply("", ("read", '{"number": 1}')))
    assert step.messages[0]["content"] == "milk"
    step = await environment.step(reply("Milk."))
    assert (step.reward, step.end) == (1.0, EpisodeEnd.TERMINATED)

    await environment.reset(task, seed=0)
    step = await environment.step(reply("Done."))  # without the call of the first turn
    assert (step.reward, step.end) == (0.0, EpisodeEnd.TERMINATED)

    await environment.reset(task, seed=0)
    for _ in range(2):
        assert (await environment.step(reply("", ("add", '{"text": "x"}')))).end is None
    assert (await environment.step(reply("", ("add", '{"text": "x"}')))).end is EpisodeEnd.TRUNCATED


async def test_a_multi_turn_task_without_the_package_names_what_to_install(
    wheel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (task,) = bfcl_tasks("multi_turn_miss_func", wheel=wheel)
    hide_packages(monkeypatch)
    with pytest.raises(ConfigError, match=r"bfcl-eval==2026.3.23 is not installed; run `pip install --no-deps bfcl-eval"):
        await BfclEnvironment().reset(task, seed=0)


@pytest.mark.nightly
@pytest.mark.external
def test_the_ground_truth_of_all_multi_turn_tasks_is_right() -> None:
    pytest.importorskip("bfcl_eval")
    tasks = bfcl_tasks(MULTI_TURN)
    assert len(tasks) == 800
    wrong = [task.id for task in tasks if not reference_is_right(task)]
    assert wrong == []


@pytest.mark.external
def test_every_category_has_tasks_with_references() -> None:
    pytest.importorskip("bfcl_eval")
    assert all(bfcl_tasks(category, count=1)[0]["reference"] for category in CATEGORIES)
    assert len(bfcl_tasks("live_multiple")) == 1051


def reference_is_right(task: Task) -> bool:
    turns: list[list[Any]] = [[]]
    for text in task["reference"]:
        written = [json.loads(each.split("</tool_call>")[0]) for each in text.split("<tool_call>")[1:]]
        if written:
            turns[-1] += [[call["name"], call["arguments"]] for call in written]
        else:
            turns.append([])
    late = [each["name"] for some in task["withheld"].values() for each in some]
    methods = [*(each["name"] for each in task["functions"]), *late]
    return play_turns({**spec(task), "methods": methods}, turns[:-1])["is_right"]  # pyright: ignore
