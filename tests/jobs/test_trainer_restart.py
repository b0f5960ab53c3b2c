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
    """Kills the trainer worker after step 3, when the checkpoint of step 1 is whole, once or always."""

    def __init__(self, *, times: int) -> None:
        self.left = times

    def step(self, snapshot: Snapshot) -> None:
        if snapshot.step != 3 or not self.left:
            return
        self.left -= 1
        for pid in children(os.getpid()):
            if b"agentrl.trainer.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)


def make_run(tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, restarts: int) -> RunConfig:
    monkeypatch.chdir(tmp_path)
    trainer = {"device": "cpu", "lr": 1e-3, "restarts": restarts}
    run = write_run(tmp_path, checkpoint, trainer=trainer, engine={"steps": 4, "checkpoint_every": 1})
    return load_config(str(run), [])


def test_a_killed_trainer_is_started_again_and_the_run_ends_with_all_steps(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run(tmp_path, checkpoint, monkeypatch, restarts=1)
    report = anyio.run(partial(train_run, run, progress=KillsTrainer(times=1)))
    assert report.train_steps == 4
    assert report.resumed_from_step in {1, 2}  # that of step 2 may still have been on its way to the disk
    assert [event["step"] for event in records(run.run_dir / "metrics.jsonl", "resumed")] == [report.resumed_from_step]
    assert "The run continues from its newest checkpoint (trainer.restarts)" in caplog.text


@pytest.mark.external
def test_a_trainer_that_dies_too_often_ends_the_run(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, checkpoint, monkeypatch, restarts=1)
    with pytest.raises(TrainerDied, match="it died while"):
        anyio.run(partial(train_run, run, progress=KillsTrainer(times=9)))
    assert len(records(run.run_dir / "metrics.jsonl", "resumed")) == 1


class DamagesAndKillsRank(NoProgress):
    """After step 5, once: damages the checkpoint of step 4, and kills rank 1 of the trainer."""

    def __init__(self, checkpoints: Path) -> None:
        self.checkpoints = checkpoints
        self.started: set[int] = set()
        self.rank: int | None = None

    def step(self, snapshot: Snapshot) -> None:
        self.started |= set(children(os.getpid()))
        if snapshot.step == 5 and self.rank is None:
            [damaged] = (self.checkpoints / "step-000004").glob("model-00001*.safetensors")
            damaged.write_bytes(damaged.read_bytes()[:-1])
            [self.rank] = [pid for pid in self.started if b"--rank=1" in Path(f"/proc/{pid}/cmdline").read_bytes()]
            os.kill(self.rank, signal.SIGKILL)


@pytest.mark.external
def test_one_killed_rank_restarts_the_run_from_its_newest_sound_checkpoint_under_new_versions(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = {"device": "cpu", "lr": 1e-3, "restarts": 1, "parallel": {"dp": 2}}
    engine = {"steps": 6, "checkpoint_every": 2, "keep_checkpoints": 3}
    run = load_config(str(write_run(tmp_path, checkpoint, trainer=trainer, engine=engine)), [])
    progress = DamagesAndKillsRank(run.run_dir / "checkpoints")
    report = anyio.run(partial(train_run, run, progress=progress))
    assert (report.train_steps, report.resumed_from_step) == (6, 2)
    assert f"rank 1 (pid {progress.rank}): signal SIGKILL" in caplog.text
    assert "checkpoint skipped, trying the one before" in caplog.text
    published = [event["version"] for event in records(run.run_dir / "metrics.jsonl", "publishing")]
    assert published == sorted(set(published))
    assert [pid for pid in progress.started if Path(f"/proc/{pid}").exists()] == []
