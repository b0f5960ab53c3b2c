"""`agentrl init` writes a project whose tests pass and whose run can be planned, checked and trained at once."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.commands.init import start_project, templates
from agentrl.config import load_config
from agentrl.errors import ConfigError
from agentrl.plan.checks import missing_here
from agentrl.plan.model import read_model
from agentrl.plan.model_defaults import toy_values
from agentrl.plan.plan import plan_run
from tests.support.cli import agentrl


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new project, written once."""
    folder = tmp_path_factory.mktemp("projects") / "my-agent"
    assert "cd " in start_project(folder)
    return folder


@pytest.mark.starts
def test_a_project_is_whole_and_its_run_lacks_nothing(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    run = load_config("run.yaml")
    assert run.name == "my-agent"
    assert [lack for lack in missing_here(plan_run(run)) if "workflow" not in lack] == []
    assert {path.name for path in project.iterdir()} >= {
        "agent.py",
        "test_agent.py",
        "tasks.jsonl",
        "README.md",
        ".gitignore",
    }
    assert not [path for path in project.iterdir() if path.is_file() and "@NAME@" in path.read_text()]


def test_a_pretrained_model_gets_a_run_file_for_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
    config = {"model_type": "llama", "num_key_value_heads": 3, "vocab_size": 49_152, "tie_word_embeddings": True, **shape}
    (tmp_path / "smol").mkdir()
    (tmp_path / "smol" / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    assert "with settings for the size of the model" in start_project(Path("mine"), model="smol")
    text = (tmp_path / "mine" / "run.yaml").read_text()
    assert "of 135M parameters" in text
    assert "@" not in text
    run = load_config(tmp_path / "mine" / "run.yaml")
    assert run.model.path == str(tmp_path / "smol")
    assert (run.trainer.lr, run.trainer.minibatches, run.sampling.max_tokens) == (1.5e-5, 2, 256)
    assert toy_values(run, read_model(run.model.path)) == []
    assert not (tmp_path / "mine" / "make_model.py").exists()
    assert "make_model" not in (tmp_path / "mine" / "README.md").read_text()


def test_a_model_without_a_size_and_a_tiny_one_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot tell the size of .*nowhere"):
        start_project(tmp_path / "new", model=str(tmp_path / "nowhere"))
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 99}
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps({"model_type": "llama", **shape}))
    with pytest.raises(ConfigError, match=r"parameters are no pretrained model; leave --model out"):
        start_project(tmp_path / "new", model=str(tmp_path / "tiny"))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("name", "template", "message"),
    [
        ("my agent", "attempts", "'my agent' cannot name a run"),
        ("taken", "attempts", "taken exists; name a folder that does not"),
        ("new", "nothing", "--template nothing: there is no such template; there is attempts"),
    ],
)
def test_a_project_is_refused_by_name_and_nothing_is_written(tmp_path: Path, name: str, template: str, message: str) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(ConfigError, match=message):
        start_project(tmp_path / name, template)
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
    assert templates()[0] == "attempts"


@pytest.mark.starts
@pytest.mark.parametrize("name", ["2026-11-23", "007"])
def test_a_name_that_yaml_reads_as_something_else_names_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(sys, "executable", "true")  # no model
    start_project(tmp_path / name)
    assert load_config(tmp_path / name / "run.yaml").name == name


@pytest.mark.starts
@pytest.mark.parametrize(
    ("script", "error"), [("mkdir model; exit 1", ConfigError), ("sleep 0.3; kill -INT $PPID", KeyboardInterrupt)]
)
def test_a_failure_leaves_an_empty_folder_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, error: type[BaseException]
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    (tmp_path / "empty").mkdir()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(error):
            start_project(tmp_path / "empty")
    finally:
        signal.signal(signal.SIGINT, before)
    assert list((tmp_path / "empty").iterdir()) == []


@pytest.mark.starts
@pytest.mark.nightly
def test_the_commands_that_it_prints_work_and_training_learns(project: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider"]
    tests = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=300, check=False)
    assert tests.returncode == 0, tests.stdout
    for arguments in (["doctor", "run.yaml"], ["train", "run.yaml", "--dry-run"], ["train", "run.yaml"]):
        result = agentrl(project, *arguments, timeout_s=500)
        assert result.returncode == 0, result.stdout + result.stderr
    lines = [json.loads(line) for line in (project / "runs" / "my-agent" / "metrics.jsonl").read_text().splitlines()]
    rates = [line["success_rate"] for line in lines if line["event"] == "step"]
    assert sum(rates[:10]) / 10 < 0.1
    assert sum(rates[-10:]) / 10 > 0.6
