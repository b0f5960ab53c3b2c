"""A sandbox behind HTTP: the same results, and an end to what a client that has gone started."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator

import aiohttp
import anyio
import pytest
from pydantic import ValidationError

from agentrl.errors import ConfigError, EnvironmentFault
from agentrl_sandbox import SandboxConfig, open_sandbox, open_warm_python
from agentrl_sandbox.base import BoxSandbox
from agentrl_sandbox.remote import open_remote
from agentrl_sandbox.session import diff_snapshots
from agentrl_sandbox.types import Ending, Limits, Program, python_program
from tests.support.hosts import serving_sandbox
from tests.support.leftovers import processes_with
from tests.support.ports import later_port

PATIENT = Limits(wall_s=60)
"""Of programs that end by themselves, however busy the machine is."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # aiohttp knows no other


@pytest.fixture
async def url(sandbox: BoxSandbox) -> AsyncGenerator[str]:
    async with serving_sandbox(sandbox, api_key="key") as address:
        yield address


async def until_gone(token: str) -> None:
    """Wait until the server has ended what a client left; it notices that by itself, and tells none."""
    with anyio.fail_after(300):
        while processes_with(token):  # noqa: ASYNC110 - nothing of ours happens when another process ends
            await anyio.sleep(0.02)


@pytest.mark.starts
async def test_warm_programs_run_on_the_other_machine_and_nothing_else_does_beside_them(url: str) -> None:
    async with open_remote(url, api_key="key", limits=PATIENT) as remote:
        async with open_warm_python(remote, sessions=1) as warm:
            assert (await warm.run(python_program("print(input())", stdin=b"in"))).text == "in"
        async with remote.forks() as session:
            with pytest.raises(EnvironmentFault, match="expected the request fork, got 'python'"):
                await session.python("1")


@pytest.mark.starts
async def test_a_program_runs_as_it_does_here(url: str) -> None:
    async with open_remote(url, api_key="key", limits=PATIENT) as remote:
        assert (remote.name, remote.is_isolated) == ("remote bubblewrap", True)
        source = "import os, sys; print(open('d/a').read(), sys.stdin.read(), os.environ['M']); sys.exit(3)"
        program = python_program(source, files={"d/a": b"x"}, stdin=b"y", environment={"M": "z"})
        result = await remote.run(program)
        assert (result.stdout, result.exit_status, result.ended) == (b"x y z\n", 3, Ending.EXITED)
        late = await remote.run(Program(argv=("sleep", "60")), Limits(wall_s=0.1))
        assert late.ended is Ending.TIMEOUT
        assert (await remote.run(python_program("import os; os.kill(os.getpid(), 11)"))).signal == 11


BACKGROUND = "mkfifo begun; sh -c 'echo > begun; sleep 1000; true' %s & cat begun"
GREEDY = """
import os, time
for _ in range(6):
    if os.fork() == 0:
        kept = b"x" * (50 << 20)
        time.sleep(60)
time.sleep(60)
"""


@pytest.mark.starts
async def test_a_session_works_as_it_does_here(url: str) -> None:
    limits = Limits(memory_mb=160, wall_s=60)
    async with open_remote(url, api_key="key") as remote, remote.session(files={"a": b"1"}, limits=limits) as session:
        assert (await session.python("x = open('a').read(); x")).text == "'1'"
        before = await session.snapshot()
        await session.shell("echo 2 > b")
        assert diff_snapshots(before, await session.snapshot(since=before)).added == ("b",)
        with pytest.raises(FileNotFoundError):
            await session.read("c")
        assert (await session.python(GREEDY)).ended is Ending.MEMORY
        assert (await session.shell("true")).ended is Ending.MEMORY


@pytest.mark.starts
async def test_what_a_gone_client_started_is_ended(url: str) -> None:
    token = secrets.token_hex(8)
    async with open_remote(url, api_key="key", limits=PATIENT) as remote:
        with anyio.move_on_after(0.3):
            await remote.run(Program(argv=("sh", "-c", "sleep 1000; true", token)), Limits(wall_s=900))
        await until_gone(token)
        async with remote.session() as session:
            await session.shell(BACKGROUND % token)
        await until_gone(token)
        async with remote.session() as session:
            with anyio.move_on_after(0.3):
                await session.shell(f"sh -c 'sleep 1000; true' {token}", timeout_s=900)
            assert (await session.shell("true")).state_lost
        await until_gone(token)


@pytest.mark.starts
async def test_an_idle_session_ends(sandbox: BoxSandbox) -> None:
    token = secrets.token_hex(8)
    async with (
        serving_sandbox(sandbox, api_key="key", idle_s=4.0) as url,  # its first call comes long before
        open_remote(url, api_key="key", limits=PATIENT) as remote,
        remote.session() as session,
    ):
        await session.shell(BACKGROUND % token)
        await until_gone(token)
        with pytest.raises(EnvironmentFault, match="answered 404: there is no such session"):
            await session.shell("true")


@pytest.mark.starts
async def test_every_route_asks_for_the_key(url: str) -> None:
    routes = [
        ("GET", "/state"),
        ("POST", "/state"),
        ("POST", "/run"),
        ("POST", "/sessions"),
        ("POST", "/sessions/x"),
        ("GET", "/sessions/x/port"),
        ("DELETE", "/sessions/x"),
        ("POST", "/benches"),
        *(("POST", f"/benches/x/{name}") for name in ("add", "keep", "changed", "read", "snapshot", "restore", "sessions")),
        ("DELETE", "/benches/x"),
    ]
    async with aiohttp.ClientSession() as http:
        for method, path in routes:
            for headers in ({}, {"Authorization": "Bearer wrong"}):
                async with http.request(method, url + path, headers=headers) as response:
                    assert response.status == 401
    with pytest.raises(ConfigError, match="answered 401"):
        async with open_remote(url):
            pass


@pytest.mark.starts
@pytest.mark.parametrize(
    "body",
    [
        "",
        "[]",
        '{"argv": []}',
        '{"argv": ["a"], "files": {"../x": ""}}',
        '{"argv": ["a"], "files": {"x": "%"}}',
        '{"argv": ["a"], "limits": {"wall_s": -1}}',
        '{"argv": ["a"], "limits": {"nothing": 1}}',
        '{"argv": ["a"], "more": 1}',
    ],
)
async def test_a_bad_request_is_refused(url: str, body: str) -> None:
    headers = {"Authorization": "Bearer key"}
    async with aiohttp.ClientSession(headers=headers) as http, http.post(url + "/run", data=body) as response:
        assert response.status == 400
        assert "error" in await response.json()


@pytest.mark.starts
async def test_a_server_that_is_not_there_is_a_fault(sandbox: BoxSandbox) -> None:
    with pytest.raises(ConfigError, match="start one with `agentrl sandbox-host`"):
        async with open_remote(f"http://127.0.0.1:{later_port()}"):
            pass
    with pytest.raises(ConfigError, match="can be reached from other machines"):
        async with serving_sandbox(sandbox, host="0.0.0.0"):
            pass


@pytest.mark.starts
async def test_the_server_runs_as_a_program_that_a_run_file_names(
    sandbox: BoxSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    del sandbox
    monkeypatch.setenv("SANDBOX_KEY", "secret")
    command = [sys.executable, "-m", "agentrl_sandbox.hosts.sandbox_server", "--api-key-env", "SANDBOX_KEY"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=dict(os.environ)) as server:  # noqa: ASYNC220
        try:
            assert server.stdout is not None
            ready = json.loads(await anyio.to_thread.run_sync(server.stdout.readline))
            config = SandboxConfig(backend="remote", url=ready["url"], api_key_env="SANDBOX_KEY", limits=PATIENT)
            async with open_sandbox(config) as pool:
                assert (await pool.run(python_program("print(6 * 7)"))).text == "42"
            server.send_signal(signal.SIGTERM)
            with anyio.fail_after(300):
                assert await anyio.to_thread.run_sync(server.wait, abandon_on_cancel=True) == 0
        finally:
            server.kill()


def test_a_run_file_names_an_address_with_the_remote_backend_alone() -> None:
    with pytest.raises(ValidationError, match=r"sandbox\.url"):
        SandboxConfig(backend="remote")
    with pytest.raises(ValidationError, match=r"sandbox\.url"):
        SandboxConfig(url="http://127.0.0.1:1")
