"""Containers of terminal tasks: the seconds of a start, many at once, what episodes leave behind, and placement on hosts.

Measures a bare start of bubblewrap and, in turn with it, a workbench with its container until its first command has run;
64 environments that all run at the same time; what 1,000 episodes leave in the temporary directory, /dev/shm, mounts and
processes; and 1,000 environments in flight over four hosts. The hosts speak HTTP for real, and their environments are a
plan: they start in 20 ms and hold no process, since no two cores run 1,000 real ones.

Run: `python -m benchmarks.containers [--episodes 1000]`. It prints and writes benchmarks/results/containers.json.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio

from agentrl.errors import EnvironmentFault
from agentrl_sandbox.bubblewrap.host import find_host
from agentrl_sandbox.containers import BubblewrapContainers, open_containers
from agentrl_sandbox.containers.fleet.fleet import open_fleet
from agentrl_sandbox.containers.protocol import CONTAINER_LIMITS
from agentrl_sandbox.containers.roots import CONTAINER_UID
from agentrl_sandbox.hosts.server import MAX_LIMITS, HostOptions, serving_host
from agentrl_sandbox.types import Limits
from benchmarks.machine import describe_machine
from benchmarks.sandbox import quantiles

RESULT = Path(__file__).parent / "results" / "containers.json"
AIM_OVER_BARE_MS = 150.0
AT_ONCE = 64
IN_FLIGHT = 1000
NUM_HOSTS = 4
LIMITS = CONTAINER_LIMITS.model_copy(update={"memory_mb": 128, "wall_s": 600.0})


def bare_start(bwrap: str, entry: tuple[str, ...]) -> float:
    """Return the seconds of a bubblewrap with namespaces of its own and nothing else."""
    words = ["--unshare-all", "--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin", "--symlink", "usr/lib", "/lib"]
    words += ["--symlink", "usr/lib64", "/lib64", "--proc", "/proc", "--dev", "/dev", "--", "/bin/true"]
    began = time.perf_counter()
    subprocess.run([*entry, bwrap, *words], check=True, env={})
    return time.perf_counter() - began


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of those that it has waited for."""
    used = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


async def starts(containers: BubblewrapContainers, count: int) -> dict[str, object]:
    """Return bare starts and those of environments, in turn, so that a busy machine slows both."""
    host = find_host()
    bare: list[float] = []
    opened: list[float] = []
    ran: list[float] = []
    cpu_s = 0.0
    for _ in range(count):
        bare.append(await anyio.to_thread.run_sync(bare_start, host.bwrap, host.entry(65_000)))
        began, cpu_began = time.perf_counter(), cpu_seconds()
        async with containers.workbench() as bench:
            opened.append(time.perf_counter() - began)
            async with bench.run(directory="/app") as container:
                result = await container.shell("echo 42")
                ran.append(time.perf_counter() - began)
        assert result.stdout == b"42\n", result
        cpu_s += cpu_seconds() - cpu_began
    over_ms = quantiles(ran)["p50_ms"] - quantiles(bare)["p50_ms"]
    return {
        "bare": quantiles(bare),
        "workbench": quantiles(opened),
        "first_command_done": quantiles(ran),
        "cpu_ms_of_one": round(1e3 * cpu_s / count, 1),
        "over_bare_p50_ms": round(over_ms, 1),
        "aim_over_bare_p50_ms": AIM_OVER_BARE_MS,
    }


async def many_at_once(containers: BubblewrapContainers) -> dict[str, object]:
    """Return how long it takes until `AT_ONCE` environments run at the same time, and how many faults there were."""
    running, faults = 0, 0
    all_run = anyio.Event()
    began = time.perf_counter()
    seconds = 0.0

    async def play() -> None:
        nonlocal running, faults, seconds
        try:
            async with containers.workbench() as bench, bench.run() as container:
                running += 1
                if running == AT_ONCE:
                    seconds = time.perf_counter() - began
                    all_run.set()
                await all_run.wait()
                assert (await container.shell("echo 42")).stdout == b"42\n"
        except EnvironmentFault:
            faults += 1
            all_run.set()

    async with anyio.create_task_group() as tasks:
        for _ in range(AT_ONCE):
            tasks.start_soon(play)
    return {"environments": AT_ONCE, "faults": faults, "all_run_after_s": round(seconds, 1)}


def left_behind() -> dict[str, int]:
    """Return what episodes could leave: bytes of /tmp and /dev/shm, mounts, processes and descriptors."""
    return {
        "tmp_bytes": bytes_below(Path(tempfile.gettempdir())),
        "shm_bytes": bytes_below(Path("/dev/shm"), owner=CONTAINER_UID),
        "mounts": len(Path("/proc/self/mounts").read_text().splitlines()),
        "processes": len(descendants(os.getpid())),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


def descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that they have."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(folder.name))
    found: list[int] = []
    todo = [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def bytes_below(folder: Path, owner: int | None = None) -> int:
    """Return the bytes of files below a folder; those of one user alone where other programs write there too."""
    found = [path.lstat() for path in folder.rglob("*") if not path.is_dir()]
    return sum(each.st_size for each in found if owner is None or each.st_uid == owner)


async def episodes(containers: BubblewrapContainers, count: int) -> dict[str, object]:
    """Play episodes that write files, leave daemons and links, and are judged; return what is left of them."""
    before = left_behind()
    limiter = anyio.CapacityLimiter(os.cpu_count() or 1)
    faults: list[str] = []

    async def play() -> None:
        async with limiter:
            try:
                await play_episode(containers)
            except EnvironmentFault as fault:
                faults.append(str(fault))

    began = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for _ in range(count):
            tasks.start_soon(play)
    seconds = time.perf_counter() - began
    after = left_behind()
    left = {name: after[name] - before[name] for name in before}
    return {"episodes": count, "faults": len(faults), "seconds": round(seconds, 1), "left_behind": left}


async def play_episode(containers: BubblewrapContainers) -> None:
    """Play one episode: an agent that leaves a daemon and files in /tmp, /dev/shm and /app, and tests that read one."""
    async with containers.workbench() as bench:
        await bench.add({"/app/notes.txt": b"6 * 7"})
        async with bench.run(directory="/app") as container:
            await container.shell("setsid sleep 1000 & head -c 100000 /dev/zero | tee /tmp/x /dev/shm/x > y; echo 42 > z")
        await bench.keep(["/app"])
        async with bench.run(directory="/app") as container:
            await container.execute(["sh", "-c", "cp z /logs/reward.txt"])
        assert await bench.read("/logs/reward.txt") == b"42\n"


class PlannedBench:
    """An environment that is a plan: it holds nothing."""


class PlannedContainers:
    """Environments that start in 20 ms and hold no process."""

    name = "planned"

    @asynccontextmanager
    async def workbench(self, *, image: str | None = None, limits: Limits | None = None) -> AsyncGenerator[PlannedBench]:
        """Open nothing."""
        del image, limits
        await anyio.sleep(0.02)
        yield PlannedBench()


async def in_flight() -> dict[str, object]:
    """Return how `IN_FLIGHT` environments spread over hosts, and how long it takes until all are open."""
    maxima = MAX_LIMITS.model_copy(update={"wall_s": 86_400.0})
    open_now = most = 0
    all_open = anyio.Event()
    placed: Counter[str] = Counter()
    async with AsyncExitStack() as stack:
        urls: list[str] = []
        for number in range(NUM_HOSTS):
            memory_mb = 128 * (200 + 50 * number)
            options = HostOptions(max_open=400, memory_mb=memory_mb, share=1.0, maxima=maxima, left_mb=-(10**6))
            containers = PlannedContainers()
            urls.append(await stack.enter_async_context(serving_host(options, containers=containers)))  # pyright: ignore[reportArgumentType]
        fleet = await stack.enter_async_context(open_fleet(urls, limits=LIMITS, max_open=IN_FLIGHT, max_starting=64))
        began = time.perf_counter()
        opened_s = 0.0

        async def play() -> None:
            nonlocal open_now, most
            async with fleet.workbench():
                open_now += 1
                most = max(most, open_now)
                if open_now == IN_FLIGHT:
                    placed.update({host.url: host.num_placed for host in fleet.hosts})
                    all_open.set()
                await all_open.wait()
                open_now -= 1

        async with anyio.create_task_group() as tasks:
            for _ in range(IN_FLIGHT):
                tasks.start_soon(play)
            await all_open.wait()
            opened_s = time.perf_counter() - began
        closed_s = time.perf_counter() - began - opened_s
    return {
        "environments": IN_FLIGHT,
        "hosts": NUM_HOSTS,
        "in_flight": most,
        "on_each_host": sorted(placed.values()),
        "all_open_after_s": round(opened_s, 1),
        "all_closed_after_s": round(closed_s, 1),
    }


async def measure(num_episodes: int) -> dict[str, object]:
    """Return every figure."""
    load = os.getloadavg()[0]
    planned = await in_flight()
    async with open_containers(limits=LIMITS, max_open=AT_ONCE) as containers:
        found = {
            "start": await starts(containers, 41),
            "at_once": await many_at_once(containers),
            "left": await episodes(containers, num_episodes),
        }
    return {"load_before": round(load, 1), "load_after": round(os.getloadavg()[0], 1), **found, "over_hosts": planned}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        tempfile.tempdir = folder  # so that the count holds this program's files only
        figures = anyio.run(measure, options.episodes)
    found = {"machine": describe_machine("anyio", "aiohttp"), **figures}
    options.output.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
