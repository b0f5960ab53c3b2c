"""A cassette replays to the same bytes, offline; each difference is named."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from agentrl import Client, Task, Trajectory
from agentrl.commands.evaluate import Target
from agentrl.config import RunConfig, parse_config
from agentrl.episode.tape import Cassette, Recorder, read_cassette, using_tape, write_cassette
from agentrl.errors import ConfigError
from agentrl.workflow import load_workflow
from agentrl_testing import Reply, call, check_replay, play_async
from agentrl_testing.commands.record import record_cassettes
from agentrl_testing.commands.replay import replay_cassettes, replay_command
from agentrl_testing.replays import compare_with_cassette, make_cassette
from tests.support import taped
from tests.support.endpoints import Endpoint, serving

DEAD = Target(endpoint="http://127.0.0.1:9/v1", model="m")
TASK = Task(id="t1", data={"question": "buy bread"})
BUYS = [call("order", item="bread"), call("put", item="bread"), "Done."]


async def record(workflow: str, replies: Sequence[Reply]) -> Cassette:
    tape = Recorder()
    with using_tape(tape):
        trajectory: Trajectory = await play_async(load_workflow(workflow), TASK, replies)
    assert trajectory.failure is None, trajectory.failure
    return make_cassette(trajectory, tape, workflow=workflow, workflow_args={})


async def test_an_episode_replays_to_the_same_bytes_and_acts_on_nothing() -> None:
    cassette = await record("tests.support.taped:Shop", list(BUYS))
    before = list(taped.ORDERS)
    assert await compare_with_cassette(taped.Shop(), cassette) == []
    assert before == taped.ORDERS
    assert [(answer.kind, answer.name) for answer in cassette.answers] == [
        ("clock", "now"),
        ("tool", "order"),
        ("tool", "put"),
    ]


async def test_live_tools_run_again() -> None:
    cassette = await record("tests.support.taped:Shop", list(BUYS))
    count = len(taped.ORDERS)
    differences = await compare_with_cassette(taped.Shop(), cassette, live_tools=True)
    assert len(taped.ORDERS) == count + 1
    assert len(differences) == 1  # the number of the order is another one
    assert f"order {count}: bread" in differences[0]


@pytest.mark.parametrize("name", ["walk", "streams", "token_level"])
async def test_environments_streams_and_token_level_calls_replay(name: str) -> None:
    replies: dict[str, list[Reply]] = {
        "walk": ["left", "right", "right"],
        "streams": ["streamed"],
        "token_level": ["ab", "c"],
    }
    cassette = await record(f"tests.support.taped:{name}", replies[name])
    made = len(taped.MADE)
    assert await compare_with_cassette(load_workflow(cassette.workflow), cassette) == []
    assert len(taped.MADE) == made  # no environment was made for the replay


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"polite": True},
            "call 1: the workflow sent another message 1: expected .*'buy bread'.*, got .*'Please buy bread'",
        ),
        ({"max_turns": 2}, "the workflow ended after 2 of 3 recorded calls"),
        ({"price": 2.0}, r"final_reward: expected 1\.0, got 2\.0"),
    ],
)
async def test_what_a_workflow_does_otherwise_is_named(changes: dict[str, Any], says: str) -> None:
    cassette = await record("tests.support.taped:Shop", list(BUYS))
    [first, *_] = await compare_with_cassette(load_workflow(cassette.workflow, changes), cassette)
    assert re.search(says, first), first


async def test_a_call_that_was_not_recorded_and_a_tool_that_answers_otherwise_are_differences() -> None:
    cassette = await record("tests.support.taped:Shop", [call("put", item="bread"), "Done."])
    [_, answer] = cassette.answers
    other = msgspec.structs.replace(cassette, answers=[cassette.answers[0], msgspec.structs.replace(answer, result="7")])
    [difference] = await compare_with_cassette(taped.Shop(), other)
    assert "tool put" in difference
    assert '"7" was recorded' in difference
    silent = msgspec.structs.replace(cassette, answers=[answer])
    [difference] = await compare_with_cassette(taped.Shop(), silent)
    assert difference == "the episode asked clock now null, and no further answer of it was recorded"


async def test_an_answer_that_is_not_asked_for_is_a_difference() -> None:
    cassette = await record("tests.support.taped:Shop", list(BUYS))
    more = msgspec.structs.replace(cassette, answers=[*cassette.answers, cassette.answers[1]])
    assert await compare_with_cassette(taped.Shop(), more) == [
        "the episode did not ask tool order, which answered in the record"
    ]


def test_a_file_that_is_no_cassette_or_of_another_version_is_refused(tmp_path: Path) -> None:
    cassette = anyio.run(record, "tests.support.taped:streams", ["streamed"])
    path = tmp_path / "one.json"
    write_cassette(path, cassette)
    assert read_cassette(path) == cassette
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "version": 2}))
    with pytest.raises(ConfigError, match="expected a cassette of version 1, got version 2"):
        read_cassette(path)
    path.write_text(json.dumps({**values, "format": "tape"}))
    with pytest.raises(ConfigError, match="is no cassette"):
        read_cassette(path)
    with pytest.raises(ConfigError, match="cannot read this cassette"):
        read_cassette(tmp_path / "missing.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no cassettes"):
        anyio.run(replay_cassettes, [tmp_path / "empty"])


async def answer_twice(task: Task, client: Client) -> float:
    if task.id == "bad":
        raise LookupError("a broken tool")
    first = await client.chat.completions.create(messages=[{"role": "user", "content": "Hi."}])
    message = first.choices[0].message
    second = await client.chat.completions.create(
        messages=[{"role": "user", "content": "Hi."}, message, {"role": "user", "content": "Again."}]
    )
    return float(second.choices[0].message.content == message.content)


def make_tasks(names: str) -> list[Task]:
    return [Task(id=name, data={}) for name in names.split()]


def make_endpoint_run(names: str) -> RunConfig:
    tasks = {"factory": f"{__name__}:make_tasks", "factory_args": {"names": names}}
    return parse_config({"workflow": f"{__name__}:answer_twice", "tasks": tasks, "model": {"path": "model"}})


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_episodes_of_an_endpoint_are_recorded_and_failed_ones_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(Endpoint().answer) as connection:
        target = Target(endpoint=str(connection.base_url), model="served")
        await record_cassettes(make_endpoint_run("good bad"), tmp_path / "tapes", target, episodes=2)
    assert [path.name for path in sorted((tmp_path / "tapes").iterdir())] == ["good-0.json"]
    assert "not recorded: task bad: WorkflowError" in capsys.readouterr().err
    assert await replay_cassettes([tmp_path / "tapes"])
    assert read_cassette(tmp_path / "tapes" / "good-0.json").workflow == f"{__name__}:answer_twice"


def test_a_task_that_the_run_does_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--task other: the run has no task with this id; it has good"):
        anyio.run(partial(record_cassettes, make_endpoint_run("good"), tmp_path, DEAD, task="other"))


def test_the_command_replays_files_and_ends_with_status_one_for_a_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "one.json"
    write_cassette(path, anyio.run(record, "tests.support.taped:Shop", BUYS))
    replay_command(path)
    assert capsys.readouterr().out == f"{path}: equal\n"
    with pytest.raises(SystemExit, match="1"):
        replay_command(tmp_path, workflow_args='{"price": 3}')
    assert f"{path}: different\n  final_reward: expected 1.0, got 3.0" in capsys.readouterr().out


def test_a_test_checks_a_cassette_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    write_cassette(path, anyio.run(record, "tests.support.taped:Shop", BUYS))
    check_replay(path)
    check_replay(path, taped.Shop)
    with pytest.raises(AssertionError, match=r"the episode is another one:\nfinal_reward: expected 1\.0, got 3\.0"):
        check_replay(path, workflow_args={"price": 3})


@pytest.mark.parametrize("item", [10**30, "\x00\u2028", {"deep": [10**40]}])
async def test_arguments_that_few_parsers_take_are_recorded_and_replayed(item: object, tmp_path: Path) -> None:
    cassette = await record("tests.support.taped:Shop", [call("order", item=item), "Done."])
    write_cassette(tmp_path / "one.json", cassette)
    assert await compare_with_cassette(taped.Shop(), read_cassette(tmp_path / "one.json")) == []


async def test_a_call_of_another_player_is_a_difference() -> None:
    recorded = await play_async(taped.duel, TASK, ["left", "right"])
    cassette = make_cassette(recorded, Recorder(), workflow="tests.support.taped:duel", workflow_args={})
    assert await compare_with_cassette(load_workflow(cassette.workflow), cassette) == []
    [difference] = await compare_with_cassette(load_workflow("tests.support.taped:swapped_duel"), cassette)
    assert difference == (
        "call 1: another speaker made this call: expected role '' and player 'white', got role '' and player 'gray'"
    )


@pytest.mark.parametrize("parent", [0, 7, -1])
async def test_a_turn_that_continues_no_earlier_one_is_refused(parent: int) -> None:
    cassette = await record("tests.support.taped:streams", ["streamed"])
    episode = json.loads(bytes(cassette.episode))
    episode["turns"][0]["parent"] = parent
    broken = msgspec.structs.replace(cassette, episode=msgspec.Raw(json.dumps(episode).encode()))
    with pytest.raises(ConfigError, match=f"turn 0 continues turn {parent}, which is no earlier one"):
        await compare_with_cassette(load_workflow(cassette.workflow), broken)
