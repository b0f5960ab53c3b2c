"""A run whose trainer dies continues from its newest checkpoint."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import anyio
import pytest

from agentrl.config import RunConfig, load_config
from agentrl.errors import TrainerDied
from agentrl.jobs.train import train_run
from agentrl.observe.progress import NoProgress, Snapshot
from tests.support.cli import children, records, write_run


class KillsTrainer(NoProgress):
    """Kills the trainer worker after step 2, once or always."""

    def __init__(self, *, times: int) -> None:
        self.left = times

    def step(self, snapshot: Snapshot) -> None:
        if snapshot.step != 2 or not self.left:
            return
        self.left -= 1
        for pid in children(os.getpid()):
            if b"agentrl.trainer.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)


def make_run(tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, restarts: int) -> RunConfig:
    monkeypatch.chdir(tmp_path)
    trainer = {"device": "cpu", "lr": 1e-3, "restarts": restarts}
    run = write_run(tmp_path, checkpoint, trainer=trainer, engine={"steps": 3, "checkpoint_every": 1})
    return load_config(str(run), [])


def test_a_killed_trainer_is_started_again_and_the_run_ends_with_all_steps(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run(tmp_path, checkpoint, monkeypatch, restarts=1)
    report = anyio.run(partial(train_run, run, progress=KillsTrainer(times=1)))
    assert (report.train_steps, report.resumed_from_step) == (3, 1)
    assert [event["step"] for event in records(run.run_dir / "metrics.jsonl", "resumed")] == [1]
    assert "The run continues from its newest checkpoint (trainer.restarts)" in caplog.text


@pytest.mark.external
def test_a_trainer_that_dies_too_often_ends_the_run(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, checkpoint, monkeypatch, restarts=1)
    with pytest.raises(TrainerDied, match="it died while"):
        anyio.run(partial(train_run, run, progress=KillsTrainer(times=9)))
    assert len(records(run.run_dir / "metrics.jsonl", "resumed")) == 1
