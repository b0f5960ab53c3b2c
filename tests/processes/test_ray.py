"""The Ray launcher, on a cluster of a head and two nodes on this machine."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from agentrl.errors import ConfigError, LaunchError
from agentrl.processes.base import ProcessSpec
from agentrl.processes.config import ClusterConfig
from agentrl.processes.ray import AgentPlace, RayLauncher, open_ray, order_by_node
from agentrl_workflows.demo.ray_nodes import LocalRayCluster
from tests.support.processes import until_ended

pytestmark = [pytest.mark.starts, pytest.mark.ray, pytest.mark.parametrize("anyio_backend", ["asyncio"])]

UNTIL_STDIN_ENDS = "import os; print(os.getpid(), flush=True); os.read(0, 1)"


@asynccontextmanager
async def launcher_of(cluster: LocalRayCluster, start_timeout_s: float = 60.0) -> AsyncGenerator[RayLauncher]:
    config = ClusterConfig(launcher="ray", address=cluster.address, start_timeout_s=start_timeout_s)
    async with open_ray(config) as launcher:
        yield launcher


def spec(tmp_path: Path, code: str, *, name: str = "trainer rank 0", **fields: Any) -> ProcessSpec:  # noqa: ANN401
    return ProcessSpec(
        name=name,
        role=fields.pop("role", "trainer"),
        command=(sys.executable, "-c", code),
        environment={"GIVEN": name},
        log_path=tmp_path / f"{name.replace(' ', '-')}.log",
        **fields,
    )


async def test_exit_codes_lines_and_logs_reach_the_driver(cluster: LocalRayCluster, tmp_path: Path):
    code = "import os, sys; print(os.environ['GIVEN']); sys.stderr.write('to the log\\n'); sys.exit(3)"
    async with launcher_of(cluster) as launcher:
        first, second = await launcher.start([spec(tmp_path, code, name=f"trainer rank {rank}") for rank in range(2)])
        assert [line async for line in first.lines()] == ["trainer rank 0"]
        with anyio.fail_after(300):
            end = await first.ended()
            await second.ended()
        assert end.code == 3
        assert "exit code 3 on node" in end.reason
        assert "to the log" in end.log_tail
        assert first.host == "127.0.0.1"
        await first.stop()
        await second.stop()
    log = (tmp_path / "trainer-rank-1.log").read_text()
    assert log.startswith(f"trainer rank 1 starts on node {second.place}")
    assert "to the log" in log


async def test_kill_and_stop_end_a_process(cluster: LocalRayCluster, tmp_path: Path):
    async with launcher_of(cluster) as launcher:
        killed, stopped = await launcher.start([spec(tmp_path, UNTIL_STDIN_ENDS, name=name) for name in ("one", "two")])
        pids = [int(await anext(aiter(child.lines()))) for child in (killed, stopped)]
        killed.kill()
        with anyio.fail_after(300):
            assert (await killed.ended()).code == -signal.SIGKILL
            await stopped.stop()
            assert (await stopped.ended()).code == -signal.SIGTERM
        for pid in pids:
            await until_ended(pid)


async def test_a_program_that_a_node_lacks_is_named(cluster: LocalRayCluster, tmp_path: Path):
    missing = ProcessSpec(
        name="server 0", role="server", command=("/no/such/program",), environment={}, log_path=tmp_path / "log"
    )
    async with launcher_of(cluster) as launcher:
        with pytest.raises(LaunchError, match=r"server 0 cannot be started on node .*/no/such/program"):
            await launcher.start([missing])


async def test_processes_without_room_are_refused_and_their_room_is_given_back(cluster: LocalRayCluster, tmp_path: Path):
    async with launcher_of(cluster, start_timeout_s=2) as launcher:
        with pytest.raises(LaunchError, match=r"no room for trainer rank 0 within 2 s.*need 1 CPU .*, 1 GPU \(0 free\)"):
            await launcher.start([spec(tmp_path, UNTIL_STDIN_ENDS, gpus=1)])
    async with launcher_of(cluster) as launcher:
        for _ in range(2):
            children = await launcher.start([spec(tmp_path, UNTIL_STDIN_ENDS, name=name, cpus=3) for name in ("one", "two")])
            assert len({child.place.node for child in children}) == 2
            for child in children:
                child.kill()
                await child.stop()


async def test_a_killed_agent_is_reported_and_leaves_no_process(cluster: LocalRayCluster, tmp_path: Path):
    code = f"import os; print(os.getppid(), flush=True); {UNTIL_STDIN_ENDS}"
    async with launcher_of(cluster) as launcher:
        [child] = await launcher.start([spec(tmp_path, code)])
        lines = aiter(child.lines())
        agent, pid = int(await anext(lines)), int(await anext(lines))
        await anyio.run_process(["kill", "-9", str(agent)])
        with anyio.fail_after(300):
            end = await child.ended()
        assert end.code is None
        assert "its agent on node" in end.reason
        await until_ended(pid)


async def test_an_agent_that_is_stopped_holds_up_nothing_and_leaves_no_process(cluster: LocalRayCluster, tmp_path: Path):
    code = f"import os; print(os.getppid(), flush=True); {UNTIL_STDIN_ENDS}"
    async with launcher_of(cluster) as launcher:
        [child] = await launcher.start([spec(tmp_path, code)])
        lines = aiter(child.lines())
        agent, pid = int(await anext(lines)), int(await anext(lines))
        os.kill(agent, signal.SIGSTOP)
        with anyio.fail_after(300):
            assert str(pid) in await child.log_tail()
            await child.stop()
    await until_ended(agent)
    await until_ended(pid)


async def test_a_removed_node_is_named_and_others_take_its_place(cluster: LocalRayCluster, tmp_path: Path):
    async with launcher_of(cluster) as launcher:
        first, second = await launcher.start(
            [spec(tmp_path, UNTIL_STDIN_ENDS, name=name, cpus=3) for name in ("one", "two")]
        )
        pid = int(await anext(aiter(first.lines())))
        assert first.place.node != second.place.node
        with anyio.fail_after(300):
            await anyio.to_thread.run_sync(cluster.kill_node, first.place.node)
            end = await first.ended()
        assert end.code is None
        assert end.reason == f"node {first.place} is gone"
        await until_ended(pid)
        await first.stop()
        await second.stop()
        cluster.add_node()  # Ray does this in the main thread only
        [again] = await launcher.start([spec(tmp_path, UNTIL_STDIN_ENDS, cpus=3)])
        assert int(await anext(aiter(again.lines()))) > 0


async def test_processes_end_with_the_launcher(cluster: LocalRayCluster, tmp_path: Path):
    async with launcher_of(cluster) as launcher:
        [child] = await launcher.start([spec(tmp_path, UNTIL_STDIN_ENDS)])
        pid = int(await anext(aiter(child.lines())))
    await until_ended(pid)


async def test_an_address_without_a_cluster_is_refused():
    pytest.importorskip("ray")
    with pytest.raises(ConfigError, match=r"cluster\.address: .*ray://"):
        async with open_ray(ClusterConfig(launcher="ray", address="ray://127.0.0.1:10001")):
            pass
    with pytest.raises(ConfigError, match=r"cluster\.address: .* 127\.0\.0\.1:9"):
        async with open_ray(ClusterConfig(launcher="ray", address="127.0.0.1:9", start_timeout_s=3)):
            pass


def test_ranks_are_sorted_by_node(anyio_backend: str):
    specs = [
        ProcessSpec(name=str(rank), role="trainer", command=("x",), environment={}, log_path=Path("x")) for rank in range(4)
    ]
    places = [AgentPlace(address="10.0.0.1", node=node, agentrl="1") for node in ("b", "a", "b", "a")]
    assert [places[at].node for at in order_by_node(specs, places)] == ["a", "a", "b", "b"]
