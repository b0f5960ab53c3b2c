"""The choice of containers of docker and podman, and their command line."""

from __future__ import annotations

import pytest

from agentrl.errors import ConfigError
from agentrl_sandbox import Limits
from agentrl_sandbox.containers.config import read_containers_config
from agentrl_sandbox.containers.services.docker_service import container_arguments
from agentrl_sandbox.docker import Docker
from agentrl_sandbox.types import Program

IMAGE = "debian:12"


def test_a_choice_that_lacks_something_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs one for tasks that name none"):
        read_containers_config({"backend": "docker"})


@pytest.mark.parametrize("name", ["kubernetes", "e2b"])
def test_a_service_that_is_gone_is_refused_with_what_to_use(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is gone.*sandbox-host.*docker or podman"):
        read_containers_config({"backend": name, "image": "base", "api_key_env": "KEY", "pod": {}, "api_url": "https://x"})


def test_the_command_of_a_container_closes_every_wall() -> None:
    limits = Limits(memory_mb=256, processes=32, shared_mb=2, open_files=64)
    docker = Docker(image=IMAGE, command=("podman",), runtime="runsc")
    program = Program(argv=("/run/agentrl/python", "x"))
    words = container_arguments(docker, program, limits, name="agentrl-1", folder="/tmp/x", environment={"MODE": "1"})
    assert " ".join(words) == (
        "podman run --rm --interactive --pull never --name agentrl-1 --network none --cap-drop ALL "
        "--security-opt no-new-privileges --workdir / --stop-timeout 0 --memory 256m --memory-swap 256m --pids-limit 32 "
        "--ulimit nofile=64:64 --ulimit nproc=16384:16384 --ulimit core=0:0 --shm-size 2m --hostname sandbox "
        "--log-driver none --user 0:0 "
        "--mount type=bind,source=/tmp/x/agentrl,target=/run/agentrl,readonly "
        "--mount type=bind,source=/usr,target=/run/agentrl/host/usr,readonly --env MODE=1 --runtime runsc "
        '--entrypoint /bin/sh debian:12 -c echo ready >&2 && exec "$@" sh /run/agentrl/python x'
    )
