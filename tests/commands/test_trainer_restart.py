"""A run whose trainer dies continues from its newest checkpoint."""

from __future__ import annotations

import json
import os
import select
import signal
from functools import partial
from pathlib import Path

import anyio
import pytest

from agentrl.commands.train import train_run
from agentrl.config import RunConfig, load_config
from agentrl.errors import TrainerDied
from agentrl.observe.progress import NoProgress, Snapshot
from tests.support.cli import child_commands, records, write_run

pytestmark = pytest.mark.starts


class KillsTrainer(NoProgress):
    """Kills the trainer worker after step 3, when the checkpoint of step 1 is whole, once or always."""

    def __init__(self, *, times: int) -> None:
        self.left = times

    def step(self, snapshot: Snapshot) -> None:
        if snapshot.step != 3 or not self.left:
            return
        self.left -= 1
        for pid, line in child_commands(os.getpid()).items():
            if "agentrl.trainer.worker" in line:
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


@pytest.mark.long
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
        self.started: dict[int, int] = {}
        """A descriptor of each rank that was seen, which becomes readable when that has ended."""
        self.killed: int | None = None

    def step(self, snapshot: Snapshot) -> None:
        ranks = {pid: line for pid, line in child_commands(os.getpid()).items() if "agentrl.trainer.worker" in line}
        self.started |= {pid: os.pidfd_open(pid) for pid in ranks.keys() - self.started.keys()}
        if snapshot.step == 5 and self.killed is None:
            [damaged] = (self.checkpoints / "step-000004").glob("model-00001*.safetensors")
            damaged.write_bytes(damaged.read_bytes()[:-1])
            [self.killed] = [pid for pid, line in ranks.items() if "--rank=1" in line]
            os.kill(self.killed, signal.SIGKILL)


@pytest.mark.long
def test_one_killed_rank_restarts_the_run_from_its_newest_sound_checkpoint_under_new_versions(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = {"device": "cpu", "lr": 1e-3, "restarts": 1, "parallel": {"dp": 2}}
    engine = {"steps": 6, "checkpoint_every": 2, "keep_checkpoints": 3}
    file = write_run(tmp_path, checkpoint, trainer=trainer, engine=engine)
    # The run that ends after step 4 waits for the checkpoint; one that continues writes it beside the next steps.
    anyio.run(partial(train_run, load_config(file, ["--engine.steps", "4"]), progress=NoProgress()))
    run = load_config(file)
    progress = DamagesAndKillsRank(run.run_dir / "checkpoints")
    report = anyio.run(partial(train_run, run, existing="resume", progress=progress))
    assert (report.train_steps, report.resumed_from_step) == (6, 2)
    assert f"rank 1 (pid {progress.killed}): signal SIGKILL" in caplog.text
    assert "checkpoint skipped, trying the one before" in caplog.text
    lines = (run.run_dir / "metrics.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines if '"publishing"' in line or '"resumed"' in line]
    restarted = max(number for number, event in enumerate(events) if event["event"] == "resumed")
    before, after = ([event.get("version", 0) for event in part] for part in (events[:restarted], events[restarted + 1 :]))
    assert max(before) < min(after)
    assert after == sorted(set(after))
    assert len(progress.started) == 4
    ended, _, _ = select.select(progress.started.values(), [], [], 0)
    assert sorted(ended) == sorted(progress.started.values())
    for descriptor in progress.started.values():
        os.close(descriptor)
