"""Hosts of containers on the nodes of a Ray cluster."""

from __future__ import annotations

import os
import signal
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path

import anyio
import pytest

from agentrl.errors import ConfigError, EnvironmentFault, LaunchError
from agentrl.processes.config import ClusterConfig
from agentrl.processes.ray import open_ray
from agentrl_sandbox.containers.config import containers_of, read_containers_config
from agentrl_sandbox.containers.fleet.fleet import HostFleet, open_fleet
from agentrl_sandbox.containers.fleet.ray_hosts import open_ray_fleet
from agentrl_sandbox.containers.protocol import CONTAINER_LIMITS
from agentrl_workflows.demo.ray_nodes import LocalRayCluster

pytestmark = [pytest.mark.starts, pytest.mark.ray, pytest.mark.parametrize("anyio_backend", ["asyncio"])]
LIMITS = CONTAINER_LIMITS.model_copy(update={"memory_mb": 64, "wall_s": 300.0})
CONNECT = partial(open_fleet, limits=LIMITS)


async def test_a_run_file_that_names_ray_gets_a_host_on_each_node(cluster: LocalRayCluster):
    config = read_containers_config({"backend": "ray", "address": cluster.address})
    urls: list[str] = []
    async with containers_of(config, images={}, limits=LIMITS, max_open=8) as fleet:
        assert isinstance(fleet, HostFleet)
        assert len(fleet.hosts) == 1 + len(cluster.nodes)
        urls += [host.url for host in fleet.hosts]
        async with fleet.workbench() as bench, bench.run() as container:
            assert (await container.shell("echo here > /tmp/note; cat /tmp/note")).stdout == b"here\n"
    assert [_pid_of_host(url) for url in urls] == [None] * len(urls)


async def test_a_killed_host_fails_its_own_episodes_alone_and_starts_again(
    cluster: LocalRayCluster, caplog: pytest.LogCaptureFixture
):
    config = ClusterConfig(launcher="ray", address=cluster.address)
    async with open_ray_fleet(config, CONNECT, nodes=2, images={}) as fleet, AsyncExitStack() as stack:
        first = [host.url for host in fleet.hosts]
        containers = []
        for _ in first:  # the second one is placed where less is promised
            bench = await stack.enter_async_context(fleet.workbench())
            containers.append(await stack.enter_async_context(bench.run()))
        assert [host.num_placed for host in fleet.hosts] == [1, 1]
        pid = _pid_of_host(first[0])
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        with anyio.fail_after(240):
            while fleet.hosts[0].url == first[0] or fleet.hosts[0].state is None:  # noqa: ASYNC110 - a process starts
                await anyio.sleep(0.1)
        assert "sandbox host 0" in caplog.text
        ended = 0
        for container in containers:
            try:
                assert (await container.shell("echo on")).stdout == b"on\n"
            except EnvironmentFault:
                ended += 1
        assert ended == 1
        for _ in range(4):
            async with fleet.workbench() as bench, bench.run() as container:
                assert (await container.shell("echo on")).stdout == b"on\n"
        with pytest.raises(EnvironmentFault):
            await stack.aclose()


async def test_more_hosts_than_nodes_are_refused_with_what_is_there(cluster: LocalRayCluster):
    config = ClusterConfig(launcher="ray", address=cluster.address)
    impatient = config.model_copy(update={"start_timeout_s": 2})
    async with open_ray(config):  # joins with patience
        with pytest.raises(LaunchError, match="no room for sandbox host 0"):
            async with open_ray_fleet(impatient, CONNECT, nodes=40, images={}):
                pass


async def test_an_image_that_a_node_lacks_is_refused_at_the_start(cluster: LocalRayCluster):
    config = ClusterConfig(launcher="ray", address=cluster.address)
    with pytest.raises(LaunchError, match=r"(?s)sandbox host 0 .*ended with exit code .*/no/such/image"):
        async with open_ray_fleet(config, CONNECT, nodes=1, images={"debian:12": "/no/such/image"}):
            pass


async def test_a_process_that_has_joined_no_cluster_starts_none(cluster: LocalRayCluster, monkeypatch: pytest.MonkeyPatch):
    del cluster
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match=r"containers\.address: this process has joined no Ray cluster"):
        async with open_ray_fleet(ClusterConfig(launcher="ray"), CONNECT, images={}):
            pass


def _pid_of_host(url: str) -> int | None:
    port = url.rpartition(":")[2].encode()
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):
                words = (folder / "cmdline").read_bytes().split(b"\0")
                if b"sandbox-host" in words and port in words:
                    return int(folder.name)
    return None
