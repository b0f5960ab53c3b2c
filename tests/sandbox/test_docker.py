"""The command line of docker for the sandbox of code."""

from __future__ import annotations

import re

from agentrl_sandbox.docker import Docker, docker_arguments
from agentrl_sandbox.types import Limits, Program


def test_the_command_line_closes_every_wall() -> None:
    program = Program(argv=("python3", "main.py"), environment={"MODE": "1"})
    limits = Limits(memory_mb=256, processes=32, work_mb=8, temp_mb=4, shared_mb=2, open_files=64, cpu_s=5, num_files=500)
    docker = Docker(image="python:3.11-slim", runtime="runsc")
    words = " ".join(docker_arguments(docker, program, limits, name="agentrl-1", folder="/tmp/x"))
    assert re.sub(r"--user \d{5}:\d{5}", "--user UID:UID", words) == (
        "docker run --rm --interactive --pull never --name agentrl-1 --network none --cap-drop ALL "
        "--security-opt no-new-privileges --workdir / --stop-timeout 0 --memory 256m --memory-swap 256m --pids-limit 32 "
        "--ulimit nofile=64:64 --ulimit nproc=16384:16384 --ulimit core=0:0 --shm-size 2m --hostname sandbox "
        "--log-driver none --init --read-only --user UID:UID --ulimit cpu=5:6 "
        "--tmpfs /work:rw,nosuid,nodev,exec,mode=1777,nr_inodes=500,size=8m "
        "--tmpfs /tmp:rw,nosuid,nodev,exec,mode=1777,nr_inodes=500,size=4m "
        "--mount type=bind,source=/tmp/x/input,target=/input,readonly "
        "--mount type=bind,source=/tmp/x/agentrl,target=/run/agentrl,readonly --env HOME=/work --env LANG=C.UTF-8 "
        "--env TMPDIR=/tmp --env MODE=1 --runtime runsc --entrypoint /bin/sh python:3.11-slim -c "
        'cd /work && cp -R /input/. /work/ && echo ready >&2 && exec "$@" sh python3 main.py'
    )
