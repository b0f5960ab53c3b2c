"""Server processes: readiness, early ends, deadlines, and that nothing outlives its block."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from agentrl.errors import ConfigError, ServerTimeout, ServerUnavailable
from agentrl.inference.config import InferenceConfig
from agentrl.inference.launch import pool as launch
from agentrl.inference.launch.process import Recipe, ServerProcess
from agentrl.inference.pool.members import State
from agentrl.processes.base import LocalChild, LocalLauncher, ProcessSpec, read_tail
from agentrl.servers.scripted.server import Fault, ScriptedServer
from tests.support.processes import until_ended
from tests.support.scripted import OFTEN, VOCAB, all_serving, pool_of, publication, seen

READY = 'print(\'{"event":"ready","url":"http://127.0.0.1:9"}\', flush=True)'
WAIT = "import time; time.sleep(60)"


def recipe(tmp_path: Path, *lines: str, ready: tuple[str, ...] = (r'"url": ?"(http[^"]+)"',)) -> Recipe:
    return Recipe(
        command=(sys.executable, "-c", "\n".join(lines)),
        environment={"AGENTRL_TEST": "yes"},
        ready=tuple(re.compile(pattern) for pattern in ready),
        url="http://elsewhere",
        log_path=tmp_path / "logs" / "server-0.log",
    )


def shell_recipe(tmp_path: Path, script: str, ready: tuple[str, ...] = ("never",)) -> Recipe:
    """Return the recipe of a shell, which starts in milliseconds."""
    return replace(recipe(tmp_path, ready=ready), command=("/bin/sh", "-c", script))


class AfterFirstWords(LocalLauncher):
    """Takes as started what has opened the pipe `marker`, so that a short deadline begins after the process has spoken."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    async def start(self, specs: Sequence[ProcessSpec]) -> Sequence[LocalChild]:
        children = await super().start(specs)
        with anyio.fail_after(300):
            await anyio.to_thread.run_sync(self.marker.read_bytes, abandon_on_cancel=True)
        return children


def speaking(tmp_path: Path, script: str, ready: tuple[str, ...]) -> ServerProcess:
    """Return a process that runs `script` and then only sleeps; its start takes it as started when it sleeps."""
    marker = tmp_path / "spoken"
    os.mkfifo(marker)
    return ServerProcess(shell_recipe(tmp_path, f"{script}; : > {marker}; exec sleep 60", ready), AfterFirstWords(marker))


def process_of(recipe: Recipe) -> ServerProcess:
    return ServerProcess(recipe, LocalLauncher())


def log_of(process: ServerProcess) -> str:
    return read_tail(process.recipe.log_path)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.starts
async def test_a_process_is_ready_when_it_says_so(tmp_path: Path) -> None:
    process = process_of(recipe(tmp_path, "import os", "print('loading', os.environ['AGENTRL_TEST'])", READY, WAIT))
    async with anyio.create_task_group() as tasks:
        assert await process.start(tasks, 60) == "http://127.0.0.1:9"
        assert "loading yes" in log_of(process)
        await process.stop()


@pytest.mark.starts
async def test_a_process_is_ready_when_it_has_said_all_of_it_in_any_order(tmp_path: Path) -> None:
    process = speaking(tmp_path, "echo listening", ready=("warm", "listening"))
    async with anyio.create_task_group() as tasks:
        with pytest.raises(ServerTimeout, match=r"(?s)not ready after 1 s; its log ends with:\nlistening"):
            await process.start(tasks, 1)
    process = process_of(
        recipe(tmp_path, "print('listening')", "print('warm', flush=True)", WAIT, ready=("warm", "listening"))
    )
    async with anyio.create_task_group() as tasks:
        assert await process.start(tasks, 60) == "http://elsewhere"
        await process.stop()


@pytest.mark.starts
async def test_output_without_an_end_of_line_is_logged_and_keeps_nothing_waiting(tmp_path: Path) -> None:
    lines = [
        "import sys",
        "sys.stdout.write('x' * 300_000 + 'no end of line here'); sys.stdout.flush()",
        "print()",
        READY,
        WAIT,
    ]
    process = process_of(recipe(tmp_path, *lines))
    async with anyio.create_task_group() as tasks:
        assert await process.start(tasks, 60) == "http://127.0.0.1:9"
        await process.stop()
    assert "no end of line here" in log_of(process)


@pytest.mark.starts
async def test_a_process_that_ends_before_it_is_ready_tells_its_last_lines(tmp_path: Path) -> None:
    process = process_of(recipe(tmp_path, "import sys", "sys.exit('no such model: /models/none')"))
    async with anyio.create_task_group() as tasks:
        with pytest.raises(ServerUnavailable, match=r"(?s)server-0 .*ended with exit code 1.*no such model: /models/none"):
            await process.start(tasks, 60)


@pytest.mark.starts
async def test_a_process_that_is_never_ready_is_ended_at_the_deadline(tmp_path: Path) -> None:
    process = speaking(tmp_path, "echo $$ >&2", ready=("never",))
    async with anyio.create_task_group() as tasks:
        with pytest.raises(ServerTimeout, match="not ready after 1 s"):
            await process.start(tasks, 1)
    assert not alive(int(log_of(process)))


@pytest.mark.starts
async def test_a_cancelled_start_ends_the_process(tmp_path: Path) -> None:
    pid, pipe = 0, tmp_path / "pipe"
    os.mkfifo(pipe)
    process = process_of(shell_recipe(tmp_path, f"echo $$ > {pipe}; exec sleep 60"))
    async with anyio.create_task_group() as tasks, anyio.create_task_group() as starting:
        starting.start_soon(process.start, tasks, 60)
        pid = int(await anyio.Path(pipe).read_text())
        starting.cancel_scope.cancel()
    assert pid
    assert not alive(pid)


@pytest.mark.starts
async def test_a_command_that_does_not_exist_says_so(tmp_path: Path) -> None:
    missing = Recipe(
        command=("/nowhere/python",), environment={}, ready=(re.compile("x"),), url="", log_path=tmp_path / "server-0.log"
    )
    async with anyio.create_task_group() as tasks:
        with pytest.raises(ServerUnavailable, match="cannot start /nowhere/python"):
            await process_of(missing).start(tasks, 60)


@pytest.mark.starts
async def test_the_end_of_a_process_is_told_with_its_cause(tmp_path: Path) -> None:
    lines = ["import os, signal, sys", READY, "print('out of memory', file=sys.stderr, flush=True)"]
    process = process_of(recipe(tmp_path, *lines, "os.kill(os.getpid(), signal.SIGKILL)"))
    async with anyio.create_task_group() as tasks:
        await process.start(tasks, 60)
        with anyio.fail_after(300):
            assert re.search(r"(?s)ended with signal SIGKILL; .*out of memory", await process.ended())
        await process.stop()


@pytest.mark.starts
@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # three seconds of patience
async def test_a_process_that_ignores_sigterm_is_killed_with_its_children(tmp_path: Path) -> None:
    lines = [
        "import os, signal, sys, time",
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)",
        "child = os.fork()",
        "if child: print(os.getpid(), child, file=sys.stderr, flush=True); " + READY,
        "time.sleep(600)",
    ]
    process = process_of(recipe(tmp_path, *lines))
    async with anyio.create_task_group() as tasks:
        await process.start(tasks, 60)
        await process.stop()
    numbers = re.search(r"^(\d+) (\d+)$", log_of(process), re.MULTILINE)
    assert numbers is not None
    parent, child = int(numbers[1]), int(numbers[2])
    assert not alive(parent)
    await until_ended(child)


@pytest.mark.starts
async def test_the_log_of_a_server_on_one_pipe_is_kept(tmp_path: Path) -> None:
    process = process_of(recipe(tmp_path, "print('first')", READY, "print('after', flush=True)", WAIT))
    async with anyio.create_task_group() as tasks:
        await process.start(tasks, 60)
        with anyio.fail_after(300):
            while "after" not in log_of(process):  # noqa: ASYNC110 - a file is observed
                await anyio.sleep(0.01)
        await process.stop()
    assert "first" in log_of(process)


def test_the_key_comes_from_the_environment_and_its_lack_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    config = InferenceConfig(api_key_env="AGENTRL_TEST_KEY")
    monkeypatch.delenv("AGENTRL_TEST_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"inference.api_key_env: the environment variable AGENTRL_TEST_KEY is not set"):
        launch.api_key(config)
    monkeypatch.setenv("AGENTRL_TEST_KEY", "secret")
    assert launch.api_key(config) == "secret"
    assert launch.api_key(InferenceConfig()) is None


SERVER = """
import json, socket, time
with socket.create_server(("127.0.0.1", PORT)):
    print(json.dumps({"event": "ready", "url": "http://127.0.0.1:PORT"}), flush=True)
    time.sleep(60)
"""


@pytest.mark.starts
async def test_a_server_whose_port_was_taken_is_started_on_another(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, launch.PortReserve("127.0.0.1") as free:
        ports = iter([other.getsockname()[1], free.take()])
        async with anyio.create_task_group() as tasks:
            launched = await launch.start_server(
                lambda port: recipe(tmp_path, SERVER.replace("PORT", str(port))),
                lambda: next(ports),
                tasks,
                60,
                LocalLauncher(),
            )
            with socket.create_connection(("127.0.0.1", int(launched.url.rpartition(":")[2])), timeout=5):
                pass
            await launched.process.stop()


@pytest.mark.starts
async def test_a_server_that_finds_every_port_taken_says_so(tmp_path: Path) -> None:
    tried: list[int] = []

    def build(port: int) -> Recipe:
        tried.append(port)
        return recipe(tmp_path, SERVER.replace("PORT", str(port)))

    with socket.create_server(("127.0.0.1", 0)) as other:
        async with anyio.create_task_group() as tasks:
            with pytest.raises(ServerUnavailable, match="Address already in use"):
                await launch.start_server(build, lambda: int(other.getsockname()[1]), tasks, 60, LocalLauncher())
    assert len(tried) == launch.MAX_PORTS


@pytest.mark.starts
async def test_a_server_that_fails_for_another_reason_is_not_tried_on_another_port(tmp_path: Path) -> None:
    ports = iter([1, 2])
    async with anyio.create_task_group() as tasks:
        with pytest.raises(ServerUnavailable, match="out of memory"):
            await launch.start_server(
                lambda _port: recipe(tmp_path, "import sys", "sys.exit('out of memory')"),
                lambda: next(ports),
                tasks,
                60,
                LocalLauncher(),
            )
    assert next(ports) == 2


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_reserved_port_is_given_to_nobody_else_and_open_to_its_server(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with launch.PortReserve(host) as ports:
        taken = {ports.take() for _ in range(50)}
        assert len(taken) == 50
        for port in list(taken)[:3]:
            with (
                socket.create_server((host, port), family=family) as server,
                socket.create_connection((host, port), timeout=5) as client,
            ):
                server.accept()[0].close()
                assert client.recv(1) == b""


def test_a_host_of_another_machine_is_a_config_error() -> None:
    with (
        launch.PortReserve("192.0.2.1") as ports,
        pytest.raises(ConfigError, match=r"inference.host: cannot listen on 192.0.2.1"),
    ):
        ports.take()


def counting(folder: Path) -> tuple[Path, list[str]]:
    """Return a file that holds how often a process was started and its id, and the lines that write it."""
    count = folder / "count"
    return count, [
        "import os, pathlib, sys",
        f"count = pathlib.Path({str(count)!r})",
        "number = int(count.read_text().split()[0]) + 1 if count.exists() else 1",
        "count.write_text(f'{number} {os.getpid()}')",
    ]


@pytest.mark.starts
@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # ending a stopped process takes its time
async def test_a_process_whose_server_gives_no_answer_is_killed_and_started_again(
    tmp_path: Path, anyio_backend: str
) -> None:
    count, counted = counting(tmp_path)
    process = process_of(recipe(tmp_path, *counted, READY, "sys.stdin.read()"))
    only = ScriptedServer(lambda _: [1], vocab_size=VOCAB, url="scripted://0", timeout_s=60)
    async with anyio.create_task_group() as tasks, pool_of(only, **OFTEN) as pool:
        await process.start(tasks, 60)
        tasks.start_soon(launch.supervise, process, "scripted://0", pool, tasks, InferenceConfig())
        os.kill(int(count.read_text().split()[1]), signal.SIGSTOP)
        only.control_faults["check"] = only.control_faults["connect"] = Fault.HANG
        await seen(pool, lambda status: status.servers[0].state is State.STARTING)
        assert "gave no answer for 0.4 s" in pool.describe().servers[0].reason
        await seen(pool, lambda status: count.read_text().startswith("2 "))
        only.control_faults.clear()
        await all_serving(pool)
        tasks.cancel_scope.cancel()
    await process.stop()


@pytest.mark.starts
async def test_a_process_whose_server_was_taken_out_is_started_again_until_that_has_happened_too_often(
    tmp_path: Path,
) -> None:
    count, counted = counting(tmp_path)
    process = process_of(recipe(tmp_path, *counted, READY, "sys.stdin.read()"))
    right, wrong = (ScriptedServer(lambda _: [1], vocab_size=VOCAB, url=f"scripted://{number}") for number in range(2))
    async with anyio.create_task_group() as tasks, pool_of(right, wrong, **OFTEN) as pool:
        await pool.update_weights(publication(1))
        await process.start(tasks, 60)
        tasks.start_soon(launch.supervise, process, "scripted://1", pool, tasks, InferenceConfig())
        for started in range(2, launch.MAX_RESTARTS + 2):
            wrong.revive(version=0)  # what the new process has
            pool.take_out("scripted://1", "its log-probs are wrong")
            await seen(pool, lambda _, started=started: count.read_text().startswith(f"{started} "))
            await all_serving(pool)
            assert wrong.version == 1
        pool.take_out("scripted://1", "its log-probs are wrong")
        await seen(pool, lambda status: "started again 3 times within 3600 s" in status.servers[1].reason)
        assert pool.describe().servers[1].state is State.WRONG
        assert pool.serving == ("scripted://0",)
        tasks.cancel_scope.cancel()
    await process.stop()


async def test_a_server_that_is_taken_out_before_its_launcher_reports_the_start_is_noticed() -> None:
    only = ScriptedServer(lambda _: [1], vocab_size=VOCAB, url="scripted://0")
    async with pool_of(only, **OFTEN) as pool:
        pool.report_dead("scripted://0", "its process ended", starting=True)
        await all_serving(pool)
        pool.take_out("scripted://0", "its log-probs are wrong")
        pool.report_started("scripted://0")
        with anyio.fail_after(300):
            assert await pool.until_taken_out("scripted://0") == "its log-probs are wrong"


@pytest.mark.starts
async def test_restarts_are_counted_within_a_window_of_time(tmp_path: Path) -> None:
    count, counted = counting(tmp_path)
    process = process_of(recipe(tmp_path, *counted, READY, "sys.stdin.read()"))
    only = ScriptedServer(lambda _: [1], vocab_size=VOCAB, url="scripted://0")
    supervise = partial(launch.supervise, window_s=0.0)
    async with anyio.create_task_group() as tasks, pool_of(only, **OFTEN) as pool:
        await process.start(tasks, 60)
        tasks.start_soon(supervise, process, "scripted://0", pool, tasks, InferenceConfig())
        for started in range(2, launch.MAX_RESTARTS + 3):
            os.kill(int(count.read_text().split()[1]), signal.SIGKILL)
            await seen(pool, lambda _, started=started: count.read_text().startswith(f"{started} "))
            await all_serving(pool)
        tasks.cancel_scope.cancel()
    await process.stop()


@pytest.mark.starts
async def test_a_start_that_fails_counts_as_one_and_is_tried_again(tmp_path: Path) -> None:
    count, counted = counting(tmp_path)
    counted.append("sys.exit('no memory') if number == 2 else None")
    process = process_of(recipe(tmp_path, *counted, READY, "sys.stdin.read()"))
    config = InferenceConfig()
    only = ScriptedServer(lambda _: [1], vocab_size=VOCAB, url="scripted://0")
    async with anyio.create_task_group() as tasks, pool_of(only, **OFTEN) as pool:
        await process.start(tasks, 60)
        tasks.start_soon(launch.supervise, process, "scripted://0", pool, tasks, config)
        for started, state in ((3, State.STARTING), (4, State.STARTING), (4, State.DEAD)):
            only.die()
            os.kill(int(count.read_text().split()[1]), signal.SIGKILL)
            await seen(pool, lambda status, state=state: status.servers[0].state is state)
            await seen(pool, lambda status, started=started: count.read_text().startswith(f"{started} "))
            if state is State.STARTING:
                only.revive()
                await all_serving(pool)
        why = "started again 3 times within 3600 s, so it stays out for good"
        await seen(pool, lambda status: why in status.servers[0].reason)  # a health check may have found it dead before
