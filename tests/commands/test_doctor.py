"""The doctor starts the trainer too, and leaves nothing behind."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from agentrl.commands.doctor import run_checks
from tests.support.cli import write_run
from tests.support.ports import later_port
from tests.support.sandboxes import usable_host


@pytest.mark.starts
@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], "ok  trainer      30048 parameters on cpu"),
        (
            ["--trainer.device", "cuda"],
            "FIX trainer      trainer.device or sft.device: cuda, but there are 0 CUDA devices",
        ),
    ],
)
def test_the_trainer_is_started_once_and_what_is_wrong_with_it_is_named(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    run, out = write_run(tmp_path, checkpoint), io.StringIO()
    before = sorted(tmp_path.iterdir())
    assert not run_checks(run, ["--workflow", "nowhere:agent", *flags], Console(file=out, width=200))
    assert expected in out.getvalue()
    assert "round trip" not in out.getvalue()
    assert sorted(tmp_path.iterdir()) == before


def test_without_a_model_no_trainer_is_started(tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    out = io.StringIO()
    flags = ["--workflow", "nowhere:agent", "--model.path", "nowhere"]
    assert not run_checks(write_run(tmp_path, checkpoint), flags, Console(file=out, width=200))
    assert "FIX model" in out.getvalue()
    assert "trainer " not in out.getvalue()


@pytest.mark.starts
@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        ("bubblewrap", "ok  sandbox      bubblewrap: isolated; a program ran in"),
        ("unsafe_process", "ok  sandbox      unsafe_process: NOT isolated; a program ran in"),
        ("remote, url: 'http://127.0.0.1:9'", "FIX sandbox      sandbox: "),
    ],
)
def test_the_sandbox_of_a_workflow_is_tested_by_itself(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, backend: str, expected: str
) -> None:
    if backend == "bubblewrap":
        usable_host()
    monkeypatch.chdir(tmp_path)
    out = io.StringIO()
    arguments = f"{{sandbox: {{backend: {backend}}}}}"
    flags = ["--workflow", "agentrl_workflows.repository:RepositoryAgent", "--workflow_args", arguments]
    flags += ["--model.path", "nowhere"]
    assert not run_checks(write_run(tmp_path, checkpoint), flags, Console(file=out, width=200))
    assert expected in out.getvalue()


def test_what_trainer_ranks_of_a_scheduler_need_is_checked(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AGENTRL_CLUSTER_TOKEN", raising=False)
    run, flags = write_run(tmp_path, checkpoint), ["--workflow", "nowhere:agent", "--cluster.launcher", "attach"]
    port = later_port()
    before = sorted(tmp_path.iterdir())
    out = io.StringIO()
    assert not run_checks(run, [*flags, "--cluster.listen", "192.0.2.1:29715"], Console(file=out, width=250))
    assert "FIX token        AGENTRL_CLUSTER_TOKEN is not set" in out.getvalue()
    assert "FIX listen       cluster.listen: cannot listen on 192.0.2.1:29715" in out.getvalue()
    assert "ok  trainer      not started" in out.getvalue()
    monkeypatch.setenv("AGENTRL_CLUSTER_TOKEN", "a secret of some length")
    out = io.StringIO()
    assert not run_checks(run, [*flags, "--cluster.listen", f"127.0.0.1:{port}"], Console(file=out, width=250))
    assert "ok  token        AGENTRL_CLUSTER_TOKEN is set" in out.getvalue()
    assert f"ok  listen       trainer ranks can join at 127.0.0.1:{port}; only ranks on this machine" in out.getvalue()
    assert f"ok  run folder   {tmp_path}/runs can be written here" in out.getvalue()
    assert sorted(tmp_path.iterdir()) == before
