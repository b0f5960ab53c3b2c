"""Containers of other machines: hosts that are processes here, one of which dies."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, cast

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
from anyio.abc import SocketAttribute, SocketStream
from msgspec import structs

from agentrl.errors import ConfigError, EnvironmentFault
from agentrl_sandbox import Ending, Limits, python_program
from agentrl_sandbox.base import BoxSandbox
from agentrl_sandbox.containers import Containers
from agentrl_sandbox.containers.config import containers_of, read_containers_config
from agentrl_sandbox.containers.fleet.fleet import HostFleet, open_fleet
from agentrl_sandbox.containers.protocol import MissingImage
from agentrl_sandbox.hosts.server import MAX_LIMITS, HostOptions, serving_host
from agentrl_sandbox.remote import open_remote
from tests.support.hosts import (
    HOST_KEY,
    PLANNED_LIMITS,
    PlannedContainers,
    host_options,
    planned_fleet,
    running_host,
    serving_sandbox,
)
from tests.support.leftovers import processes_with

pytestmark = [pytest.mark.anyio]
LEAVE = "setsid sleep {} >/dev/null 2>&1 & until grep -q sleep /proc/$!/comm; do :; done"
"""Leaves a process in a group of its own, and returns when that has begun."""
LIMITS = PLANNED_LIMITS


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def fleet() -> AsyncGenerator[tuple[HostFleet, dict[str, subprocess.Popen[bytes]]]]:
    with running_host() as one, running_host() as two:
        async with open_fleet([one[0], two[0]], api_key=HOST_KEY, limits=LIMITS) as opened:
            yield opened, {one[0]: one[1], two[0]: two[1]}


@pytest.mark.starts
async def test_a_container_of_a_host_does_what_one_here_does(
    fleet: tuple[HostFleet, dict[str, subprocess.Popen[bytes]]],
) -> None:
    opened, _ = fleet
    async with opened.workbench() as bench:
        await bench.add({"/app/notes.txt": b"hello", "/data/old": b"1"})
        async with bench.run(directory="/app", environment={"MODE": "work"}) as container:
            assert (await container.shell("pwd; cat notes.txt; echo $MODE")).stdout == b"/app\nhellowork\n"
            assert (await container.execute(["sh", "-c", "exit 4"])).exit_status == 4
            await container.upload({"/app/new": b"up"})
            assert await container.download("/app/new", max_bytes=9) == b"up"
            with pytest.raises(OSError, match="No such file"):
                await container.download("/app/none", max_bytes=9)
            async with container.stream(["sh", "-c", "echo one; sleep 1000"]) as stream:
                assert await anext(aiter(stream)) == b"one\n"
            async with container.stream(["sleep", "1000"], timeout_s=0.3) as stream:
                assert [piece async for piece in stream] == []
            assert stream.result.ended is Ending.TIMEOUT
            await container.shell("rm -r /data; ln -s /etc /app/link; echo x > /etc/evil")
        assert await bench.changed() == ["/app", "/data", "/etc"]
        assert await bench.read("/app/new") == b"up"
        with pytest.raises(OSError, match=r"link|symbolic|directory"):
            await bench.read("/app/link/passwd")
        await bench.keep(["/app", "/data"])
        snapshot = await bench.snapshot()
        async with bench.run() as container:
            assert (await container.shell("ls -d /app/new /etc/evil /data")).stdout.splitlines()[-1] == b"/app/new"
    for _ in range(4):  # on either host, which may know the snapshot or not
        async with opened.workbench() as bench:
            await bench.restore(snapshot)
            async with bench.run() as container:
                assert (await container.shell("cat /app/new")).stdout == b"up"
    with pytest.raises(ConfigError, match=r"image debian:12: .* has the images none \(--image debian:12=FOLDER\)"):
        async with opened.workbench(image="debian:12"):
            pass


@pytest.mark.starts
async def test_the_episodes_of_a_host_that_dies_are_faults_and_run_again_on_another(
    fleet: tuple[HostFleet, dict[str, subprocess.Popen[bytes]]],
) -> None:
    opened, processes = fleet
    first, second = opened.hosts
    lost = 0
    solved: list[int] = []
    faults: list[str] = []
    placed = 0
    all_placed, killed = anyio.Event(), anyio.Event()

    async def play(number: int) -> None:
        nonlocal placed
        while True:
            try:
                async with opened.workbench(limits=LIMITS) as bench, bench.run(directory="/app") as container:
                    placed += 1
                    if placed == 20:
                        all_placed.set()
                    await killed.wait()
                    assert (await container.shell(f"echo {number}")).stdout == f"{number}\n".encode()
                solved.append(number)
                return
            except EnvironmentFault as fault:
                faults.append(str(fault))

    async with anyio.create_task_group() as tasks:
        for number in range(20):
            tasks.start_soon(play, number)
        await all_placed.wait()
        assert first.num_placed + second.num_placed == 20
        assert min(first.num_placed, second.num_placed) >= 5, "placement by free memory spreads them"
        lost = first.num_placed
        processes[first.url].send_signal(signal.SIGKILL)
        killed.set()
    assert sorted(solved) == list(range(20))
    assert len(faults) == lost
    assert all(f"the host {first.url} is gone" in fault for fault in faults)
    assert first.state is None


@pytest.mark.starts
async def test_a_program_on_a_host_reaches_one_port_of_the_run(
    fleet: tuple[HostFleet, dict[str, subprocess.Popen[bytes]]],
) -> None:
    opened, _ = fleet

    async def answer(stream: SocketStream) -> None:
        async with stream:
            data = b""
            with suppress(anyio.EndOfStream):
                while True:
                    data += await stream.receive()
            await stream.send(b"got %d" % len(data))

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = listener.extra(SocketAttribute.local_port)
    ask = (
        "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); s.sendall(b'x' * 300000); "
        "s.shutdown(socket.SHUT_WR); print(s.recv(100).decode())"
    )
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, answer)
        async with opened.workbench() as bench, bench.run(port=port) as container:
            await container.upload({"/app/ask.py": ask.encode()})
            said = await container.shell(f"for n in 1 2 3 4 5; do python3 /app/ask.py {port} & done; wait")
            assert said.stdout == b"got 300000\n" * 5
            other = await container.execute(["python3", "/app/ask.py", "1"])
            assert b"refused" in other.stderr
        tasks.cancel_scope.cancel()


@pytest.mark.starts
async def test_one_host_runs_programs_and_gives_containers(
    fleet: tuple[HostFleet, dict[str, subprocess.Popen[bytes]]],
) -> None:
    opened, _ = fleet
    url = opened.hosts[0].url
    async with (
        opened.workbench() as bench,
        bench.run() as container,
        open_remote(url, api_key=HOST_KEY, limits=Limits(wall_s=60)) as remote,
        remote.session() as session,
    ):
        assert (await remote.run(python_program("print(6 * 7)"))).text == "42"
        assert (await container.shell("echo > /tmp/x; echo here")).stdout == b"here\n"
        assert (await session.python("import os; os.path.exists('/tmp/x')")).text == "False"


@pytest.mark.starts
async def test_a_host_that_lacks_what_is_asked_of_it_is_refused_by_name(sandbox: BoxSandbox) -> None:
    async with serving_sandbox(sandbox) as url:
        with pytest.raises(ConfigError, match="gives no containers; start it with `agentrl sandbox-host`"):
            async with open_fleet([url], limits=LIMITS):
                pass
    async with serving_host(host_options(512), containers=cast("Containers", PlannedContainers())) as url:
        with pytest.raises(ConfigError, match="runs no programs without a container"):
            async with open_remote(url):
                pass


@pytest.mark.starts
async def test_what_a_host_held_is_gone_with_it_and_with_its_run() -> None:
    with running_host() as (url, process):
        async with open_fleet([url], api_key=HOST_KEY, limits=LIMITS) as opened:
            async with opened.workbench() as bench, bench.run() as container:
                await container.shell(LEAVE.format(98761))
                assert processes_with("98761")
            assert processes_with("98761") == []

            async def play() -> None:
                async with opened.workbench() as bench, bench.run() as container:
                    await container.shell(LEAVE.format(98763))
                    process.kill()
                    process.wait()
                    await container.shell("echo")

            with pytest.raises(EnvironmentFault, match="is gone"):
                await play()
            await anyio.to_thread.run_sync(wait_until_none_has, "98763")


def wait_until_none_has(word: str) -> None:
    """Wait until no process of this machine has a word among its arguments."""
    until = time.monotonic() + 120
    while processes_with(word):
        assert time.monotonic() < until, f"a process with {word} lives on"
        time.sleep(0.05)


@pytest.mark.starts
async def test_hosts_that_refuse_are_named() -> None:
    with running_host("--max-open", "1") as (url, _):
        with pytest.raises(ConfigError, match="answered 401"):
            async with open_fleet([url], api_key="wrong"):
                pass
        with pytest.raises(ConfigError, match=r"limits\.memory_mb: .* \(--max memory_mb=10000000\)"):
            async with open_fleet([url], api_key=HOST_KEY, limits=LIMITS.model_copy(update={"memory_mb": 10**7})):
                pass
        config = read_containers_config({"hosts": [url]}).model_copy(update={"api_key_env": "NOWHERE_SET"})
        with pytest.raises(ConfigError, match="NOWHERE_SET is not set"):
            async with containers_of(config, images={}, limits=LIMITS, max_open=1):
                pass
    with pytest.raises(ConfigError, match=r"no host answers.*agentrl sandbox-host"):
        async with open_fleet([url], api_key=HOST_KEY):
            pass
    with pytest.raises(ConfigError, match="expected addresses with the backend hosts"):
        read_containers_config({"backend": "hosts"})


async def test_a_thousand_environments_are_in_flight_over_hosts_and_none_is_over_its_cap() -> None:
    maxima = MAX_LIMITS.model_copy(update={"wall_s": 86_400.0})
    all_open = anyio.Event()
    num_open = 0
    async with AsyncExitStack() as stack:
        urls: list[str] = []
        for max_open in (100, 400, 500):
            options = HostOptions(max_open=max_open, memory_mb=10**6, share=0.25, maxima=maxima, left_mb=-(10**6))
            containers = cast("Containers", PlannedContainers())
            urls.append(await stack.enter_async_context(serving_host(options, containers=containers)))
        fleet = await stack.enter_async_context(open_fleet(urls, limits=LIMITS, max_open=1000, max_starting=32))

        async def play() -> None:
            nonlocal num_open
            async with fleet.workbench():
                num_open += 1
                if num_open == 1000:
                    all_open.set()
                await all_open.wait()

        async with anyio.create_task_group() as tasks:
            for _ in range(1000):
                tasks.start_soon(play)
            await all_open.wait()
            assert [host.num_placed for host in fleet.hosts] == [100, 400, 500]
        assert [host.num_placed for host in fleet.hosts] == [0, 0, 0]


async def test_an_environment_opens_where_its_image_is_and_waits_for_no_other_image(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wanted = {"debian:12": "/srv/debian", "python:3": "/srv/python", "base": None}
    two = (host_options(512, max_open=1), host_options(512))
    async with planned_fleet(*two, images=[("debian:12",), ("python:3",)], wanted=wanted) as fleet:
        debian, python = fleet.hosts
        async with AsyncExitStack() as stack, anyio.create_task_group() as tasks:
            await stack.enter_async_context(fleet.workbench(image="debian:12"))
            assert (debian.num_placed, python.num_placed) == (1, 0)
            has_waited = anyio.Event()

            async def wait_for_the_full_host() -> None:
                async with fleet.workbench(image="debian:12"):
                    has_waited.set()

            tasks.start_soon(wait_for_the_full_host)
            await anyio.wait_all_tasks_blocked()
            for image in ("python:3", "base", None):
                await stack.enter_async_context(fleet.workbench(image=image))
            assert (debian.num_placed, python.num_placed, has_waited.is_set()) == (1, 3, False)
            await stack.aclose()
            await has_waited.wait()
        with pytest.raises(ConfigError, match=r"image node:22: .*'debian:12'.*--image node:22=FOLDER.*'python:3'"):
            async with fleet.workbench(image="node:22"):
                pass
    async with planned_fleet(two[0], images=[("debian:12",)], wanted=wanted) as fleet:
        async with fleet.workbench(image="debian:12"):
            assert any("image python:3: " in said and "has the images ['debian:12']" in said for said in caplog.messages)
        with pytest.raises(MissingImage, match=r"image python:3: .* has the images \['debian:12'\]"):
            async with fleet.workbench(image="python:3"):
                pass
    async with planned_fleet(two[0], images=[("*",)], wanted=wanted) as fleet, fleet.workbench(image="node:22"):
        assert fleet.hosts[0].num_placed == 1


async def test_a_large_environment_gets_its_turn_before_later_ones_of_other_images() -> None:
    opened: list[str] = []
    small, large = LIMITS, LIMITS.model_copy(update={"memory_mb": 1024})
    options = replace(host_options(1024), memory_mb=300)  # a quarter counts: four small ones, or a large one
    wanted = {"a": "/srv/a", "b": "/srv/b"}
    async with planned_fleet(options, images=[("a", "b")], wanted=wanted) as fleet:

        async def play(name: str, image: str, limits: Limits) -> None:
            async with fleet.workbench(image=image, limits=limits):
                opened.append(name)

        async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
            held = [await stack.enter_async_context(AsyncExitStack()) for _ in range(4)]
            for each in held:
                await each.enter_async_context(fleet.workbench(image="a", limits=small))
            tasks.start_soon(play, "large", "b", large)
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(play, "small", "a", small)
            await held[0].aclose()
            await anyio.wait_all_tasks_blocked()
            assert opened == []
            await stack.aclose()
        assert opened == ["large", "small"]


async def test_an_environment_that_ends_makes_room_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl_sandbox.containers.fleet.fleet.LIFE_S", 3600.0)
    monkeypatch.setattr("agentrl_sandbox.containers.fleet.placement.PLACE_LOOK_S", 3600.0)
    async with planned_fleet(host_options(512, max_open=1), images=[()], wanted={}) as fleet:

        async def play() -> None:
            async with fleet.workbench():
                await anyio.lowlevel.checkpoint()

        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(play)


class ImagelessContainers(PlannedContainers):
    """Containers without images."""

    @asynccontextmanager
    async def workbench(self, *, image: str | None = None, limits: Limits | None = None) -> AsyncGenerator[Any]:
        del limits
        if image is not None:
            raise ConfigError(f"there is no image {image}")
        yield None


async def test_a_host_that_lost_its_image_is_passed_over_for_one_that_has_it() -> None:
    async with AsyncExitStack() as stack:
        without = serving_host(host_options(512), containers=cast("Containers", ImagelessContainers()))
        having = serving_host(host_options(512), containers=cast("Containers", PlannedContainers()), images=("a",))
        urls = [await stack.enter_async_context(each) for each in (without, having)]
        fleet = await stack.enter_async_context(open_fleet(urls, images={"a": "/srv/a"}, limits=LIMITS))
        first, second = fleet.hosts
        assert first.state is not None
        first.state = structs.replace(first.state, images=("a",), free_mb=10**8)  # as it was before it started again
        await stack.enter_async_context(fleet.workbench(image="a"))
        assert (first.num_placed, second.num_placed) == (0, 1)


async def test_the_end_of_a_container_that_a_host_has_lost_is_no_success() -> None:
    async with planned_fleet(host_options(512), images=[()], wanted={}) as fleet:
        status, answer = await fleet.hosts[0].send("DELETE", "/sessions/of-the-host-before", b"", 60.0)
        assert (status, b"no such session" in answer) == (404, True)


async def test_environments_whose_only_host_is_gone_fail_as_faults_that_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl_sandbox.containers.fleet.fleet.LIFE_S", 3600.0)
    monkeypatch.setattr("agentrl_sandbox.containers.fleet.placement.PLACE_LOOK_S", 0.01)
    monkeypatch.setattr("agentrl_sandbox.containers.fleet.placement.GONE_S", 0.0)
    two = (host_options(512), host_options(512))
    async with planned_fleet(*two, images=[("a",), ()], wanted={"a": "/srv/a"}) as fleet:
        fleet.hosts[0].lose("its power failed")
        with pytest.raises(EnvironmentFault, match=r"is gone: its power failed; .* has the images none"):
            async with fleet.workbench(image="a"):
                pass
        async with fleet.workbench():
            assert fleet.hosts[1].num_placed == 1


async def test_a_host_that_is_too_small_for_some_environments_gets_the_others() -> None:
    async with planned_fleet(host_options(128), host_options(512), images=[(), ()], wanted={}) as fleet:
        small, large = fleet.hosts
        async with AsyncExitStack() as stack:
            for _ in range(4):
                await stack.enter_async_context(fleet.workbench())
            assert (small.num_placed, large.num_placed) == (0, 4)
            little = LIMITS.model_copy(update={"memory_mb": 64})
            await stack.enter_async_context(fleet.workbench(limits=little))
            assert small.num_placed == 1
        with pytest.raises(ConfigError, match=r"at most 128, .*at most 512, .*--max memory_mb=1024"):
            async with fleet.workbench(limits=LIMITS.model_copy(update={"memory_mb": 1024})):
                pass
    with pytest.raises(ConfigError, match=r"limits\.memory_mb: expected at most 128"):
        async with planned_fleet(host_options(128), images=[()], wanted={}):
            pass


def test_nodes_without_the_backend_ray_are_refused() -> None:
    with pytest.raises(ConfigError, match="nodes and address: the backend bubblewrap has none"):
        read_containers_config({"nodes": 3})
