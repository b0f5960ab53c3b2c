"""One task folder that cannot be read is one folder: it is counted by its reason, refused, or left out and recorded."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agentrl.client import Client
from agentrl.commands.run_directory import prepare_directory
from agentrl.commands.validate import TaskValidation, print_validation
from agentrl.config import RunConfig, load_config, parse_config
from agentrl.data.config import TasksConfig
from agentrl.data.left_out import LeftOutTask
from agentrl.data.load import load_held_out, load_tasks, load_training
from agentrl.errors import ConfigError
from agentrl.plan.checks import left_out_here, missing_here, task_remarks
from agentrl.plan.plan import plan_run
from agentrl.plan.text import describe_plan
from agentrl.types import Task
from agentrl.workflow import RolloutWorkflow
from tests.support.cli import status_here
from tests.support.harbor import TOML, write_task

NEEDS_GPU = TOML.replace("storage_mb = 512", "gpus = 1")
OTHER_USER = "FROM a\nENV A=b\nUSER app\n"
GPU_REASON = "environment.gpus: the sandbox has no GPU"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def solve(task: Task, client: Client) -> float:
    message = {"role": "user", "content": task["question"]}
    return float((await client.chat.completions.create(messages=[message])).choices[0].message.content == "right")


class Particular(RolloutWorkflow):
    """Refuses folders whose names begin with `net`."""

    async def run(self, task: Task, client: Client) -> float:
        return await solve(task, client)

    def refusal(self, task: Task) -> str:
        return "needs a network" if Path(task["folder"]).name.startswith("net") else ""

    def check_tasks(self, tasks: Sequence[Task]) -> Sequence[str]:
        assert not any(map(self.refusal, tasks)), "a task that is left out reaches the check of the others"
        return ()


def write_set(root: Path) -> dict[str, Any]:
    """Write two folders that can be read and three that cannot, and return the tasks of a run file for them."""
    for name in ("good/1", "good/2"):
        write_task(root / name)
    write_task(root / "gpu", NEEDS_GPU)
    write_task(root / "user/1", dockerfile=OTHER_USER)
    write_task(root / "user/2", dockerfile="FROM a\n\n\nUSER app\n")
    return {"path": str(root), "format": "harbor"}


def run_of(tasks: dict[str, Any], **fields: object) -> RunConfig:
    return parse_config({"workflow": f"{__name__}:solve", "tasks": tasks, "model": {"path": "none"}, **fields})


def test_folders_that_cannot_be_read_are_an_error_with_the_count_of_each_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^tasks\.path: .*/gpu: environment\.gpus: the sandbox has no GPU") as caught:
        load_tasks(TasksConfig.model_validate(write_set(tmp_path)))
    assert f"3 of the 5 task folders in {tmp_path} cannot be read; fix them, or set `unreadable: skip`" in str(caught.value)
    counted = str(caught.value).splitlines()[-2:]
    assert counted[0].startswith("  2 x environment/Dockerfile: USER: expected root")
    assert counted[0].endswith("(user/1, user/2)")
    assert counted[1] == f"  1 x {GPU_REASON} (gpu)"


def test_a_run_that_skips_gets_the_other_folders_and_says_which_it_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tasks = {**write_set(tmp_path), "unreadable": "skip"}
    with caplog.at_level(logging.WARNING):
        sets = load_tasks(TasksConfig.model_validate({**tasks, "eval": tasks}))
    assert [task.id for task in sets.train.finite] == [task.id for task in sets.evaluation] == ["good/1", "good/2"]
    assert [(left.source, left.name) for left in sets.left_out] == [
        (source, name) for source in ("tasks", "tasks.eval") for name in ("gpu", "user/1", "user/2")
    ]
    assert sets.left_out[0].reason == GPU_REASON
    assert f"tasks: 3 task folders of {tmp_path} cannot be read, and are left out" in caplog.messages


def test_each_of_several_sources_decides_for_itself(tmp_path: Path) -> None:
    good, bad = write_task(tmp_path / "a" / "good").parent, write_set(tmp_path / "b")
    sources = [{"path": str(good), "format": "harbor"}, {**bad, "unreadable": "skip", "weight": 2}]
    left_out: list[LeftOutTask] = []
    found = load_training(TasksConfig.model_validate({"sources": sources}), left_out)
    assert [task.id for task in found.finite] == ["1/good", "2/good/1", "2/good/2"]
    assert {task.source for task in left_out} == {"tasks.sources.1"}
    with pytest.raises(ConfigError, match=r"^tasks\.sources\.1\.path: .*environment\.gpus"):
        load_training(TasksConfig.model_validate({"sources": [sources[0], bad]}))


@pytest.mark.parametrize("unreadable", ["refuse", "skip"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_set_of_which_no_folder_can_be_read_is_an_error(tmp_path: Path, unreadable: str, count: int) -> None:
    for number in range(count):
        write_task(tmp_path / str(number), NEEDS_GPU)
    tasks = {"path": str(tmp_path), "format": "harbor", "unreadable": unreadable}
    with pytest.raises(ConfigError, match="sandbox has no GPU"):
        load_tasks(TasksConfig.model_validate(tasks))
    with pytest.raises(ConfigError, match=r"tasks\.eval\.path: .*sandbox has no GPU"):
        load_held_out(TasksConfig.model_validate({"path": "t.jsonl", "eval": tasks}))


def test_one_task_that_is_named_itself_cannot_be_left_out(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "one", NEEDS_GPU)
    with pytest.raises(ConfigError, match="sandbox has no GPU"):
        load_tasks(TasksConfig(path=str(folder), format="harbor", unreadable="skip"))


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        ({"path": "t.jsonl"}, "needs format: harbor; rows of files are never skipped; remove unreadable"),
        ({"factory": "my:make"}, "needs format: harbor; my:make leaves out what it wants to; remove unreadable"),
        ({"sources": [{"path": "t.jsonl"}]}, "sources replaces unreadable"),
    ],
)
def test_skip_is_refused_for_tasks_that_are_no_folders(tasks: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run_of({**tasks, "unreadable": "skip"})


def test_the_plan_and_the_record_of_a_run_name_what_is_left_out(tmp_path: Path) -> None:
    run = run_of({**write_set(tmp_path / "set"), "unreadable": "skip"}, runs_dir=str(tmp_path / "runs"))
    plan, left_out = plan_run(run), left_out_here(run)
    lines = describe_plan(plan, left_out=left_out).splitlines()
    assert "left out    3 of tasks cannot be used (tasks.unreadable: skip)" in lines
    assert f"            1 x {GPU_REASON} (gpu)" in lines
    prepare_directory(plan, "error", None, 0, left_out=left_out)
    file = run.run_dir / "left_out_tasks.jsonl"
    assert [msgspec.json.decode(line)["name"] for line in file.read_bytes().splitlines()] == ["gpu", "user/1", "user/2"]
    assert msgspec.json.decode(file.read_bytes().splitlines()[0])["reason"] == GPU_REASON
    assert (run.run_dir / "plan.txt").read_text().splitlines() == lines
    assert load_config(run.run_dir / "config.yaml").tasks.unreadable == "skip"
    prepare_directory(plan, "use", None, 0)
    assert not file.exists()


def test_a_dry_run_shows_what_is_left_out_and_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tasks, file = write_set(tmp_path / "set"), tmp_path / "run.yaml"
    file.write_bytes(msgspec.yaml.encode({"workflow": f"{__name__}:solve", "tasks": tasks, "model": {"path": "none"}}))
    assert status_here("train", str(file), "--dry-run", "--tasks.unreadable", "skip") == 1  # there is no such model
    assert "left out    3 of tasks cannot be used (tasks.unreadable: skip)\n" in capsys.readouterr().out
    assert any("3 of the 5 task folders" in line for line in missing_here(plan_run(load_config(file))))
    assert left_out_here(load_config(file)) == []


async def test_a_validation_shows_the_reasons_with_their_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of({**write_set(tmp_path), "unreadable": "skip"})
    print_validation(await TaskValidation(run).check())
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "left out  3 of tasks cannot be used (tasks.unreadable: skip)"
    assert lines[2].startswith("          2 x environment/Dockerfile: USER: expected root")
    assert lines[3] == f"          1 x {GPU_REASON} (gpu)"
    with pytest.raises(ConfigError, match="3 of the 5 task folders"):
        TaskValidation(run_of(write_set(tmp_path / "other")))


async def test_folders_that_the_workflow_refuses_are_left_out_with_those_that_cannot_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    tasks = {**write_set(tmp_path / "set"), "unreadable": "skip"}
    write_task(tmp_path / "set" / "net-1")
    run = run_of({**tasks, "eval": tasks}).model_copy(update={"workflow": f"{__name__}:Particular"})
    validation = TaskValidation(run)
    assert [message for message in caplog.messages if "played" in message] == [
        f"{source}: 1 task folders of {tmp_path}/set cannot be played, and are left out"
        for source in ("tasks", "tasks.eval")
    ]
    print_validation(await validation.check())
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("train     2 tasks")
    assert "left out  4 of tasks cannot be used (tasks.unreadable: skip)" in lines
    assert "          1 x needs a network (net-1)" in lines
    assert task_remarks(run) == []
    left_out = left_out_here(run)
    assert [left.name for left in left_out if left.reason == "needs a network"] == ["net-1", "net-1"]
    assert "            1 x needs a network (net-1)" in describe_plan(plan_run(run), left_out=left_out).splitlines()
