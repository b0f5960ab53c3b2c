"""Tasks that need a network are refused before anything starts, and the plan names what counts as done."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agentrl.commands.train import train_command
from agentrl.commands.validate import TaskValidation
from agentrl.config import parse_config
from agentrl.data.left_out import left_out_rows
from agentrl.data.load import load_tasks
from agentrl.data.playable import playable_tasks
from agentrl.errors import ConfigError
from agentrl.plan.checks import left_out_here, task_remarks
from agentrl.types import Task
from agentrl_workflows.terminal import TerminalAgent


def write_task(folder: Path, *lines: str, settings: str = "") -> Task:
    for part in ("environment", "tests"):
        (folder / part).mkdir(parents=True)
    (folder / "task.toml").write_text(f'schema_version = "1.1"\n{settings}')
    (folder / "instruction.md").write_text("Look.\n")
    (folder / "tests" / "test.sh").write_text("true\n")
    (folder / "environment" / "Dockerfile").write_text("\n".join(["FROM python:3.12", *lines, ""]))
    return Task(id=folder.name, data={"question": "Look.", "folder": str(folder)})


def remarks(tasks: Sequence[Task], has_packages: Sequence[str] = ()) -> list[str]:
    return list(TerminalAgent(has_packages=has_packages).check_tasks(tasks))


def test_a_command_that_counts_as_done_is_named_with_its_tasks(tmp_path: Path) -> None:
    install = "RUN apt-get update \\\n  && apt-get install -y vim"
    tasks = [write_task(tmp_path / name, install, *lines) for name, lines in (("a", ()), ("b", ("RUN pip install x",)))]
    tasks.append(write_task(tmp_path / "c", "RUN make", settings='[environment]\ndocker_image = "mine:1"\n'))
    tasks.append(write_task(tmp_path / "d", "RUN true"))
    assert remarks(tasks, has_packages=["python:3.12"]) == [
        f"not run: RUN apt-get update && apt-get install -y vim ({tmp_path}/a/environment/Dockerfile:2 and 1 more): "
        "the image 'python:3.12' counts as having it",
        f"not run: RUN pip install x ({tmp_path}/b/environment/Dockerfile:4): the image 'python:3.12' counts as having it",
        f"not run: RUN make ({tmp_path}/c/environment/Dockerfile:2): the image 'mine:1' counts as having it",
    ]
    with pytest.raises(ConfigError, match=r"a/environment/Dockerfile:2: RUN apt-get needs a network.*\n.*b/environment"):
        remarks(tasks)
    with pytest.raises(ConfigError, match=r"Dockerfile:2: RUN apt-get needs a network"):
        remarks(tasks, has_packages=["debian:12"])


def test_a_refusal_names_the_first_tasks_and_counts_the_others(tmp_path: Path) -> None:
    tasks = [write_task(tmp_path / str(number), "RUN npm ci") for number in range(8)]
    with pytest.raises(ConfigError, match=r"4/environment/Dockerfile:2: RUN npm [^\n]*\nand 3 more tasks$"):
        remarks(tasks)


def test_one_name_in_place_of_a_list_is_refused() -> None:
    with pytest.raises(ConfigError, match="has_packages: expected a list of names of images, got 'debian:12'"):
        TerminalAgent(has_packages="debian:12")


def test_the_dry_run_names_what_counts_as_done_and_refuses_what_cannot_be_had(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text('{"model_type": "llama"}')
    write_task(tmp_path / "tasks" / "a", "RUN pip install x")
    run: dict[str, Any] = {"name": "run", "workflow": "agentrl_workflows.terminal:TerminalAgent", "model": {"path": "m"}}
    run["tasks"] = {"path": "tasks", "format": "harbor"}
    (tmp_path / "run.yaml").write_text(json.dumps(run))
    with pytest.raises(SystemExit) as ended:
        train_command(Path("run.yaml"), dry_run=True)
    assert ended.value.code == 1
    assert "a/environment/Dockerfile:2: RUN pip needs a network" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="Dockerfile:2: RUN pip needs a network"):
        TaskValidation(parse_config(run))
    run["workflow_args"] = {"has_packages": ["python:3.12"]}
    (tmp_path / "run.yaml").write_text(json.dumps(run))
    with pytest.raises(SystemExit):
        train_command(Path("run.yaml"), dry_run=True)
    said = capsys.readouterr().out
    assert "            not run: RUN pip install x (" in said
    assert "needs a network" not in said
    TaskValidation(parse_config(run))


def set_of(folder: Path, unreadable: str = "skip", **args: object) -> dict[str, Any]:
    """Return a run over a folder that can be played, one that needs a network, and one that cannot be read."""
    write_task(folder / "good", "RUN true")
    for name in ("net/1", "net/2"):
        write_task(folder / name, "RUN apt-get install vim")
    write_task(folder / "user", "USER app")
    tasks = {"path": str(folder), "format": "harbor", "unreadable": unreadable}
    workflow = "agentrl_workflows.terminal:TerminalAgent"
    return {"workflow": workflow, "workflow_args": args, "tasks": tasks, "model": {"path": "m"}}


def test_a_run_that_skips_leaves_out_the_tasks_that_need_a_network(tmp_path: Path) -> None:
    run = parse_config(set_of(tmp_path / "set"))
    left = left_out_here(run)
    assert [(each.source, each.name) for each in left] == [("tasks", "user"), ("tasks", "net/1"), ("tasks", "net/2")]
    rows = left_out_rows(left)
    assert rows[0] == "3 of tasks cannot be used (tasks.unreadable: skip)"
    assert rows[1].startswith("2 x environment/Dockerfile: RUN apt-get needs a network")
    assert rows[1].endswith("(net/1, net/2)")
    assert task_remarks(run) == []
    TaskValidation(run)


def test_a_run_that_skips_plays_those_tasks_where_the_image_has_their_packages(tmp_path: Path) -> None:
    run = parse_config(set_of(tmp_path / "set", has_packages=["*"]))
    assert [left.name for left in left_out_here(run)] == ["user"]


def test_a_run_that_refuses_still_names_the_tasks_that_need_a_network(tmp_path: Path) -> None:
    given = set_of(tmp_path / "set", "refuse")
    with pytest.raises(ConfigError, match="USER: expected root"):
        TaskValidation(parse_config(given))
    (tmp_path / "set" / "user" / "environment" / "Dockerfile").write_text("FROM a\n")
    with pytest.raises(ConfigError, match="net/1/environment/Dockerfile:2: RUN apt-get needs a network"):
        TaskValidation(parse_config(given))
    assert left_out_here(parse_config(given)) == []


def test_a_set_of_which_no_task_can_be_played_is_an_error_with_the_reasons(tmp_path: Path) -> None:
    given = set_of(tmp_path / "set")
    (tmp_path / "set" / "good" / "environment" / "Dockerfile").write_text("FROM a\nRUN pip install x\n")
    with pytest.raises(
        ConfigError, match=r"(?s)none of the 3 tasks of .* can be played:\n  2 x .*apt-get.*\n  1 x .*RUN pip"
    ):
        TaskValidation(parse_config(given))
    with pytest.raises(ConfigError, match="none of the 3 tasks"):
        task_remarks(parse_config(given))
    assert [left.name for left in left_out_here(parse_config(given))] == ["user"]


def test_each_of_several_sources_and_the_held_out_tasks_decide_for_themselves(tmp_path: Path) -> None:
    given = set_of(tmp_path / "set")
    one = dict(given["tasks"])
    other = {"path": str(write_task(tmp_path / "other", "RUN true").data["folder"]), "format": "harbor"}
    given["tasks"] = {"sources": [other, one], "eval": one}
    sets, run = load_tasks(parse_config(given).tasks), parse_config(given)
    kept = playable_tasks(sets, run.tasks, TerminalAgent().refusal)
    assert [task.id for task in kept.finite] == ["1/other", "2/good", "good"]
    assert [(left.source, left.name) for left in kept.left_out[2:]] == [
        (source, name) for source in ("tasks.sources.1", "tasks.eval") for name in ("net/1", "net/2")
    ]


def test_the_tests_of_a_task_that_need_a_network_to_be_built_count_as_the_task_does(tmp_path: Path) -> None:
    task = write_task(tmp_path / "a", settings='[verifier]\nenvironment_mode = "separate"\n[verifier.environment]\n')
    (tmp_path / "a" / "tests" / "Dockerfile").write_text("FROM python:3.12\nRUN pip install pytest\n")
    assert "tests/Dockerfile: RUN pip needs a network" in TerminalAgent().refusal(task)
    with pytest.raises(ConfigError, match="tests/Dockerfile:2: RUN pip needs a network"):
        remarks([task])
    assert TerminalAgent(has_packages=["*"]).refusal(task) == ""
