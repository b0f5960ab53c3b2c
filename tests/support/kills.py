"""Kill a run at random points with SIGKILL, resume it each time, and see what is left of it.

Invariant: a point is drawn as a number of training steps and a part of a second after them, so every phase of a step, its
publication and its checkpoint can be hit. Each process writes at least one checkpoint before it is killed.
"""

from __future__ import annotations

import random
import select
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import anyio

from agentrl.observe.runs.reading import read_index, read_metrics
from agentrl.trainer.worker.ranks import worker_ended
from tests.support.cli import AGENTRL, write_run

GROUP_SIZE, GROUPS_PER_STEP = 2, 2
CHECKPOINT_EVERY, EVAL_EVERY, EVAL_EPISODES = 2, 10, 4
STEPS_BEFORE_A_KILL = (3, 6)
_KEPT = ("model.safetensors", "optimizer.state")


@dataclass(frozen=True, slots=True, kw_only=True)
class Equality:
    """How a killed run compares with one that was left alone."""

    kills: int
    equal: int
    """Processes, each resumed after a kill, whose newest checkpoint has the same bytes: weights and optimizer."""
    final_equal: bool
    """Whether the last checkpoints have the same bytes."""
    repeated_steps: int
    """Steps that were done again because a kill lost them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounts:
    """What a run that was killed has trained and recorded, by the readers of its files."""

    kills: int
    groups: int
    """Groups that the steps of the run need."""
    lost: int
    """Of these, never trained."""
    trained_twice: int
    duplicate_episodes: int
    """Episode ids that the readers return more than once."""
    incomplete_groups: int
    """Trained groups without all their episodes in the file."""
    evaluations_wrong: int
    """Evaluations that are missing, or there twice."""
    repeated_steps: int


def prepare(folder: Path, checkpoint: Path, *, steps: int, asynchronous: bool) -> None:
    """Write the run file of an experiment: episodes one at a time and synchronous, or many at a time."""
    write_run(
        folder,
        checkpoint,
        algorithm={
            "group_size": GROUP_SIZE,
            "groups_per_step": GROUPS_PER_STEP,
            "max_staleness": 2 if asynchronous else 0,
        },
        rollout={"max_concurrent_episodes": 12 if asynchronous else 1},
        engine={
            "steps": steps,
            "checkpoint_every": CHECKPOINT_EVERY,
            "keep_checkpoints": steps,
            "eval_every": EVAL_EVERY if asynchronous else 0,
            "eval_episodes": EVAL_EPISODES,
        },
    )


def run_to_the_end(folder: Path, name: str, *, resume: bool = False) -> None:
    """Train, or resume, to the last step.

    Raises:
        AssertionError: the command failed; with what it wrote.
    """
    command = [AGENTRL, "train", "run.yaml", "--name", name, *(["--resume"] if resume else [])]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def killed(folder: Path, name: str, *, kills: int, seed: int) -> Iterator[int]:
    """Start a run, kill it `kills` times, and yield after each kill how many there were; then resume it to its end.

    Raises:
        AssertionError: a process ended before it was killed; with what it wrote.
    """
    draw = random.Random(seed)
    for count in range(kills):
        command = [AGENTRL, "train", "run.yaml", "--name", name, *(["--resume"] if count else [])]
        with subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, bufsize=0) as process:
            assert process.stderr is not None
            wanted, lines = draw.randint(*STEPS_BEFORE_A_KILL), list[bytes]()
            run_dir, begin, before = folder / "runs" / name, 0.0, 0.0
            saved = _saved(run_dir)
            while len(lines) < wanted or _saved(run_dir) == saved:  # checkpoints are written beside the steps
                line = process.stderr.readline()
                assert line, b"".join(lines).decode()
                lines += [line] if line.startswith(b"step ") else []
                begin, before = time.monotonic(), begin
            left = draw.random() * 2 * min(begin - before, 1.0)  # within the next two steps
            while left > 0 and select.select([process.stderr], [], [], left)[0] and process.stderr.readline():
                left -= time.monotonic() - begin
            process.kill()
        # The trainer finishes the checkpoint that it is writing.
        anyio.run(worker_ended, folder / "runs" / name / "logs" / "trainer.log")
        yield count + 1
    run_to_the_end(folder, name, resume=True)


def compare(folder: Path, *, kills: int, seed: int) -> Equality:
    """Run once undisturbed and once with kills, and compare their checkpoints byte by byte."""
    run_to_the_end(folder, "whole")
    whole, broken = folder / "runs" / "whole", folder / "runs" / "killed"
    newest = [_newest(broken) for _ in killed(folder, "killed", kills=kills, seed=seed)]
    resumed = [*newest[1:], _newest(broken)]
    same = [all(_bytes(broken, step, name) == _bytes(whole, step, name) for name in _KEPT) for step in resumed]
    assert _newest(broken) == _newest(whole)
    return Equality(kills=kills, equal=sum(same), final_equal=same[-1], repeated_steps=_repeated(broken))


def account(folder: Path, *, kills: int, seed: int, steps: int) -> Accounts:
    """Run with kills, and count what the files hold."""
    for _ in killed(folder, "killed", kills=kills, seed=seed):
        pass
    broken = folder / "runs" / "killed"
    events = list(read_metrics(broken))
    trained = Counter(group for event in events if event["event"] == "step" for group in event["trained_groups"])
    evaluated = Counter(event["step"] for event in events if event["event"] in ("evaluation", "evaluation_skipped"))
    due = range(EVAL_EVERY, steps + 1, EVAL_EVERY)
    ids: Counter[str] = Counter()
    members: Counter[int] = Counter()
    for episode in read_index(broken):
        ids[episode.episode_id] += 1
        if episode.group is not None and episode.failure is None:
            members[episode.group] += 1
    groups = range(steps * GROUPS_PER_STEP)
    return Accounts(
        kills=kills,
        groups=len(groups),
        lost=sum(group not in trained for group in groups),
        trained_twice=sum(count > 1 for count in trained.values()) + sum(group not in groups for group in trained),
        duplicate_episodes=sum(count > 1 for count in ids.values()),
        incomplete_groups=sum(members[group] != GROUP_SIZE for group in trained),
        evaluations_wrong=sum(evaluated[step] != 1 for step in due),
        repeated_steps=_repeated(broken),
    )


def _saved(run_dir: Path) -> set[int]:
    """Return the steps whose checkpoints are whole."""
    return {int(path.name.removeprefix("step-")) for path in (run_dir / "checkpoints").glob("step-*")}


def _newest(run_dir: Path) -> int:
    return max(_saved(run_dir))


def _bytes(run_dir: Path, step: int, name: str) -> bytes:
    return (run_dir / "checkpoints" / f"step-{step:06d}" / name).read_bytes()


def _repeated(run_dir: Path) -> int:
    written = (run_dir / "metrics.jsonl").read_bytes().count(b'"event":"step"')
    return written - sum(event["event"] == "step" for event in read_metrics(run_dir))
