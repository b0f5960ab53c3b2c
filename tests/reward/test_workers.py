"""A grading function runs in a worker process with hard limits; what the worker does wrong is the infrastructure's fault."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
import pytest

from agentrl.env import watch_faults
from agentrl.errors import ConfigError, EnvironmentFault
from agentrl_rewards.workers import GraderLimits, GraderPool

LOADER = "tests.support.graders:load_obedient"
PATIENCE_S = 60


@asynccontextmanager
async def pool(num_workers: int = 1, **limits: float) -> AsyncGenerator[GraderPool]:
    async with GraderPool(LOADER, num_workers=num_workers, limits=GraderLimits.model_validate(limits)) as graders:
        with anyio.fail_after(PATIENCE_S):
            yield graders


def has_ended(pidfd: int) -> bool:
    """Wait for a process to end."""
    try:
        return bool(select.select([pidfd], [], [], PATIENCE_S)[0])
    finally:
        os.close(pidfd)


@pytest.mark.starts
async def test_a_job_returns_the_functions_value_and_the_worker_is_kept() -> None:
    async with pool() as graders:
        assert (await graders.call("echo", [1, "ä", None])).value == [1, "ä", None]
        assert (await graders.call("pid")).value == (await graders.call("pid")).value


@pytest.mark.starts
async def test_what_a_grading_function_prints_is_no_reply() -> None:
    async with pool() as graders:
        assert (await graders.call("print")).value == "true"


@pytest.mark.starts
@pytest.mark.parametrize("where", ["in Python", "in C"])
async def test_a_job_that_spends_its_cpu_time_ends_with_that_limit(where: str) -> None:
    async with pool(cpu_s=0.2) as graders:
        assert (await graders.call("spin", where)).limit == "cpu"
        assert (await graders.call("echo", 1)).value == 1


@pytest.mark.starts
async def test_a_job_that_spends_the_memory_ends_with_that_limit_and_its_worker_is_replaced() -> None:
    async with pool() as graders:
        before = (await graders.call("pid")).value
        assert (await graders.call("fill")).limit == "memory"
        assert (await graders.call("pid")).value != before


@pytest.mark.starts
@pytest.mark.parametrize(
    ("deed", "message"),
    [
        ("raise", "KeyError: 'x'"),
        ("exit", "SystemExit: 0"),
        ("object", "not JSON serializable"),
        ("die", "died with status 3: last words; tried 2 times"),
        ("talk", "more than 1048576 bytes; return less; tried 2 times"),
    ],
)
async def test_a_grader_that_raises_or_dies_is_a_fault_and_not_a_grade(deed: str, message: str) -> None:
    async with pool() as graders:
        with watch_faults() as faults, pytest.raises(EnvironmentFault, match=message):
            await graders.call(deed, "x")
        assert list(faults) == [f"grader {LOADER}"]
        assert (await graders.call("echo", 1)).value == 1


@pytest.mark.starts
async def test_a_worker_that_hangs_is_a_fault() -> None:
    async with pool(wall_s=0.3) as graders:
        with pytest.raises(EnvironmentFault, match=r"has not answered within 0\.3 s.*tried 2 times"):
            await graders.call("hang")


@pytest.mark.starts
async def test_a_worker_that_dies_once_is_replaced_and_the_job_is_done(tmp_path: Path) -> None:
    async with pool() as graders:
        assert (await graders.call("die once", str(tmp_path / "marker"))).value == "the second time"


@pytest.mark.starts
async def test_workers_that_died_while_they_were_idle_fail_no_job() -> None:
    async with pool(num_workers=3) as graders:
        pids: set[int] = set()

        async def remember() -> None:
            await graders.call("sleep", 0.1)
            pids.add(int(str((await graders.call("pid")).value)))

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(remember)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert (await graders.call("echo", 1)).value == 1


@pytest.mark.starts
async def test_a_worker_that_cannot_start_is_a_fault_with_its_last_words() -> None:
    async with GraderPool("tests.support.graders:load_nothing") as graders:
        with pytest.raises(EnvironmentFault, match=r"(?s)while it started: .*ImportError: no such library"):
            await graders.call("echo")


def test_a_loader_that_names_no_module_is_refused_at_once() -> None:
    for loader in ("nowhere:load", "tests.support.graders", "tests.support.nowhere:load"):
        with pytest.raises(ConfigError, match="module:name"):
            GraderPool(loader)


@pytest.mark.starts
async def test_the_event_loop_runs_on_while_a_job_runs(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    async with pool() as graders, anyio.create_task_group() as tasks:

        async def check() -> None:
            assert (await graders.call("read", str(pipe))).value == "from the event loop"

        tasks.start_soon(check)
        await anyio.Path(pipe).write_text("from the event loop")


@pytest.mark.starts
async def test_waiting_for_a_free_worker_is_not_time_of_the_job() -> None:
    async with pool(wall_s=1.5) as graders, anyio.create_task_group() as tasks:

        async def check() -> None:
            assert (await graders.call("sleep", 0.05)).value == "slept"

        for _ in range(36):
            tasks.start_soon(check)


@pytest.mark.starts
async def test_a_worker_holds_no_descriptor_and_no_variable_that_it_should_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_KEY", "canary")
    secret = tmp_path / "secret"
    secret.touch()
    with secret.open() as file:
        os.set_inheritable(file.fileno(), True)
        async with pool() as graders:
            found = (await graders.call("descriptors")).value
            assert isinstance(found, list)
            assert str(secret) not in found
            assert (
                len(found) == 4 + 7
            )  # nothing as stdin, stderr twice, jobs, replies, the parent's end, and the listing itself
            names = (await graders.call("environment")).value
            assert isinstance(names, list)
            assert set(names) <= {"PATH", "PYTHONPATH", "PYTHONHASHSEED", "PYTHONUTF8", "OMP_NUM_THREADS", "LC_CTYPE"}


@pytest.mark.starts
async def test_a_cancelled_job_ends_its_worker(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    workers: list[int] = []
    async with pool() as graders, anyio.create_task_group() as tasks:
        tasks.start_soon(partial(graders.call, "announce and hang", str(pipe)))
        workers.append(os.pidfd_open(int(await anyio.Path(pipe).read_text())))
        tasks.cancel_scope.cancel()
    assert has_ended(workers[0])


@pytest.mark.starts
def test_a_worker_dies_with_a_parent_that_is_killed_while_a_job_hangs(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    code = f"import anyio\nfrom agentrl_rewards.workers import GraderPool\nanyio.run(GraderPool({LOADER!r}).call, "
    command = [sys.executable, "-c", f"{code}'announce and hang', {str(pipe)!r})"]
    path = os.pathsep.join(sys.path)
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}) as parent:
        pidfd = os.pidfd_open(int(pipe.read_text()))
        parent.kill()
    assert has_ended(pidfd)
