"""`agentrl eval`: a failed episode is data, never a reward of 0, and an evaluation that says nothing is an error."""

from __future__ import annotations

import json
import re
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from agentrl.client import Client
from agentrl.commands.evaluate import Target, evaluate_target
from agentrl.config import RunConfig, parse_config
from agentrl.errors import ConfigError, ErrorBudgetExceeded, RunStopped
from agentrl.types import Task
from tests.support.cli import agentrl, status_here, write_run

DEAD = Target(endpoint="http://127.0.0.1:9/v1", model="m")
"""Nothing listens there; a workflow that makes no call does not notice."""


def make(count: int) -> list[Task]:
    return [Task(id=f"t{number}", data={"fails": number % 4 == 0}) for number in range(count)]


async def ask(task: Task, client: Client) -> float:
    await client.chat.completions.create(messages=[{"role": "user", "content": "Say good."}])
    return 1.0


async def always_fails(task: Task, client: Client) -> float:
    raise LookupError("a broken tool")


async def fails_at_times(task: Task, client: Client) -> float:
    if task["fails"]:
        raise LookupError("a broken tool")
    return 1.0


async def votes(task: Task, client: Client) -> float:
    """Give one of four answers of each task, of which two are right; the second fails where its task says so."""
    sample = int(client.episode.id.rpartition(".")[2]) // 3
    client.final_answer(["4", "5", "4.0", None][sample])
    if task["fails"] and sample == 1:
        raise LookupError("a broken tool")
    return [1.0, 0.0, 1.0, 0.0][sample]


def make_run(workflow: str, **changes: object) -> RunConfig:
    tasks = {"factory": f"{__name__}:make", "factory_args": {"count": 1}, "eval": {"factory_args": {"count": 8}}}
    return parse_config({"workflow": f"{__name__}:{workflow}", "tasks": tasks, "model": {"path": "model"}, **changes})


def evaluate(
    run: RunConfig, target: Target = DEAD, *, episodes: int | None = None, output: Path | None = None
) -> dict[str, Any]:
    """Evaluate and return the metrics."""
    return dict(anyio.run(partial(evaluate_target, run, target, episodes=episodes, output=output)).metrics())


def test_a_dead_endpoint_is_an_error_that_says_so_and_no_success_rate_of_zero(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "report.json"
    with pytest.raises(ErrorBudgetExceeded, match=r"(?s)2 of 2 episodes failed: 2 server_error.*no success rate") as error:
        evaluate(make_run("ask"), episodes=2, output=output)
    assert "task t0, was ServerUnavailable: " in str(error.value)
    assert "http://127.0.0.1:9/v1" in str(error.value)
    assert "test_evaluate.py" in str(error.value)  # where the workflow called
    assert "httpcore" not in str(error.value)  # not how the connection broke
    assert "success_rate" not in capsys.readouterr().out
    written = json.loads(output.read_text())
    assert "success_rate" not in written
    assert (written["episodes"], written["failed"], written["failed_episodes.server_error"]) == (2, 2, 2)
    assert written["first_failure"]["kind"] == "ServerUnavailable"
    assert "Connection error" in written["first_failure"]["message"]


@pytest.mark.starts
def test_the_command_ends_with_status_one_when_nothing_was_evaluated(tmp_path: Path) -> None:
    write_run(tmp_path, tmp_path)
    result = agentrl(tmp_path, "eval", "run.yaml", "--endpoint", "http://127.0.0.1:9/v1", "--model", "m", "--episodes", "1")
    assert result.returncode == 1, result.stderr
    assert "\nagentrl: 1 of 1 episodes failed: 1 server_error" in f"\n{result.stderr}"
    assert not (tmp_path / "runs").exists()


def test_a_workflow_that_always_raises_is_an_error_with_its_traceback() -> None:
    with pytest.raises(ErrorBudgetExceeded, match=r"(?s)8 of 8 episodes failed: 8 workflow_error.*raise LookupError"):
        evaluate(make_run("always_fails", rollout={"max_failure_rate": 1.0}), episodes=8)


def test_the_rate_is_over_the_episodes_that_did_not_fail_and_the_first_failure_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "report.json"
    metrics = evaluate(make_run("fails_at_times"), episodes=8, output=output)
    assert (metrics["success_rate"], metrics["failed"], metrics["failed_episodes.workflow_error"]) == (1.0, 2, 2)
    shown = capsys.readouterr()
    assert "success_rate 1\n" in re.sub(" +", " ", shown.out)
    assert "2 of 8 episodes failed: 2 workflow_error; success rate and returns are over the other 6." in shown.err
    assert "The first failure, task t0, was WorkflowError: " in shown.err
    assert "LookupError: a broken tool" in shown.err
    assert json.loads(output.read_text())["first_failure"]["task_id"] == "t0"


def test_more_failures_than_the_run_allows_are_an_error_although_there_is_a_rate(tmp_path: Path) -> None:
    run, output = make_run("fails_at_times", rollout={"max_failure_rate": 0.2}), tmp_path / "report.json"
    with pytest.raises(ErrorBudgetExceeded, match=r"2 of 8 episodes failed.*over rollout.max_failure_rate 20%"):
        evaluate(run, episodes=8, output=output)
    assert json.loads(output.read_text())["success_rate"] == 1.0


def test_an_evaluation_without_failures_says_nothing_on_standard_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "report.json"
    tasks = {"factory": f"{__name__}:make_good", "eval": {"factory_args": {}}}
    metrics = evaluate(make_run("fails_at_times", tasks=tasks), episodes=3, output=output)
    assert (metrics["success_rate"], metrics["failed"]) == (1.0, 0)
    assert capsys.readouterr().err == ""
    assert json.loads(output.read_text())["first_failure"] is None


def make_good() -> list[Task]:
    return [Task(id="good", data={"fails": False})]


@pytest.mark.parametrize(
    ("target", "options", "expected"),
    [
        (DEAD, {"episodes": 0}, "--episodes 0: expected at least 1; omit it for engine.eval_episodes = 128"),
        (DEAD, {"episodes": -3}, "--episodes -3: expected at least 1"),
        (
            Target(endpoint="http://127.0.0.1:9/v1", model="m", api_key_env="NO_SUCH_KEY"),
            {},
            "--api-key-env NO_SUCH_KEY: this environment variable is not set; export it, or drop the flag",
        ),
        (Target(api_key_env="NO_SUCH_KEY"), {}, "--api-key-env NO_SUCH_KEY: needs --endpoint"),
        (Target(model="m"), {}, "--model m: needs --endpoint"),
        (DEAD, {"output": Path("/nowhere/report.json")}, "--output /nowhere/report.json: there is no directory /nowhere"),
        (
            DEAD,
            {"output": Path("/proc/report.json")},
            "--output /proc/report.json: cannot write in /proc: .*; fix that, or",
        ),
        (DEAD, {"output": Path("/tmp")}, "--output /tmp: expected the name of a file to write, but it is a directory"),
        (DEAD, {"output": Path("/dev/null")}, "--output /dev/null: expected .* but it is not a file; name another"),
        (DEAD, {"output": Path("/tmp/" + "n" * 255)}, "--output /tmp/n*: cannot write in /tmp: File name too long"),
    ],
)
def test_a_flag_that_cannot_be_honoured_is_refused_before_anything_starts(
    target: Target, options: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        evaluate(make_run("no_such_workflow"), target, **options)


@pytest.mark.parametrize(
    "endpoint",
    [
        "http://me:hunter2@127.0.0.1:9/v1",
        "http://hunter2@127.0.0.1:9/v1",
        "http://:hunter2@127.0.0.1:9/v1",
        "http://me:hunter2/x@127.0.0.1:9/v1",
        "me:hunter2@127.0.0.1:9/v1",
    ],
)
def test_a_password_in_the_endpoint_is_refused_and_shown_nowhere(tmp_path: Path, endpoint: str) -> None:
    output = tmp_path / "report.json"
    with pytest.raises(ConfigError, match=r"--endpoint holds a user or a password.*--api-key-env") as caught:
        evaluate(make_run("ask"), Target(endpoint=endpoint, model="m"), episodes=1, output=output)
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))
    assert not output.exists()


@pytest.mark.parametrize("given", [None, "THE_KEY"])
def test_the_key_is_that_of_the_variable_named_or_of_openai_s(monkeypatch: pytest.MonkeyPatch, given: str | None) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "usual")
    monkeypatch.setenv("THE_KEY", "special")
    run = make_run("reads_the_key", workflow_args={"expected": "special" if given else "usual"})
    evaluate(run, Target(endpoint="http://127.0.0.1:9/v1", model="m", api_key_env=given), episodes=1)


async def reads_the_key(task: Task, client: Client, expected: str) -> float:
    assert client.api_key == expected
    return 1.0


@pytest.mark.starts
def test_the_servers_logs_stay_and_are_named_only_if_something_failed(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    inference = {"device": "cpu", "max_context_tokens": 256, "max_running_requests": 4}
    changes = {"model": {"path": str(checkpoint)}, "inference": inference, "sampling": {"max_tokens": 4}}
    assert evaluate(make_run("ask", **changes), Target(), episodes=2)["failed"] == 0
    assert capsys.readouterr().err == ""
    assert not (tmp_path / "runs").exists()
    with pytest.raises(ErrorBudgetExceeded, match="8 workflow_error"):
        evaluate(make_run("always_fails", **changes), Target(), episodes=8)
    [folder] = (tmp_path / "runs" / "eval-logs").iterdir()
    assert f"The servers' logs are in {folder.relative_to(tmp_path)}/" in capsys.readouterr().err
    assert [file.name for file in folder.iterdir()] == ["server-0.log"]


async def takes_the_name(task: Task, client: Client, output: str) -> float:
    """Make a directory where the report was to go: what cannot be foreseen, as a disk that fills up meanwhile."""
    await anyio.Path(output).mkdir(exist_ok=True)
    if task["fails"]:
        raise LookupError("a broken tool")
    return 1.0


@pytest.mark.parametrize(("limit", "error"), [(1.0, RunStopped), (0.2, ErrorBudgetExceeded)])
def test_a_report_that_cannot_be_written_in_the_end_is_an_error_after_the_results_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], limit: float, error: type[Exception]
) -> None:
    output = tmp_path / "report.json"
    settings = {"workflow_args": {"output": str(output)}, "rollout": {"max_failure_rate": limit}}
    with pytest.raises(error) as raised:
        evaluate(make_run("takes_the_name", **settings), episodes=8, output=output)
    shown, unsaved = capsys.readouterr(), f"cannot write --output {output}: Is a directory; the results are only printed"
    assert "success_rate 1\n" in re.sub(" +", " ", shown.out)
    assert unsaved in shown.err
    assert (str(raised.value) == unsaved) == (error is RunStopped)
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"]


def test_an_existing_report_is_replaced(tmp_path: Path) -> None:
    output = tmp_path / "report.json"
    output.write_text("an older one")
    evaluate(make_run("fails_at_times"), episodes=8, output=output)
    assert json.loads(output.read_text())["episodes"] == 8


def test_the_command_refuses_a_directory_as_output_with_status_two_and_evaluates_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, tmp_path)
    monkeypatch.chdir(tmp_path)
    endpoint = ("--endpoint", "http://127.0.0.1:9/v1", "--model", "m")
    assert status_here("eval", "run.yaml", *endpoint, "--output", ".") == 2
    out, said = capsys.readouterr()
    assert out == ""
    assert said.startswith("agentrl: --output .: expected the name of a file to write, but it is a directory")


def test_several_samples_of_each_task_give_pass_at_k_and_the_majority(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = {"factory": f"{__name__}:make", "factory_args": {"count": 1}, "eval": {"factory_args": {"count": 3}}}
    output = tmp_path / "report.json"
    anyio.run(partial(evaluate_target, make_run("votes", tasks=tasks), DEAD, samples=4, output=output))
    written = json.loads(output.read_text())
    assert (written["episodes"], written["failed"]) == (12, 1)
    assert written["pass_at.1"] == pytest.approx((2 / 3 + 1 / 2 + 1 / 2) / 3)
    assert written["pass_at.2"] == pytest.approx((1 + 5 / 6 + 5 / 6) / 3)
    assert (written["pass_at.4"], written["majority_rate"]) == (1.0, 1.0)
    assert [task["task_id"] for task in written["samples"]] == ["t0", "t1", "t2"]
    assert written["samples"][0] == {
        "task_id": "t0",
        "episodes": ["eval.0", "eval.3", "eval.6", "eval.9"],
        "success": [True, None, True, False],
        "answers": ["4", "5", "4.0", None],
    }
    assert "pass_at.4" in capsys.readouterr().out


def test_the_episodes_of_some_tasks_are_a_multiple_of_the_samples() -> None:
    metrics = anyio.run(partial(evaluate_target, make_run("fails_at_times"), DEAD, samples=2, episodes=6)).metrics()
    assert (metrics["episodes"], metrics["failed"]) == (6, 2)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"samples": 0}, "--samples 0: expected at least 1"),
        ({"samples": 4, "episodes": 6}, "--episodes 6 --samples 4: expected a multiple of 4, at most 32 for the 8 tasks"),
        ({"samples": 2, "episodes": 18}, "at most 16 for the 8 tasks"),
        ({"samples": 2, "greedy": True}, "--samples 2 --greedy: at temperature 0 the samples of a task are alike"),
    ],
)
def test_samples_that_do_not_fit_are_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        anyio.run(partial(evaluate_target, make_run("fails_at_times"), DEAD, **flags))
