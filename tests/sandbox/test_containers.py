"""A container writes to layers of its own, and what one run left cannot touch the next."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import anyio
import pytest
from anyio.abc import TaskStatus

from agentrl.errors import ConfigError, EnvironmentFault
from agentrl_sandbox import Ending
from agentrl_sandbox.containers import BubblewrapContainers, Workbench, open_containers
from agentrl_sandbox.containers.prepared import PreparedLayers
from agentrl_sandbox.containers.protocol import CONTAINER_LIMITS

pytestmark = [pytest.mark.starts, pytest.mark.anyio]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def containers() -> AsyncGenerator[BubblewrapContainers]:
    async with open_containers() as opened:
        yield opened


async def test_files_of_layers_are_there_and_changes_are_the_newest_layer(containers: BubblewrapContainers) -> None:
    async with containers.workbench() as bench:
        await bench.add({"/app/notes.txt": b"hello", "/data/x": b"1"})
        async with bench.run(directory="/app", environment={"MODE": "work"}) as container:
            assert (await container.shell("pwd; cat notes.txt; echo $MODE; id -u")).stdout == b"/app\nhellowork\n0\n"
            await container.shell("rm notes.txt; echo 42 > answer.txt; ln -s /etc/passwd link; rm -r /data")
            await container.upload({"/app/deep/er.txt": b"up"})
            assert await container.download("/app/deep/er.txt", max_bytes=10) == b"up"
        assert await bench.changed() == ["/app", "/data"]
        assert await bench.read("/app/answer.txt") == b"42\n"
        with pytest.raises(OSError, match="link"):
            await bench.read("/app/link")
        async with bench.run() as container:
            assert (await container.shell("ls /app; ls -d /data")).stdout.split()[:3] == [b"answer.txt", b"deep", b"link"]


async def test_only_what_is_kept_reaches_the_next_run(containers: BubblewrapContainers) -> None:
    async with containers.workbench() as bench:
        await bench.add({"/etc/app/config": b"first"})
        async with bench.run() as container:
            await container.shell("echo second > /etc/app/config; echo evil > /etc/ld.so.preload; echo x > /root/.bashrc")
            await container.shell(
                "echo seen > /root/seen; touch /app/x; chmod 555 /app; mkdir -p /logs/verifier; "
                "echo 1 > /logs/verifier/reward.txt"
            )
            await container.shell("ln -s /logs /srv/link; rm -rf /opt; ln -s /etc /opt")
        await bench.keep(["/app", "/etc/app", "/opt", "/nowhere/at/all"], homes=["/root"])
        assert await bench.changed() == ["/app", "/etc", "/root"]
        async with bench.run() as container:
            said = await container.shell(
                "cat /etc/app/config; ls -A /root /logs; ls -d /etc/ld.so.preload /srv/link; ls -ld /app /opt"
            )
    lines = said.stdout.decode().splitlines()
    assert lines[0] == "second"
    assert "seen" in lines
    assert ".bashrc" not in lines
    assert "verifier" not in lines
    assert sum("No such file" in line for line in lines) == 2
    assert [line[:10] for line in lines[-2:]] == ["dr-xr-xr-x", "drwxr-xr-x"]


async def test_background_processes_end_with_their_run(containers: BubblewrapContainers) -> None:
    async with containers.workbench() as bench:
        async with bench.run() as container:
            await container.shell("setsid sh -c 'while :; do date >> /app/ticks; sleep 0.02; done' >/dev/null 2>&1 &")
            await container.shell("until [ -s /app/ticks ]; do :; done", timeout_s=60)
        before = await bench.read("/app/ticks", max_bytes=2**20)
        async with bench.run() as container:
            assert (await container.shell("ls /proc | grep -c '^[0-9]'")).stdout in (b"4\n", b"5\n")
            assert await container.download("/app/ticks", max_bytes=2**20) == before


async def test_a_full_disk_and_a_hanging_command_are_results(containers: BubblewrapContainers) -> None:
    limits = CONTAINER_LIMITS.model_copy(update={"work_mb": 4})
    async with containers.workbench(limits=limits) as bench, bench.run() as container:
        assert b"No space left" in (await container.shell("head -c 9999999 /dev/urandom > /app/big")).stdout
        hung = await container.shell("sleep 1000", timeout_s=0.2)
        assert hung.ended is Ending.TIMEOUT
        assert (await container.shell("echo still here")).stdout == b"still here\n"
        dead = await container.shell("kill -9 $$")
        assert dead.state_lost
        assert (await container.shell("pwd")).stdout == b"/\n"


async def test_a_container_has_no_way_out(containers: BubblewrapContainers, tmp_path: Path) -> None:
    await anyio.Path(tmp_path / "secret").write_text("top secret")
    async with containers.workbench() as bench, bench.run() as container:
        said = await container.shell(
            f"cat {tmp_path}/secret; ls /work /old_root; mount -t tmpfs x /mnt; unshare -U true; chroot / true; "
            "cat /etc/shadow; touch /usr/bin/x; cat /proc/sysrq-trigger; echo 1 > /proc/sys/kernel/panic; "
            "grep CapEff /proc/self/status; cat /proc/1/environ"
        )
    assert b"top secret" not in said.stdout
    assert b"CapEff:\t0000000000000000" in said.stdout
    refused = sum(said.stdout.count(word) for word in (b"ermission denied", b"not permitted", b"ead-only"))
    assert refused >= 5, said.stdout


async def test_nothing_is_left_of_workbenches_that_ran_or_were_cancelled() -> None:
    async with open_containers() as containers:

        async def play(*, task_status: TaskStatus[None]) -> None:
            async with containers.workbench() as bench, bench.run() as container:
                await container.shell("head -c 1000000 /dev/zero > /app/x")
                task_status.started()
                await container.shell("sleep 1000")

        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                await tasks.start(play)
            tasks.cancel_scope.cancel()
        folder = anyio.Path(containers.folder)
        assert [path async for path in folder.rglob("*")] == []
        assert str(folder) not in await anyio.Path("/proc/mounts").read_text()
    assert not await folder.exists()


async def test_an_image_that_is_not_there_is_named(tmp_path: Path, containers: BubblewrapContainers) -> None:
    with pytest.raises(ConfigError, match="no image 'debian:12'"):
        async with containers.workbench(image="debian:12"):
            pass
    async with open_containers(images={"a": str(tmp_path)}) as others:
        async with others.workbench():  # needs no image
            pass
        with pytest.raises(ConfigError, match="unpacked image"):
            async with others.workbench(image="a"):
                pass


async def test_output_arrives_while_a_program_runs(containers: BubblewrapContainers) -> None:
    async with containers.workbench() as bench, bench.run(directory="/app") as container:
        script = "pwd; until [ -e go ]; do :; done; echo last >&2; exit 3"
        pieces: list[bytes] = []
        async with container.stream(["sh", "-c", script], timeout_s=60) as stream:
            async for piece in stream:
                pieces.append(piece)
                await container.upload({"/app/go": b""})  # it waits for this, which its first output brings
        assert b"".join(pieces) == b"/app\nlast\n"
        assert (stream.result.ended, stream.result.exit_status, stream.cut_bytes) == (Ending.EXITED, 3, 0)


async def test_a_streamed_program_has_a_deadline_and_a_budget(containers: BubblewrapContainers) -> None:
    async with containers.workbench() as bench, bench.run() as container:
        async with container.stream(["sh", "-c", "yes | head -c 300000"], max_bytes=1000) as stream:
            kept = b"".join([piece async for piece in stream])
        assert (len(kept), stream.cut_bytes, stream.result.is_success) == (1000, 299_000, True)
        async with container.stream(["sleep", "1000"], timeout_s=0.3) as stream:
            assert [piece async for piece in stream] == []
        assert stream.result.ended is Ending.TIMEOUT
        async with container.stream(["sh", "-c", "echo $$; exec sleep 1000"]) as stream:
            pid = int(await anext(aiter(stream)))
        assert (await container.shell(f"kill -0 {pid}")).exit_status == 1  # the block has ended it
        async with container.stream(["/nowhere"]) as stream:
            assert b"not found" in b"".join([piece async for piece in stream])
        assert stream.result.exit_status == 127
        async with container.stream(["sh", "-c", "kill -9 $$"]) as stream:
            assert [piece async for piece in stream] == []
        assert (stream.result.ended, stream.result.signal) == (Ending.KILLED, 9)


async def test_a_snapshot_begins_other_workbenches(containers: BubblewrapContainers) -> None:
    async with containers.workbench() as bench:
        await bench.add({"/app/first": b"1", "/data/old": b"x", "/gone": b"y"})
        async with bench.run() as container:
            await container.shell(
                "rm /gone; rm -r /data; mkdir /data; echo new > /data/new; ln -s /etc/passwd /app/link; mkfifo /app/pipe; "
                "echo secret > /app/closed; chmod 000 /app/closed; mkdir /app/deep; echo 2 > /app/deep/second; "
                "chmod 500 /app/deep; chmod 755 /app/first"
            )
            with pytest.raises(ConfigError, match="end it first"):
                await bench.snapshot()
        snapshot = await bench.snapshot()
    look = "ls -A /data /app; cat /app/first /app/deep/second; readlink /app/link; stat -c %a /app/closed /app/deep"
    for _ in range(2):
        async with containers.workbench() as other:
            await other.restore(snapshot)
            async with other.run() as container:
                said = (await container.shell(f"{look}; ls /gone")).stdout.decode().splitlines()
                await container.shell("echo changed > /app/first")
            assert said[:7] == ["/app:", "closed", "deep", "first", "link", "pipe", ""], said
            assert said[7:13] == ["/data:", "new", "12", "/etc/passwd", "0", "500"], said
            assert "No such file" in said[-1]
        with pytest.raises(ConfigError, match="snapshot of a workbench"):
            async with containers.workbench() as other:
                await other.restore(b"something else")


async def test_few_start_at_a_time_and_many_run() -> None:
    async with open_containers(max_starting=1, max_open=12) as containers:
        running = 0
        all_run = anyio.Event()

        async def play() -> None:
            nonlocal running
            async with containers.workbench() as bench, bench.run() as container:
                running += 1
                if running == 12:
                    all_run.set()
                await all_run.wait()
                assert (await container.shell("echo here")).stdout == b"here\n"

        with anyio.fail_after(300):
            async with anyio.create_task_group() as tasks:
                for _ in range(12):
                    tasks.start_soon(play)


async def test_a_preparation_runs_once_for_many_workbenches(containers: BubblewrapContainers) -> None:
    prepared = PreparedLayers(prepare_s=120)

    async def prepare(bench: Workbench) -> None:
        async with bench.run() as container:
            await container.shell("date +%s%N > /etc/prepared")

    seen: list[bytes] = []

    async def play() -> None:
        async with containers.workbench() as bench:
            await prepared.begin("a task", bench, prepare)
            async with bench.run() as container:
                seen.append((await container.shell("cat /etc/prepared")).stdout)

    async with anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(play)
    assert (len(seen), len(set(seen)), prepared.num_prepared) == (4, 1, 1)


async def test_a_preparation_has_a_budget_and_is_not_kept_over_it(containers: BubblewrapContainers) -> None:
    prepared = PreparedLayers(prepare_s=0.2)

    async def prepare(bench: Workbench) -> None:
        del bench
        await anyio.sleep_forever()

    for _ in range(2):
        async with containers.workbench() as bench:
            with pytest.raises(EnvironmentFault, match=r"preparation of a task took more than 0\.2 s"):
                await prepared.begin("a task", bench, prepare)
    assert prepared.num_prepared == 0


@pytest.mark.parametrize("path", ["/usr/src/app/", "/usr/local/bin/tool", "/bin/tool", "/usr"])
async def test_a_file_in_the_read_only_part_of_the_default_root_is_refused_by_its_path(path: str) -> None:
    async with open_containers() as containers, containers.workbench() as bench:
        with pytest.raises(ConfigError, match=f"'{path}'.* is in /usr of this machine.*`images`"):
            await bench.add({path: b"1"})
