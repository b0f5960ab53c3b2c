"""The sandbox of code on a real Docker: the life of a container, and its walls, with gVisor too."""

from __future__ import annotations

import anyio
import pytest

from agentrl.errors import ConfigError
from agentrl_sandbox.base import BoxSandbox
from agentrl_sandbox.docker import Docker, open_docker
from agentrl_sandbox.types import Ending, Limits, Program, python_program
from tests.support.container_engines import IMAGE, Engine, gvisor

pytestmark = [pytest.mark.external, pytest.mark.timeout(600)]


async def opened(engine: Engine, runtime: str | None = None) -> BoxSandbox:
    docker = Docker(image=IMAGE, command=engine.command, runtime=runtime)
    return await open_docker(docker, limits=Limits(wall_s=120))


async def test_a_container_isolates_a_program_and_is_removed(docker_engine: Engine) -> None:
    sandbox = await opened(docker_engine)
    source = "import os, socket; print(os.getuid() >= 10000, os.getcwd(), os.listdir('/work'), open('d/a').read())\n"
    source += "socket.create_connection(('1.1.1.1', 53), 2)"
    result = await sandbox.run(python_program(source, files={"d/a": b"x"}))
    assert sorted(result.stdout) == sorted(b"True /work ['main.py', 'd'] x\n")
    assert result.exit_status == 1
    async with sandbox.session(files={"a": b"1"}) as session:
        assert (await session.python("x = open('a').read(); x")).text == "'1'"
        assert (await session.shell("cd /tmp; mkdir z; echo $?")).text == "0"
    assert docker_engine.left() == []


async def test_a_container_ends_with_its_limits_and_its_cancellation(docker_engine: Engine) -> None:
    sandbox = await opened(docker_engine)
    late = await sandbox.run(Program(argv=("sleep", "600")), Limits(wall_s=5))
    assert late.ended is Ending.TIMEOUT
    fed = await sandbox.run(python_program("import sys; print(sys.stdin.read()); sys.exit(3)", stdin=b"y"))
    assert (fed.stdout, fed.exit_status) == (b"y\n", 3)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sandbox.run, Program(argv=("sleep", "600")), Limits(wall_s=600))
        while not docker_engine.left():  # noqa: ASYNC110 - nobody tells
            await anyio.sleep(0.05)
        tasks.cancel_scope.cancel()
    assert docker_engine.left() == []


async def test_concurrent_containers_have_processes_of_their_own(docker_engine: Engine) -> None:
    sandbox = await opened(docker_engine)
    source = "import subprocess\nfor _ in range(12): subprocess.Popen(['sleep', '3'])\nprint('started')"
    results = []

    async def run() -> None:
        async with sandbox.session(limits=Limits(processes=24, wall_s=120)) as session:
            results.append((await session.python(source)).text)

    async with anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(run)
    assert results == ["started"] * 4


async def test_gvisor_runs_programs_and_sessions(docker_engine: Engine) -> None:
    sandbox = await opened(docker_engine, gvisor())
    result = await sandbox.run(python_program("print(open('/proc/version').read())"))
    assert b"gVisor" in (await sandbox.run(Program(argv=("dmesg",)))).stdout, result.text
    async with sandbox.session(files={"a": b"1"}) as session:
        assert (await session.python("open('a').read()")).text == "'1'"
        assert (await session.shell("echo $((6 * 7))")).text == "42"
        assert (await session.run(Program(argv=("sh", "-c", "ulimit -n")))).is_success


async def test_what_is_missing_is_named_with_the_fix(docker_engine: Engine) -> None:
    with pytest.raises(ConfigError, match=r"cannot start /nowhere/docker.*install docker"):
        await open_docker(Docker(image="any", command=("/nowhere/docker",)))
    with pytest.raises(ConfigError, match=r"No such image: missing.*pull it: `docker pull missing`"):
        await open_docker(Docker(image="missing", command=docker_engine.command))
    with pytest.raises(ConfigError, match="start the Docker daemon"):
        await open_docker(Docker(image=IMAGE, command=("docker", "--host", "unix:///nowhere.sock")))
    with pytest.raises(ConfigError, match=r"docker runs no program.*nowhere"):
        await open_docker(Docker(image=IMAGE, command=docker_engine.command, runtime="nowhere"))
