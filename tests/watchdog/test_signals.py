"""Ctrl-C, SIGTERM and a workflow that blocks: every command ends what it started and says where its results are."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.cli import (
    AGENTRL,
    agentrl,
    all_gone,
    child_commands,
    children,
    ended,
    read_until,
    started,
    wait_until_reading_pipe,
    watches,
    write_run,
)

pytestmark = pytest.mark.starts

BLOCKING = """
import sys, time

async def solve(task, client):
    await client.chat.completions.create(messages=[{"role": "user", "content": task["question"]}])
    print("blocking", file=sys.stderr, flush=True)
    time.sleep(1000)
"""
BLOCKING_WHEN_ASKED = """
import os, sys, time, anyio

async def solve(task, client):
    print("blocking", file=sys.stderr, flush=True)
    await anyio.wait_readable(os.open("go", os.O_RDONLY | os.O_NONBLOCK))
    time.sleep(1000)
"""
CALL = 'await client.chat.completions.create(messages=[{{"role": "user", "content": task["question"]}}])'
KEEPING = """
import sys, time, anyio

async def solve(task, client):
    await client.chat.completions.create(messages=[{{"role": "user", "content": task["question"]}}])
    print("going on", file=sys.stderr, flush=True)
    while True:
        try:
            {line}
        except:
            pass
"""
CLOSING = """
import sys, anyio
from agentrl.env import open_environment

class Slow:
    observation, reward, is_done = "", 0.0, False
    async def reset(self): ...
    async def step(self, action): ...
    async def close(self):
        await anyio.sleep(1000)

async def solve(task, client):
    {line}
        await client.chat.completions.create(messages=[{{"role": "user", "content": task["question"]}}])
        print("going on", file=sys.stderr, flush=True)
        await anyio.sleep_forever()
"""
WAITING = """
import anyio

async def solve(task, client):
    await anyio.sleep_forever()
"""
WHERE = "my_agent.py:7 in solve: time.sleep(1000)"
SUMMARY = Path("runs/small/summary.json")


@pytest.mark.slow
def test_a_blocking_workflow_ends_the_run_with_its_file_and_line_in_the_summary(tmp_path: Path, checkpoint: Path) -> None:
    write_run(tmp_path, checkpoint)
    (tmp_path / "my_agent.py").write_text(BLOCKING_WHEN_ASKED)
    os.mkfifo(tmp_path / "go")
    script = (
        "import anyio; from functools import partial; from agentrl.config import load_config\n"
        "from agentrl.commands.running import run_command; from agentrl.commands.train import train_run\n"
        "run_command(lambda: anyio.run(partial(train_run, load_config('run.yaml'), max_block_s=1.5)))"
    )
    with started(tmp_path, sys.executable, "-c", script) as process:
        read_until(process, "blocking")
        below = watches(children(process.pid))
        (tmp_path / "go").write_text("now")
        said = ended(process, ())
        gone = all_gone(below, within_s=0)
    assert process.returncode == 1, said
    assert "agentrl: the event loop has not run for 1.5 s" in said
    assert WHERE in said
    assert "Traceback" not in said
    assert (len(below), gone) == (2, True)
    assert WHERE in json.loads((tmp_path / SUMMARY).read_text())["error"]


@pytest.mark.slow
def test_one_interrupt_ends_a_blocked_run(tmp_path: Path, checkpoint: Path) -> None:
    write_run(tmp_path, checkpoint)
    (tmp_path / "my_agent.py").write_text(BLOCKING)
    with started(tmp_path, AGENTRL, "train", "run.yaml") as process:
        read_until(process, "blocking")
        below = watches(children(process.pid))
        said = ended(process, [signal.SIGINT])
        gone = all_gone(below, within_s=0)
    assert process.returncode == 130, said
    assert "Interrupted; everything this command started has ended. Results so far are in runs/small/." in said
    assert "Traceback" not in said
    assert gone
    assert json.loads((tmp_path / SUMMARY).read_text())["error"] == "Interrupted"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("agent", "line", "number"),
    [
        (KEEPING, "await anyio.to_thread.run_sync(time.sleep, 1000)", signal.SIGTERM),
        (KEEPING, "time.sleep(1000)", signal.SIGINT),
        (CLOSING, 'async with open_environment(Slow(), "slow", close_timeout_s=1000):', signal.SIGINT),
    ],
)
def test_a_workflow_that_ignores_every_interrupt_or_closes_slowly_cannot_keep_an_evaluation(
    tmp_path: Path, checkpoint: Path, agent: str, line: str, number: signal.Signals
) -> None:
    write_run(tmp_path, checkpoint)
    source = agent.format(line=line)
    (tmp_path / "my_agent.py").write_text(source)
    with started(tmp_path, AGENTRL, "eval", "run.yaml", "--episodes", "2") as process:
        read_until(process, "going on")
        below = watches(children(process.pid))
        said = ended(process, [number])
        gone = all_gone(below)
    word = "Interrupted" if number == signal.SIGINT else "Ended by SIGTERM"
    assert process.returncode == 128 + number, said
    assert f"{word} in the middle of a workflow that does not end when it is cancelled" in said
    place = source[: source.index(line)].count("\n") + 1
    assert f"my_agent.py:{place} in solve: {line}" in said
    assert "An interrupted evaluation has no results." in said
    assert "Traceback" not in said
    assert (len(below), gone) == (1, True)


@pytest.mark.slow
def test_an_evaluation_is_not_kept_by_an_episode_that_ignores_its_deadline(tmp_path: Path, checkpoint: Path) -> None:
    write_run(tmp_path, checkpoint, rollout={"episode_timeout_s": 0.5})
    without_call = KEEPING.replace(CALL, "pass")  # which may take longer than the episode has
    (tmp_path / "my_agent.py").write_text(without_call.format(line="await anyio.sleep(1000)"))
    script = (
        "from functools import partial; from agentrl.config import load_config\n"
        "from agentrl.commands.running import run_command; from agentrl.commands.evaluate import Target, evaluate_target\n"
        "from agentrl.processes.watchdog.loop import run_watched\n"
        "job = partial(evaluate_target, load_config('run.yaml'), Target(), episodes=2)\n"
        "run_command(lambda: run_watched(job, stall_timeout_s=1.5, on_exit=lambda ending: 'No results.'))"
    )
    with started(tmp_path, sys.executable, "-c", script) as process:
        said = ended(process, ())
    assert process.returncode == 1, said
    assert "agentrl: a workflow was cancelled 1.5 s ago and still runs" in said
    assert "my_agent.py:9 in solve: await anyio.sleep(1000)" in said
    assert "catch Exception" in said
    assert said.rstrip().endswith("No results.")


@pytest.mark.slow
def test_sigterm_writes_the_summary_and_ends_the_servers_also_where_interrupts_are_ignored(
    tmp_path: Path, checkpoint: Path
) -> None:
    write_run(tmp_path, checkpoint, engine={"steps": 100_000})
    background = f"trap '' INT; exec {AGENTRL} train run.yaml"
    with started(tmp_path, "/bin/sh", "-c", background) as process:
        read_until(process, "step 1/100000")
        process.send_signal(signal.SIGINT)
        read_until(process, "step 2/100000")
        below = watches(children(process.pid))
        said = ended(process, [signal.SIGTERM])
        gone = all_gone(below, within_s=0)
    assert process.returncode == 143, said
    assert "Ended by SIGTERM; everything this command started has ended. Results so far are in runs/small/." in said
    assert "Traceback" not in said
    assert (len(below), gone) == (2, True)
    summary = json.loads((tmp_path / SUMMARY).read_text())
    assert summary["error"] == "Ended by SIGTERM"
    assert summary["train_steps"] >= 2
    assert summary["checkpoint"] == f"runs/small/checkpoints/step-{summary['train_steps']:06d}"
    assert (tmp_path / summary["checkpoint"] / "trainer.json").is_file()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_an_interrupted_warm_start_says_what_it_has_written(
    tmp_path: Path, checkpoint: Path, number: signal.Signals, status: int
) -> None:
    os.mkfifo(tmp_path / "data.jsonl")
    write_run(tmp_path, checkpoint, sft={"data": "data.jsonl"})
    with started(tmp_path, AGENTRL, "sft", "run.yaml", "student") as process, (tmp_path / "data.jsonl").open("w"):
        wait_until_reading_pipe(process)  # of which nothing comes
        said = ended(process, [number])
    assert process.returncode == status, said
    assert "Nothing was written to student." in said
    assert "Traceback" not in said


def test_an_interrupted_doctor_says_so(tmp_path: Path, checkpoint: Path) -> None:
    write_run(tmp_path, checkpoint)
    (tmp_path / "my_agent.py").write_text(WAITING)
    with started(tmp_path, AGENTRL, "doctor", "run.yaml") as process:
        read_until(process, "model ", stdout=True)  # the next are the trainer and the round trip
        said = ended(process, [signal.SIGINT])
    assert process.returncode == 130, said
    assert "Interrupted; everything this command started has ended. The checks leave nothing behind." in said
    assert "Traceback" not in said
    assert not list((tmp_path / "runs").glob(".doctor*"))


def test_an_interrupted_demo_says_where_its_results_are(tmp_path: Path) -> None:
    with started(tmp_path, sys.executable, "-m", "agentrl_workflows.calculator.demo", "--smoke") as process:
        read_until(process, "warm start", stdout=True)
        said = ended(process, [signal.SIGINT])
    assert process.returncode == 130, said
    assert "Results so far are in runs/smoke/." in said
    assert "Traceback" not in said


def test_an_interrupt_while_the_command_is_still_importing_is_one_message(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run.yaml")  # of which nothing comes, where the import has ended before the interrupt
    command = (sys.executable, "-X", "importtime", "-m", "agentrl", "train", "run.yaml")
    with started(tmp_path, *command) as process:
        read_until(process, "agentrl.config.base")  # the first seconds: what a run file may hold is being imported
        said = ended(process, [signal.SIGINT])
    assert process.returncode == 130, said
    assert "Interrupted; everything" in said
    assert "Traceback" not in said


def test_an_interrupt_inside_an_exec_gives_the_same_status(tmp_path: Path) -> None:
    job = "from agentrl.commands.running import run_command\nrun_command(lambda: exec('raise KeyboardInterrupt'))\n"
    (tmp_path / "job.py").write_text(job)
    command = [sys.executable, "-m", "job"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 130, result.stderr


@pytest.mark.parametrize("module", ["agentrl", "agentrl.commands.main"])
@pytest.mark.usefixtures("starts_truly")
def test_the_command_is_a_module_too(tmp_path: Path, module: str) -> None:
    command = [sys.executable, "-m", module, "train", "none.yaml"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert "agentrl: cannot read the run file none.yaml" in result.stderr


THREADS = """
import asyncio, threading, time

def stuck():
    time.sleep(1000)

async def solve(task, client):
    completion = await client.chat.completions.create(messages=[{"role": "user", "content": task["question"]}])
    if threading.active_count() < 20:
        asyncio.get_running_loop().run_in_executor(None, stuck)
        threading.Thread(target=stuck).start()
    return len(completion.choices[0].message.content) / 100
"""


@pytest.mark.long
def test_a_thread_that_never_returns_keeps_no_command_alive(tmp_path: Path, checkpoint: Path) -> None:
    write_run(tmp_path, checkpoint)
    (tmp_path / "my_agent.py").write_text(THREADS)
    train = agentrl(tmp_path, "train", "run.yaml")
    assert train.returncode == 0, train.stderr
    assert "still run 3 s after the end" in train.stderr
    assert "my_agent.py:5 in stuck: time.sleep(1000)" in train.stderr
    assert json.loads((tmp_path / SUMMARY).read_text())["error"] is None
    evaluated = agentrl(tmp_path, "eval", "run.yaml", "--episodes", "4")
    assert evaluated.returncode == 0, evaluated.stderr
    assert "success_rate" in evaluated.stdout


@pytest.mark.slow
def test_a_thread_that_never_returns_does_not_outlive_sigterm(tmp_path: Path, checkpoint: Path) -> None:
    write_run(tmp_path, checkpoint, engine={"steps": 100_000})
    (tmp_path / "my_agent.py").write_text(THREADS)
    with started(tmp_path, AGENTRL, "train", "run.yaml") as process:
        read_until(process, "step 2/100000")
        said = ended(process, [signal.SIGTERM])
    assert process.returncode == 143, said
    assert "still run 3 s after the end" in said


FORKING = """
import concurrent.futures, multiprocessing

pool = None

async def solve(task, client):
    global pool
    if pool is None:
        pool = concurrent.futures.ProcessPoolExecutor(2, multiprocessing.get_context("fork"))
        pool.submit(abs, -1).result()
    completion = await client.chat.completions.create(messages=[{"role": "user", "content": task["question"]}])
    return len(completion.choices[0].message.content) / 100
"""


@pytest.mark.slow
def test_trainer_and_server_end_with_a_killed_driver_whose_forked_pool_lives_on(tmp_path: Path, checkpoint: Path) -> None:
    write_run(tmp_path, checkpoint, engine={"steps": 100_000})
    (tmp_path / "my_agent.py").write_text(FORKING)
    with started(tmp_path, AGENTRL, "train", "run.yaml") as process:
        read_until(process, "step 1/100000")
        below = children(process.pid)
        ours = [pid for pid, line in child_commands(process.pid).items() if "agentrl." in line]
        gone = watches(ours)
        process.kill()
        ended_by_themselves = all_gone(gone)
        for pid in set(below) - set(ours):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # the pool, which holds the pipes of the others
    assert (len(ours), len(below) > len(ours)) == (2, True)
    assert ended_by_themselves
