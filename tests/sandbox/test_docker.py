"""Docker: its command line, the life of a container around a stand-in for the command, and the real one where it runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from agentrl.errors import ConfigError
from agentrl.sandbox.docker import Docker, docker_arguments, open_docker
from agentrl.sandbox.types import Ending, Limits, Program, python_program

FAKE = Path(__file__).parents[1] / "support" / "fake_docker.py"
IMAGE = "python:3.11-slim"


@pytest.fixture
def fake(tmp_path: Path) -> Docker:
    """A stand-in with containers of its own."""
    copy = tmp_path / "docker.py"
    shutil.copy(FAKE, copy)
    return Docker(image="any", command=(sys.executable, str(copy)))


def test_the_command_line_closes_every_wall() -> None:
    program = Program(argv=("python3", "main.py"), environment={"MODE": "1"})
    limits = Limits(memory_mb=256, processes=32, work_mb=8, temp_mb=4, shared_mb=2, open_files=64, cpu_s=5, num_files=500)
    words = docker_arguments(Docker(image=IMAGE, runtime="runsc"), program, limits, name="agentrl-1", folder="/tmp/x")
    assert " ".join(words) == (
        "docker run --rm --interactive --init --pull never --name agentrl-1 --network none --read-only --cap-drop ALL "
        "--security-opt no-new-privileges --user 65534:65534 --memory 256m --memory-swap 256m --pids-limit 32 "
        "--ulimit nofile=64:64 --ulimit cpu=5:6 --ulimit core=0:0 "
        "--tmpfs /work:rw,nosuid,nodev,exec,mode=1777,nr_inodes=500,size=8m "
        "--tmpfs /tmp:rw,nosuid,nodev,exec,mode=1777,nr_inodes=500,size=4m --shm-size 2m --workdir /work "
        "--hostname sandbox --log-driver none --mount type=bind,source=/tmp/x/input,target=/input,readonly "
        "--mount type=bind,source=/tmp/x/agentrl,target=/run/agentrl,readonly --env HOME=/work --env LANG=C.UTF-8 "
        "--env TMPDIR=/tmp --env MODE=1 --runtime runsc --entrypoint /bin/sh python:3.11-slim -c "
        'cp -R /input/. /work/ && echo ready >&2 && exec "$@" sh python3 main.py'
    )


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_container_runs_a_program_and_is_removed(fake: Docker, tmp_path: Path) -> None:
    sandbox = await open_docker(fake, limits=Limits(wall_s=60))
    source = "import sys; print(open('d/a').read(), sys.stdin.read()); sys.exit(3)"
    result = await sandbox.run(python_program(source, files={"d/a": b"x"}, stdin=b"y"))
    assert (result.stdout, result.exit_status) == (b"x y\n", 3)
    late = await sandbox.run(Program(argv=("sleep", "60")), Limits(wall_s=1))
    assert late.ended is Ending.TIMEOUT
    os.mkfifo(tmp_path / "started")
    waits = Program(argv=("/bin/sh", "-c", f"echo > {tmp_path / 'started'}; exec sleep 60"))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sandbox.run, waits, Limits(wall_s=60))
        await anyio.to_thread.run_sync((tmp_path / "started").read_text)
        tasks.cancel_scope.cancel()
    async with sandbox.session(files={"a": b"1"}) as session:
        assert (await session.python("x = open('a').read(); x")).text == "'1'"
    assert list(Path(fake.command[1]).with_name("containers").iterdir()) == []


async def test_what_is_missing_is_named_with_the_fix(fake: Docker) -> None:
    with pytest.raises(ConfigError, match=r"cannot start /nowhere/docker.*install Docker"):
        await open_docker(Docker(image="any", command=("/nowhere/docker",)))
    with pytest.raises(ConfigError, match=r"No such image: missing; pull it: `docker pull missing`"):
        await open_docker(Docker(image="missing", command=fake.command))
    with pytest.raises(ConfigError, match=r"docker runs no program.*no such image"):
        await open_docker(Docker(image="broken", command=fake.command))


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_the_real_docker_isolates() -> None:
    docker = shutil.which("docker")
    inspect = [docker or "docker", "image", "inspect", IMAGE]
    if docker is None or subprocess.run(inspect, capture_output=True, check=False).returncode != 0:  # noqa: ASYNC221
        pytest.skip(f"no Docker daemon with the image {IMAGE}")
    sandbox = await open_docker(Docker(image=IMAGE), limits=Limits(wall_s=60))
    source = "import os, socket; print(os.getuid(), os.listdir('/work')); socket.create_connection(('1.1.1.1', 53), 2)"
    result = await sandbox.run(python_program(source))
    assert result.stdout == b"65534 ['main.py']\n"
    assert result.exit_status == 1
