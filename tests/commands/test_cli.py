"""The command line: clear help, clear errors, and everything ends when it is interrupted."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from pathlib import Path

import pytest
from cyclopts import App

from agentrl.commands.main import COMMANDS
from agentrl.commands.open_run import open_run
from tests.support.cli import (
    AGENTRL,
    agentrl,
    read_until,
    records,
    started,
    status_here,
    write_run,
)


@pytest.mark.parametrize("command", ["train", "eval", "serve", "sft", "doctor"])
def test_every_command_explains_itself(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert status_here(command, "--help") == 0
    assert f"agentrl {command}" in capsys.readouterr().out


@pytest.mark.starts
def test_bad_input_is_one_message_and_status_two(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, checkpoint)
    result = agentrl(tmp_path, "train", "run.yaml", "--workflow", "my_agent:nothing")
    assert result.returncode == 2, (result.stdout, result.stderr)
    assert "has no 'nothing'; it has solve" in result.stderr
    assert "Traceback" not in result.stderr
    monkeypatch.chdir(tmp_path)
    for arguments, expected in [
        (["train", "none.yaml"], "cannot read the run file none.yaml"),
        (["train", "run.yaml", "--trainer.lrr", "1"], "trainer.lrr: there is no such field; did you mean trainer.lr?"),
        (["train", "run.yaml", "--tasks.path", "none.jsonl"], "cannot read none.jsonl"),
        (["train", "run.yaml", "--model.path", "nowhere"], "nowhere"),
        (["eval", "run.yaml", "--endpoint", "http://127.0.0.1:1/v1"], "--endpoint needs --model"),
        (["sft", "run.yaml", "out"], "no sft section"),
        (["serve", "nowhere"], "nowhere: expected a local HF checkpoint"),
    ]:
        assert status_here(*arguments) == 2, arguments
        said = capsys.readouterr().err
        assert expected in said
        assert "Traceback" not in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.starts
def test_dry_run_prints_the_plan_and_starts_nothing(tmp_path: Path, checkpoint: Path) -> None:
    write_run(tmp_path, checkpoint)
    result = agentrl(tmp_path, "train", "run.yaml", "--dry-run", "--algorithm.max_staleness", "4")
    assert result.returncode == 0
    assert "mean over tokens of" in result.stdout
    assert "at most 4 version(s) behind" in result.stdout
    assert not (tmp_path / "runs").exists()


@pytest.mark.starts
@pytest.mark.slow
def test_a_run_trains_and_its_checkpoint_evaluates(tmp_path: Path, checkpoint: Path) -> None:
    write_run(tmp_path, checkpoint)
    agent = tmp_path / "my_agent.py"
    noting = "    client.record(frozen_objects=gc.get_freeze_count())\n    return"
    agent.write_text("import gc\n" + agent.read_text().replace("    return", noting))
    result = agentrl(tmp_path, "train", "run.yaml")
    assert result.returncode == 0, result.stderr
    folder = tmp_path / "runs" / "small"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["train_steps"] == 2
    assert summary["max_logprob_difference"] < 1e-4
    assert summary["max_trained_staleness"] <= 2
    episodes = list(open_run(folder).read_episodes())
    assert len(episodes) == summary["episodes"] == 8
    assert all(episode.trajectory.metrics["frozen_objects"] > 10_000 for episode in episodes), "the tuned garbage collector"
    compared = 0
    for episode in episodes:
        turn, trained = episode.trajectory.turns[0], episode.trained
        if trained is None or trained.turns[0].proximal_logprobs is None or turn.spans[-1].version != trained.policy_version:
            continue
        assert trained.turns[0].proximal_logprobs == pytest.approx(turn.output_logprobs.tolist(), abs=1e-3)
        assert "".join(episode.token_texts(turn.output_ids.tolist()) or []).strip()
        compared += 1
    assert compared, "the first step trains what its own version sampled"
    assert (folder / "config.yaml").exists()

    report = agentrl(
        tmp_path, "eval", "run.yaml", "--checkpoint", summary["checkpoint"], "--episodes", "6", "--output", "eval.json"
    )
    assert report.returncode == 0, report.stderr
    assert json.loads((tmp_path / "eval.json").read_text())["episodes"] == 6


@pytest.mark.starts
def test_a_killed_run_is_resumed_from_its_newest_checkpoint(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, checkpoint, engine={"steps": 100_000, "checkpoint_every": 1})
    folder = tmp_path / "runs" / "small"
    with started(tmp_path, AGENTRL, "train", "run.yaml") as process:
        read_until(process, "step 3/100000")  # the checkpoint of step 1 is whole, and that of step 2 is being written
    done = len(records(folder / "metrics.jsonl", "step"))

    monkeypatch.chdir(tmp_path)
    assert status_here("train", "run.yaml", "--resume", "--algorithm.group_size", "4") == 2
    assert "algorithm.group_size was 2 and is now 4" in capsys.readouterr().err

    result = agentrl(tmp_path, "train", "run.yaml", "--resume", "--engine.steps", str(done + 3))
    assert result.returncode == 0, result.stderr
    [resumed] = records(folder / "metrics.jsonl", "resumed")
    assert done - 1 <= resumed["step"] <= done + 1
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["resumed_from_step"], summary["train_steps"]) == (resumed["step"], done + 3)
    assert summary["max_logprob_difference"] < 1e-4
    after = records(folder / "metrics.jsonl", "step")[done:]
    assert [line["step"] for line in after] == list(range(resumed["step"] + 1, done + 4))
    state = json.loads((tmp_path / summary["checkpoint"] / "trainer.json").read_text())["state"]
    assert state["steps"] == done + 3

    (folder / "summary.json").unlink()  # as after a kill between the last checkpoint and the summary
    assert status_here("train", "run.yaml", "--resume", "--engine.steps", str(done + 3)) == 0
    assert f"Run small is complete: {summary['checkpoint']}" in capsys.readouterr().err
    again = json.loads((folder / "summary.json").read_text())
    assert (again["error"], again["train_steps"], again["checkpoint"]) == (None, done + 3, summary["checkpoint"])

    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(reversed(tasks.read_text().splitlines(keepends=True))))
    longer = ["train", "run.yaml", "--resume", "--engine.steps", str(done + 4)]
    assert status_here(*longer) == 2
    assert "ids or data of some tasks have changed" in capsys.readouterr().err
    accepted = agentrl(tmp_path, *longer, "--accept-changed-tasks")
    assert accepted.returncode == 0, accepted.stderr


@pytest.mark.starts
@pytest.mark.slow
def test_doctor_plays_eight_episodes_and_names_what_to_fix(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, checkpoint)
    good = agentrl(tmp_path, "doctor", "run.yaml")
    assert good.returncode == 0, good.stdout + good.stderr
    assert re.search(
        r"ok  episodes     8 episodes: success \d of 8, .* entropy \d.* nats a token, \d+ tokens/s", good.stdout
    )
    assert re.search(r"parameters on cpu; a step of \d+ episodes: at most about .* of sampling", good.stdout)
    assert "Nothing to fix." in good.stdout
    assert "127.0.0.1 has free ports" in good.stdout
    monkeypatch.chdir(tmp_path)
    assert status_here("doctor", "run.yaml", "--workflow", "nowhere:agent", "--model.path", "nowhere") == 1
    assert "FIX" in capsys.readouterr().out


@pytest.mark.starts
@pytest.mark.long
def test_doctor_says_which_sglang_there_is_and_what_is_wrong_with_it(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    monkeypatch.setenv("AGENTRL_SGLANG_PYTHON", str(python))
    run = write_run(tmp_path, checkpoint, inference={"backend": "sglang", "host": "192.0.2.1", "api_key_env": "NO_SUCH_KEY"})
    for script, expected in (
        ("echo 0.5.23", f"sglang       0.5.23 at {python}"),
        ("echo 0.5.20", f"sglang       {python}: expected SGLang 0.5.21 or newer, got 0.5.20"),
        (
            "echo No module named sglang >&2; exit 1",
            f"{python} has no SGLang: No module named sglang; run make sglang-install",
        ),
    ):
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
        found = agentrl(tmp_path, "doctor", str(run), "--workflow", "nowhere:agent")
        assert found.returncode == 1
        assert expected in found.stdout
    assert "inference.host: cannot listen on 192.0.2.1" in found.stdout
    assert "inference.api_key_env: the environment variable NO_SUCH_KEY is not set" in found.stdout
    assert f"{python} has no SGLang" in agentrl(tmp_path, "doctor").stdout


@pytest.mark.starts
@pytest.mark.slow
def test_sft_trains_on_conversations_and_names_a_bad_line(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = {"messages": [{"role": "user", "content": "Say 1."}, {"role": "assistant", "content": "The answer is 1."}]}
    (tmp_path / "good.jsonl").write_text((json.dumps(line) + "\n") * 8)
    (tmp_path / "bad.jsonl").write_text(json.dumps(line) + "\n{oops\n")
    sft = {"data": "good.jsonl", "steps": 3, "conversations_per_step": 4, "device": "cpu", "threads": 1}
    write_run(tmp_path, checkpoint, sft=sft)
    good = agentrl(tmp_path, "sft", "run.yaml", "student")
    assert good.returncode == 0, good.stderr
    assert (tmp_path / "student" / "model.safetensors").exists()
    monkeypatch.chdir(tmp_path)
    assert status_here("sft", "run.yaml", "other", "--sft.data", "bad.jsonl") == 2
    assert "bad.jsonl:2" in capsys.readouterr().err


def test_the_list_of_commands_says_what_the_help_of_each_says() -> None:
    for name, command in COMMANDS.items():
        module, _, attribute = command.place.partition(":")
        found = getattr(importlib.import_module(f"agentrl.commands.{module}"), attribute)
        text = found.help if isinstance(found, App) else str(inspect.getdoc(found))
        assert str(text).splitlines()[0] == command.summary, name
