"""Containers of services: docker, podman, Kubernetes and E2B, against stand-ins whose environments are real ones."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio
import pytest

from agentrl.errors import ConfigError, EnvironmentFault
from agentrl.sandbox import Ending, Limits
from agentrl.sandbox.containers import Containers
from agentrl.sandbox.containers.config import open_chosen_containers, read_containers_config
from agentrl.sandbox.containers.protocol import CONTAINER_LIMITS
from agentrl.sandbox.containers.services.docker_service import container_arguments
from agentrl.sandbox.docker import Docker
from agentrl.sandbox.types import Program
from tests.support.echo import ASK, echo
from tests.support.fake_e2b import serving_e2b
from tests.support.fake_roots import make_image
from tests.support.leftovers import processes_with
from tests.support.sandboxes import usable_host

pytestmark = [pytest.mark.processes, pytest.mark.anyio]
FAKE = Path(__file__).parents[1] / "support" / "fake_roots.py"
LIMITS = CONTAINER_LIMITS.model_copy(update={"wall_s": 120.0})
SERVICES = ("docker", "podman", "kubernetes", "e2b")
IMAGE = "debian:12"
PATIENCE_S = 300


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def opened(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **further: object) -> AsyncGenerator[Containers]:
    """Containers of a stand-in, whose images and environments are in `folder`."""
    usable_host()
    make_image(folder, "small")
    (folder / "running").mkdir()
    async with AsyncExitStack() as stack:
        given: dict[str, object] = {"backend": name, "image": "small"}
        if name == "e2b":
            monkeypatch.setenv("E2B_TEST_KEY", "e2b_key")
            url, _ = await stack.enter_async_context(serving_e2b(folder, "e2b_key"))
            given |= {"api_key_env": "E2B_TEST_KEY", "api_url": url, "envd_url": url + "/envd/{sandbox}"}
        else:
            kind = "kubectl" if name == "kubernetes" else "docker"
            given["command"] = [sys.executable, str(FAKE), kind, str(folder)]
        config = read_containers_config({**given, **further})
        yield await stack.enter_async_context(open_chosen_containers(config, images={}, limits=LIMITS, max_open=4))


@pytest.mark.parametrize("name", SERVICES)
async def test_a_workbench_of_a_service_does_what_one_here_does(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(name, tmp_path, monkeypatch) as containers:
        assert containers.name == name
        async with containers.workbench() as bench:
            await bench.add({"/app/notes.txt": b"hello", "/data/x": b"1"})
            async with bench.run(directory="/app", environment={"MODE": "work"}) as container:
                assert (await container.shell("pwd; cat notes.txt; echo $MODE; id -u")).stdout == b"/app\nhellowork\n0\n"
                await container.shell("rm notes.txt /data/of-image; echo 42 > answer.txt; ln -s /etc /app/link; mkdir deep")
                await container.shell("echo evil > /etc/evil; echo x > /root/.bashrc; echo seen > /root/seen")
                await container.shell("setsid sleep 1000 >/dev/null 2>&1 &")
                await container.upload({"/app/deep/er.txt": b"up"})
                async with container.stream(["sh", "-c", "echo one; exit 3"], timeout_s=60) as stream:
                    assert b"".join([piece async for piece in stream]) == b"one\n"
                assert stream.result.exit_status == 3
            assert set(await bench.changed()) >= {"/app", "/data", "/etc", "/root"}
            assert await bench.read("/app/answer.txt") == b"42\n"
            with pytest.raises(OSError, match="no such file"):
                await bench.read("/app/link")
            await bench.keep(["/app", "/data"], homes=["/root"])
            assert await bench.changed() == ["/app", "/data", "/root"]
            snapshot = await bench.snapshot()
        async with containers.workbench() as bench:
            await bench.restore(snapshot)
            async with bench.run(directory="/app") as container:
                said = (
                    await container.shell("cat answer.txt deep/er.txt; ls -A /data /root; ls /app/notes.txt; ls /etc")
                ).text
        for word in ("42", "up", "seen", "No such file"):
            assert word in said
        for word in ("of-image", ".bashrc", "evil"):
            assert word not in said
    assert list((tmp_path / "running").iterdir()) == []


@pytest.mark.parametrize("name", ["kubernetes", "e2b"])
async def test_an_agent_that_ends_its_supervisor_has_changed_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(name, tmp_path, monkeypatch) as containers, containers.workbench() as bench:
        async with bench.run() as container:
            await container.shell("echo 1 > /app/made")
            result = await container.shell("kill -9 -1; sleep 1000")
            assert (result.ended, result.state_lost) == (Ending.KILLED, True)
        assert await bench.changed() == []


@pytest.mark.parametrize("name", ["docker", "kubernetes", "e2b"])
async def test_an_image_that_a_service_lacks_is_a_fault_that_names_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(name, tmp_path, monkeypatch) as containers, containers.workbench(image="nowhere") as bench:
        with pytest.raises(EnvironmentFault):
            async with bench.run():
                pass


async def test_a_choice_that_lacks_something_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="needs one for tasks that name none"):
        read_containers_config({"backend": "docker"})
    with pytest.raises(ConfigError, match="api_key_env"):
        read_containers_config({"backend": "e2b", "image": "base"})
    with pytest.raises(ConfigError, match="pull it"):
        async with opened("docker", tmp_path, monkeypatch, image="missing"):
            pass


async def test_a_sandbox_of_kubernetes_has_limits_and_ends_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = {"runtimeClassName": "gvisor"}
    async with (
        opened("kubernetes", tmp_path, monkeypatch, pod=pod) as containers,
        containers.workbench() as bench,
        bench.run(),
    ):
        pass
    [asked] = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    spec = asked["spec"]["podTemplate"]["spec"]
    assert (asked["apiVersion"], asked["kind"]) == ("agents.x-k8s.io/v1beta1", "Sandbox")
    assert asked["spec"]["shutdownPolicy"] == "Delete"
    assert asked["spec"]["shutdownTime"].endswith("Z")
    assert spec["runtimeClassName"] == "gvisor"
    assert spec["automountServiceAccountToken"] is False
    assert spec["containers"][0]["resources"]["limits"] == {"memory": "1024Mi", "ephemeral-storage": "256Mi"}


def test_the_command_of_a_container_closes_every_wall() -> None:
    limits = Limits(memory_mb=256, processes=32, shared_mb=2, open_files=64)
    docker = Docker(image=IMAGE, command=("podman",), runtime="runsc")
    program = Program(argv=("/run/agentrl/python", "x"))
    words = container_arguments(docker, program, limits, name="agentrl-1", folder="/tmp/x", environment={"MODE": "1"})
    assert " ".join(words) == (
        "podman run --rm --interactive --pull never --name agentrl-1 --network none --cap-drop ALL "
        "--security-opt no-new-privileges --user 0:0 --workdir / --memory 256m --memory-swap 256m --pids-limit 32 "
        "--ulimit nofile=64:64 --ulimit core=0:0 --shm-size 2m --hostname sandbox --log-driver none "
        "--mount type=bind,source=/tmp/x/agentrl,target=/run/agentrl,readonly "
        "--mount type=bind,source=/usr,target=/run/agentrl/host/usr,readonly --env MODE=1 --runtime runsc "
        '--entrypoint /bin/sh debian:12 -c echo ready >&2 && exec "$@" sh /run/agentrl/python x'
    )


@pytest.mark.parametrize("name", ["docker", "podman"])
async def test_the_real_command_runs_containers(name: str) -> None:
    command = shutil.which(name)
    inspect = [command or name, "image", "inspect", IMAGE]
    if command is None or subprocess.run(inspect, capture_output=True, check=False).returncode != 0:  # noqa: ASYNC221
        pytest.skip(f"no {name} that has the image {IMAGE}")
    config = read_containers_config({"backend": name, "image": IMAGE})
    async with (
        open_chosen_containers(config, images={}, limits=LIMITS, max_open=1) as containers,
        containers.workbench() as bench,
    ):
        async with bench.run() as container:
            await container.shell("echo 42 > /answer")
        assert await bench.read("/answer") == b"42\n"


@pytest.mark.parametrize("name", ["docker", "kubernetes", "e2b"])
async def test_programs_of_a_service_reach_the_port_and_no_other(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with anyio.fail_after(PATIENCE_S):
        async with echo() as served, opened(name, tmp_path, monkeypatch) as containers, containers.workbench() as bench:
            async with bench.run(port=(8123, served.port)) as container:
                program = f"{ASK}\nassert ask(8123, b'x' * 3_000_000) == b'x' * 3_000_000"
                long = await container.execute(["python3", "-c", program], timeout_s=100)
                assert long.is_success, long.text
                shell = await container.shell("exec 5<>/dev/tcp/127.0.0.1/8123; echo hello >&5; head -1 <&5; exec 5>&-")
                assert shell.stdout == b"hello\n"
                assert not (await container.shell(f": <>/dev/tcp/127.0.0.1/{served.port}")).is_success
                await container.shell("(exec 5<>/dev/tcp/127.0.0.1/8123; exec sleep 1000) >/dev/null 2>&1 &")
                await until(lambda: bool(served.connected))
            await until(lambda: not served.connected)
            assert await bench.changed() == []


@pytest.mark.parametrize("name", ["kubernetes", "e2b"])
async def test_an_agent_that_ends_the_relay_loses_its_own_way_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with anyio.fail_after(PATIENCE_S):
        async with echo() as served, opened(name, tmp_path, monkeypatch) as containers, containers.workbench() as bench:
            async with bench.run(port=(8123, served.port)) as container:
                await container.shell("exec 5<>/dev/tcp/127.0.0.1/8123; (while echo more >&5; do :; done) >/dev/null 2>&1 &")
                await until(lambda: bool(served.connected))
                killed = await container.shell("pkill -9 -f selectors; while pgrep -f selectors >/dev/null; do :; done")
                assert killed.is_success, killed.text
                assert not (await container.shell("echo on > /app/made; : <>/dev/tcp/127.0.0.1/8123")).is_success
                await until(lambda: not served.connected)
            assert await bench.changed() == ["/app"]


async def test_a_supervisor_that_ends_between_two_calls_is_the_agents_doing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with anyio.fail_after(PATIENCE_S):
        async with opened("e2b", tmp_path, monkeypatch) as containers, containers.workbench() as bench:
            async with bench.run() as container:
                await container.shell("(while [ -d /app ]; do :; done; kill -9 -1) >/dev/null 2>&1 & sleep 98762 &")
                await until(lambda: bool(processes_with("sleep 98762")))
                next((tmp_path / "running").glob("*/app")).rmdir()
                await until(lambda: not processes_with("sleep 98762"))
                result = await container.shell("true")
                assert (result.ended, result.state_lost) == (Ending.KILLED, True)
            assert await bench.changed() == []


@pytest.mark.parametrize("name", ["kubernetes", "e2b"])
async def test_an_error_of_the_caller_stays_what_it_is(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(name, tmp_path, monkeypatch) as containers, containers.workbench() as bench:
        with pytest.raises(FileNotFoundError, match="mine"):
            async with bench.run(port=(8123, 80)):
                raise FileNotFoundError("mine")


async def test_an_environment_without_a_free_port_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened("kubernetes", tmp_path, monkeypatch) as containers, containers.workbench() as bench:
        with pytest.raises(EnvironmentFault, match="the relay of port 99999 does not start"):
            async with bench.run(port=(99_999, 80)):
                pass


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():  # noqa: ASYNC110 - nobody tells
        await anyio.sleep(0.01)
