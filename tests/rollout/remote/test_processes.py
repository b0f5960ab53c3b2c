"""Workers that are processes: they die, block, and end with their driver."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import anyio
import pytest

from agentrl.errors import RolloutWorkerDied, RunStopped, StallError
from agentrl.processes.base import RESTARTS
from agentrl.rollout.remote.runner import RemoteRunner
from agentrl.support.concurrency import task_group
from agentrl.tokens.renderer import Renderer
from agentrl.types import StopReason, Task, Trajectory, Turn
from tests.rollout.harness import SAMPLING, make_server, says
from tests.support.leftovers import processes_with
from tests.support.processes import until_ended
from tests.support.remote import MODULE, GatedBackend, remote_runner

pytestmark = pytest.mark.starts

PATIENCE_S = 120.0
"""For processes that import, on a busy machine."""


async def play(runner: RemoteRunner, act: str, **fields: object) -> Trajectory:
    def ignore(turn: Turn) -> None:
        pass

    task = Task(id=act, data={"act": act, **fields})
    with anyio.fail_after(PATIENCE_S):
        return await runner.play(task, episode_id="0.0.0", sampling=SAMPLING, on_turn=ignore)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.usefixtures("starts_truly")
async def test_the_death_of_a_worker_is_a_failure_with_its_turns_and_another_one_starts(
    model: Path, renderer: Renderer, tmp_path: Path
) -> None:
    async with (runner := remote_runner("Acts", model, tmp_path, workers=1)).opened(make_server(renderer, says("good"))):
        dead = await play(runner, "die")
        assert dead.failure is not None
        assert (dead.stop_reason, dead.final_reward) == (StopReason.ENVIRONMENT_FAULT, None)
        assert dead.failure.kind == RolloutWorkerDied.__name__
        assert "rollout worker 0 died" in dead.failure.message
        assert "signal SIGKILL" in dead.failure.message
        assert {len(turn.output_ids) for turn in dead.turns} == {5}
        alive = await play(runner, "print")
        assert alive.failure is None
        pid = int(alive.final_reward or 0)
        assert pid != os.getpid()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert "words on standard output" in (tmp_path / "rollout-0.log").read_text()


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_worker_that_is_stopped_is_killed_and_named_and_another_one_plays_on(
    model: Path, renderer: Renderer, tmp_path: Path
) -> None:
    runner = remote_runner("Acts", model, tmp_path, workers=1, lost_s=1.0)
    async with runner.opened(make_server(renderer, says("good"))):
        pid = int((await play(runner, "none")).final_reward or 0)

        def freeze(_: Turn) -> None:
            os.kill(pid, signal.SIGSTOP)

        with anyio.fail_after(PATIENCE_S):
            frozen = await runner.play(
                Task(id="t", data={"act": "wait"}), episode_id="0.0.1", sampling=SAMPLING, on_turn=freeze
            )
        assert frozen.failure is not None
        assert (frozen.stop_reason, len(frozen.turns)) == (StopReason.ENVIRONMENT_FAULT, 1)
        silent = rf"rollout worker 0 died: pid {pid}, had given no sign of life for \d+ s: it was stopped or hung"
        assert re.search(silent, frozen.failure.message)
        assert (await play(runner, "none")).final_reward != pid
    await until_ended(pid)


@pytest.mark.long
async def test_a_worker_that_dies_again_and_again_ends_the_run(model: Path, renderer: Renderer, tmp_path: Path) -> None:
    runner = remote_runner("Acts", model, tmp_path, workers=1)

    async def die_always() -> None:
        async with runner.opened(make_server(renderer, says("good"))):
            for _ in range(RESTARTS + 2):
                await play(runner, "die")

    with pytest.raises(RunStopped, match=rf"(?s)rollout worker 0 died: .*died {RESTARTS + 1} times within an hour"):
        await die_always()


@pytest.mark.long
async def test_code_that_blocks_a_worker_is_named_and_ends_the_run(
    model: Path, renderer: Renderer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runner = remote_runner("Acts", model, tmp_path, workers=1, stall_timeout_s=12.0)
    with caplog.at_level(logging.WARNING):
        async with runner.opened(make_server(renderer, says("good"))):
            with pytest.raises(StallError, match=r"(?s)rollout worker 0: the event loop has not run for 12 s.*remote\.py"):
                await play(runner, "block", seconds=60)
    assert any("rollout worker 0: the event loop has not run for 10 s" in line for line in caplog.messages)


_DRIVER = f"""
import sys, anyio
from pathlib import Path
from agentrl.tokens.renderer import Renderer
from agentrl.types import Task
from tests.rollout.harness import SAMPLING, make_server, says
from tests.support.remote import remote_runner

async def main():
    model, logs = Path(sys.argv[1]), Path(sys.argv[2])
    runner = remote_runner("Acts", model, logs, workers=2)
    async with runner.opened(make_server(Renderer.load(model), says("good"))):
        print("ready", flush=True)
        act = sys.argv[3]
        await runner.play(Task(id="t", data={{"act": act, "seconds": 600}}), episode_id="e", sampling=SAMPLING,
                          on_turn=lambda turn: print("turn", flush=True))

anyio.run(main)
# {MODULE}
"""


@pytest.mark.long
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_thousand_episodes_are_in_flight_over_two_workers(model: Path, renderer: Renderer, tmp_path: Path) -> None:
    backend = GatedBackend(make_server(renderer, says("good")), 1000)
    results: list[Trajectory] = []

    async def play_one(runner: RemoteRunner) -> None:
        results.append(await play(runner, "none"))

    async with (runner := remote_runner("Acts", model, tmp_path)).opened(backend), task_group() as episodes:
        for _ in range(1000):
            episodes.start_soon(play_one, runner)
    assert all(trajectory.failure is None and len(trajectory.turns) == 1 for trajectory in results)
    workers = Counter(trajectory.final_reward for trajectory in results)
    assert sorted(workers.values()) == [500, 500]


@pytest.mark.long
@pytest.mark.parametrize("act", ["wait", "block"])
def test_workers_end_when_their_driver_is_killed(model: Path, tmp_path: Path, act: str) -> None:
    command = [sys.executable, "-c", _DRIVER, str(model), str(tmp_path), act]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        assert [driver.stdout.readline().strip() for _ in range(2)] == ["ready", "turn"]
        children = Path(f"/proc/{driver.pid}/task/{driver.pid}/children").read_text().split()
        driver.send_signal(signal.SIGKILL)
    assert len(children) == 2
    deadline = time.monotonic() + PATIENCE_S
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < deadline, processes_with("agentrl.rollout.remote.process")
        time.sleep(0.05)
