"""Server processes: readiness, early ends, deadlines, and that nothing outlives its block."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

import anyio
import pytest

from agentrl.errors import ConfigError, ServerTimeout, ServerUnavailable
from agentrl.inference import launch
from agentrl.inference.config import InferenceConfig
from agentrl.inference.process import Recipe, ServerProcess

READY = 'print(\'{"event":"ready","url":"http://127.0.0.1:9"}\', flush=True)'
WAIT = "import time; time.sleep(60)"


def recipe(tmp_path: Path, *lines: str, logs_on_stdout: bool = False) -> Recipe:
    return Recipe(
        command=(sys.executable, "-c", "\n".join(lines)),
        environment={"AGENTRL_TEST": "yes"},
        ready=re.compile(r'"url": ?"(http[^"]+)"'),
        url="http://elsewhere",
        log_path=tmp_path / "logs" / "server-0.log",
        logs_on_stdout=logs_on_stdout,
    )


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_process_is_ready_when_it_says_so(tmp_path: Path) -> None:
    process = ServerProcess(recipe(tmp_path, "import os", "print('loading', os.environ['AGENTRL_TEST'])", READY, WAIT))
    async with anyio.create_task_group() as tasks:
        assert await process.start(tasks, 10) == "http://127.0.0.1:9"
        assert "loading yes" in process.last_lines()
        await process.stop()


async def test_a_process_that_ends_before_it_is_ready_tells_its_last_lines(tmp_path: Path) -> None:
    process = ServerProcess(recipe(tmp_path, "import sys", "sys.exit('no such model: /models/none')"))
    async with anyio.create_task_group() as tasks:
        with pytest.raises(ServerUnavailable, match=r"(?s)server-0 .*ended with exit code 1.*no such model: /models/none"):
            await process.start(tasks, 10)


async def test_a_process_that_is_never_ready_is_ended_at_the_deadline(tmp_path: Path) -> None:
    process = ServerProcess(
        recipe(tmp_path, "import os, sys, time", "print(os.getpid(), file=sys.stderr, flush=True)", WAIT)
    )
    async with anyio.create_task_group() as tasks:
        with pytest.raises(ServerTimeout, match="not ready after 1 s"):
            await process.start(tasks, 1)
    assert not alive(int(process.last_lines()))


async def test_a_cancelled_start_ends_the_process(tmp_path: Path) -> None:
    process = ServerProcess(recipe(tmp_path, "import os, sys", "print(os.getpid(), file=sys.stderr, flush=True)", WAIT))
    async with anyio.create_task_group() as tasks:
        with anyio.move_on_after(1):
            await process.start(tasks, 60)
    assert not alive(int(process.last_lines()))


async def test_a_command_that_does_not_exist_says_so(tmp_path: Path) -> None:
    missing = Recipe(
        command=("/nowhere/python",), environment={}, ready=re.compile("x"), url="", log_path=tmp_path / "server-0.log"
    )
    async with anyio.create_task_group() as tasks:
        with pytest.raises(ServerUnavailable, match="cannot start /nowhere/python"):
            await ServerProcess(missing).start(tasks, 10)


async def test_the_end_of_a_process_is_told_with_its_cause(tmp_path: Path) -> None:
    lines = ["import os, signal, sys", READY, "print('out of memory', file=sys.stderr, flush=True)"]
    process = ServerProcess(recipe(tmp_path, *lines, "os.kill(os.getpid(), signal.SIGKILL)"))
    async with anyio.create_task_group() as tasks:
        await process.start(tasks, 10)
        with anyio.fail_after(10):
            assert re.search(r"(?s)ended with signal SIGKILL; .*out of memory", await process.ended())
        await process.stop()


async def test_a_process_that_ignores_sigterm_is_killed_with_its_children(tmp_path: Path) -> None:
    lines = [
        "import os, signal, sys, time",
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)",
        "child = os.fork()",
        "if child: print(os.getpid(), child, file=sys.stderr, flush=True); " + READY,
        "time.sleep(60)",
    ]
    process = ServerProcess(recipe(tmp_path, *lines))
    async with anyio.create_task_group() as tasks:
        await process.start(tasks, 10)
        began = time.monotonic()
        await process.stop()
        assert time.monotonic() - began < 5
    numbers = re.search(r"^(\d+) (\d+)$", process.last_lines(), re.MULTILINE)
    assert numbers is not None
    parent, child = int(numbers[1]), int(numbers[2])
    assert not alive(parent)
    with anyio.fail_after(5):
        while alive(child):  # noqa: ASYNC110 - another process's end cannot be awaited; the orphan is reaped elsewhere
            await anyio.sleep(0.01)


async def test_the_log_of_a_server_on_one_pipe_is_kept(tmp_path: Path) -> None:
    process = ServerProcess(
        recipe(tmp_path, "print('first')", READY, "print('after', flush=True)", WAIT, logs_on_stdout=True)
    )
    async with anyio.create_task_group() as tasks:
        await process.start(tasks, 10)
        with anyio.fail_after(5):
            while "after" not in process.last_lines():  # noqa: ASYNC110 - a file is observed
                await anyio.sleep(0.01)
        await process.stop()
    assert "first" in process.last_lines()


def test_the_key_comes_from_the_environment_and_its_lack_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    config = InferenceConfig(api_key_env="AGENTRL_TEST_KEY")
    monkeypatch.delenv("AGENTRL_TEST_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"inference.api_key_env: the environment variable AGENTRL_TEST_KEY is not set"):
        launch.api_key(config)
    monkeypatch.setenv("AGENTRL_TEST_KEY", "secret")
    assert launch.api_key(config) == "secret"
    assert launch.api_key(InferenceConfig()) is None


async def test_sglang_without_its_python_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"inference.sglang_python"):
        async with launch.launch_pool(InferenceConfig(backend="sglang"), model_path="m", vocab_size=9, log_dir=tmp_path):
            pass
