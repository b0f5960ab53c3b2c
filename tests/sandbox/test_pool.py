"""Many programs at a time, the opt-out, and what a run file can say."""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path

import anyio
import pytest
from pydantic import ValidationError

from agentrl.env.faults import watch_metrics
from agentrl_sandbox import Ending, Limits, Program, Result, SandboxConfig, SandboxPool, open_sandbox, python_program
from agentrl_sandbox.base import BoxSandbox
from agentrl_sandbox.unsafe import open_unsafe_process
from tests.support.leftovers import processes_with


@pytest.mark.starts
async def test_a_pool_runs_as_many_at_a_time_as_it_may_and_counts_the_wait(sandbox: BoxSandbox) -> None:
    pool = SandboxPool(sandbox, max_running=2)
    results: list[Result] = []

    async def run() -> None:
        results.append(await pool.run(Program(argv=("sleep", "0.2"))))

    async with anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(run)
    waits = sorted(result.queue_s for result in results)
    assert waits[1] < waits[2] <= waits[3]
    assert all(result.is_success for result in results)


@pytest.mark.starts
async def test_a_cancelled_caller_frees_its_slot(sandbox: BoxSandbox) -> None:
    pool = SandboxPool(sandbox, max_running=1, max_sessions=1)
    for _ in range(2):
        with anyio.move_on_after(0.1) as scope:
            await pool.run(Program(argv=("sleep", "60")))
        assert scope.cancelled_caught
    for _ in range(2):
        async with pool.session(files={"a": b"1"}) as session:
            assert await session.read("a") == b"1"
    assert (await pool.run(Program(argv=("true",)))).is_success


@pytest.mark.starts
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_many_runs_leave_nothing_behind(sandbox: BoxSandbox) -> None:
    pool, token = SandboxPool(sandbox), secrets.token_hex(8)
    source = "import os\nif os.fork() == 0:\n  os.setsid()\n  import time; time.sleep(1000)"
    await pool.run(python_program(source, arguments=(token,)))
    before = len(os.listdir("/proc/self/fd"))
    async with anyio.create_task_group() as tasks:
        for _ in range(60):
            tasks.start_soon(pool.run, python_program(source, arguments=(token,)))
    with anyio.fail_after(300):  # on a busy machine the kernel takes a while to end the last ones
        while len(os.listdir("/proc/self/fd")) > before or processes_with(token):  # noqa: ASYNC110
            await anyio.sleep(0.05)


@pytest.mark.starts
async def test_a_run_file_opens_the_sandbox_that_it_names(sandbox: BoxSandbox) -> None:
    del sandbox
    async with open_sandbox(SandboxConfig(limits=Limits(wall_s=0.2), max_running=1)) as pool:
        assert (pool.name, pool.is_isolated, pool.max_running) == ("bubblewrap", True, 1)
        assert (await pool.run(Program(argv=("sleep", "60")))).ended is Ending.TIMEOUT
    with pytest.raises(ValidationError, match="bubblewrap"):
        SandboxConfig.model_validate({"backend": "none"})


async def test_the_opt_out_says_that_it_is_unsafe_each_time(capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        async with open_sandbox(SandboxConfig(backend="unsafe_process")) as pool:
            assert not pool.is_isolated
    assert capfd.readouterr().err.count("UNSAFE: the sandbox `unsafe_process` isolates nothing") == 2


@pytest.mark.starts
async def test_an_episode_that_used_the_opt_out_has_a_metric_of_it(sandbox: BoxSandbox) -> None:
    unsafe, program = open_unsafe_process(), Program(argv=("true",))
    with watch_metrics() as noted:
        await sandbox.run(program)
        assert noted == {}
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(unsafe.run, program)
    assert noted == {"unsafe_sandbox": 1.0}


@pytest.mark.starts
async def test_the_opt_out_keeps_the_same_contract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    unsafe = open_unsafe_process(limits=Limits(wall_s=60))
    source = "import os, sys; print(open('d/a').read(), sys.stdin.read(), len(os.environ) < 8); sys.exit(3)"
    result = await unsafe.run(python_program(source, files={"d/a": b"x"}, stdin=b"y"))
    assert (result.stdout, result.exit_status) == (b"x y True\n", 3)
    assert (await unsafe.run(Program(argv=("sleep", "60")), Limits(wall_s=0.5))).ended is Ending.TIMEOUT
    assert (await unsafe.run(python_program("import os; os.kill(os.getpid(), 11)"))).signal == 11
    async with unsafe.session(files={"a": b"1"}) as session:
        assert (await session.python("x = open('a').read(); x")).text == "'1'"
        assert (await session.shell("cat a")).text == "1"
        assert (await session.snapshot()).files == {"a": b"1"}
    assert os.listdir(tmp_path) == []
