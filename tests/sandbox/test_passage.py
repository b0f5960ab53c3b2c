"""The way out of a box: programs reach one port of this machine, and nothing else."""

from __future__ import annotations

import socket

import anyio
import pytest

from agentrl.errors import ConfigError
from agentrl_sandbox.base import BoxSandbox
from agentrl_sandbox.docker import Docker, DockerStarter
from agentrl_sandbox.passage import MAX_CARRIED
from agentrl_sandbox.types import Limits, Program
from tests.support.echo import ASK, echo

DEADLINE_S = 300


@pytest.mark.starts
async def test_programs_reach_the_port_and_no_other_and_so_does_their_shell(sandbox: BoxSandbox) -> None:
    with anyio.fail_after(DEADLINE_S), socket.create_server(("127.0.0.1", 0)) as other:
        async with echo() as served, sandbox.session(port=served.port) as session:
            said = await session.python(f"{ASK}\nassert ask({served.port}, b'x' * 3_000_000) == b'x' * 3_000_000")
            assert said.is_success, said.text
            elsewhere = await session.python(f"ask({other.getsockname()[1]}, b'hi')")
            assert "ConnectionRefusedError" in elsewhere.text
            shell = await session.shell(f"exec 5<>/dev/tcp/127.0.0.1/{served.port}; echo hello >&5; head -1 <&5")
            assert shell.text == "hello"
            assert not (await session.shell(": <>/dev/tcp/192.0.2.1/53")).is_success
            seen = await session.run(Program(argv=("ls", "/proc/self/fd")))
            assert seen.text.split() == ["0", "1", "2", "3"]  # the last one is that of ls
            async with sandbox.session() as stranger:
                assert "ConnectionRefusedError" in (await stranger.python(f"{ASK}\nask({served.port}, b'hi')")).text


@pytest.mark.starts
async def test_a_flood_of_connections_waits_and_ends_with_the_box(sandbox: BoxSandbox) -> None:
    flood = """
kept = []
for _ in range(200):
    made = socket.socket()
    made.setblocking(False)
    made.connect_ex(("127.0.0.1", int(PORT)))
    kept.append(made)
"""
    with anyio.fail_after(DEADLINE_S):
        async with echo() as served:
            async with sandbox.session(port=served.port) as session:
                assert (await session.python(ASK + flood.replace("PORT", str(served.port)))).is_success
                while len(served.connected) < MAX_CARRIED:  # noqa: ASYNC110 - the server tells nobody
                    await anyio.sleep(0.01)
                assert len(served.connected) == MAX_CARRIED
            while served.connected:  # noqa: ASYNC110
                await anyio.sleep(0.01)


@pytest.mark.starts
async def test_connections_that_are_reset_at_once_harm_no_other(sandbox: BoxSandbox) -> None:
    resets = """
import struct
for _ in range(300):
    with socket.create_connection(("127.0.0.1", PORT)) as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
assert ask(PORT, b"hi") == b"hi"
"""
    with anyio.fail_after(DEADLINE_S):
        async with echo() as served, sandbox.session(port=served.port) as session:
            said = await session.python(ASK + resets.replace("PORT", str(served.port)))
            assert said.is_success, said.text


@pytest.mark.starts
async def test_a_cancelled_session_closes_its_way(sandbox: BoxSandbox) -> None:
    with anyio.fail_after(DEADLINE_S):
        async with echo() as served:
            with anyio.CancelScope() as scope:
                async with sandbox.session(port=served.port) as session:
                    await session.python(f"{ASK}\nkept = socket.create_connection(('127.0.0.1', {served.port}))")
                    while not served.connected:  # noqa: ASYNC110
                        await anyio.sleep(0.01)
                    scope.cancel()
                    await anyio.sleep_forever()
            while served.connected:  # noqa: ASYNC110
                await anyio.sleep(0.01)


async def test_a_backend_without_such_a_way_refuses_by_name() -> None:
    boxes = BoxSandbox("docker", DockerStarter(Docker(image="any")), ("python3",), is_isolated=True, limits=Limits())
    with pytest.raises(ConfigError, match="the backend docker cannot reach a port"):
        boxes.session(port=80)
