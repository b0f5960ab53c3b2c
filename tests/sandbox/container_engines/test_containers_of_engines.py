"""Containers of docker and podman: real engines, whose images have files of other users."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from agentrl.errors import ConfigError, EnvironmentFault
from agentrl_sandbox.containers import Containers
from agentrl_sandbox.containers.config import containers_of, read_containers_config
from agentrl_sandbox.containers.protocol import CONTAINER_LIMITS, MissingImage
from tests.support.container_engines import IMAGE, Engine, gvisor
from tests.support.echo import ASK, echo

pytestmark = [pytest.mark.external, pytest.mark.timeout(600)]
LIMITS = CONTAINER_LIMITS.model_copy(update={"wall_s": 120.0})
PATIENCE_S = 300


@asynccontextmanager
async def opened(
    engine: Engine, images: dict[str, str | None] | None = None, **further: object
) -> AsyncGenerator[Containers]:
    config = read_containers_config(engine.containers(**further))
    async with containers_of(config, images=images or {}, limits=LIMITS, max_open=4) as containers:
        yield containers


async def test_a_workbench_of_an_engine_does_what_one_here_does(engine: Engine) -> None:
    async with opened(engine) as containers:
        assert containers.name == engine.name
        async with containers.workbench() as bench:
            await bench.add({"/app/notes.txt": b"hello", "/data/x": b"1"})
            async with bench.run(directory="/app", environment={"MODE": "work"}) as container:
                assert (await container.shell("pwd; cat notes.txt; echo $MODE; id -u")).stdout == b"/app\nhellowork\n0\n"
                await container.shell(
                    "rm notes.txt /data/x /usr/bin/jq; echo 42 > answer.txt; ln -s /etc /app/link; mkdir deep"
                )
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
            await bench.keep(["/app", "/data", "/usr"], homes=["/root"])
            assert await bench.changed() == ["/app", "/data", "/root", "/usr"]
            snapshot = await bench.snapshot()
        async with containers.workbench() as bench:
            await bench.restore(snapshot)
            async with bench.run(directory="/app") as container:
                look = "cat answer.txt deep/er.txt; ls -A /data /root; ls /app/notes.txt; ls /etc/evil /usr/bin/jq"
                said = (await container.shell(look)).text
        for word in ("42", "up", "seen", "cannot access '/etc/evil'", "cannot access '/usr/bin/jq'"):
            assert word in said
        assert ".bashrc" not in said
    assert engine.left() == []


async def test_files_that_shut_their_owner_out_come_back_with_their_modes(engine: Engine) -> None:
    async with opened(engine) as containers, containers.workbench() as bench:
        async with bench.run() as container:
            await container.shell(
                "mkdir -p /app/a/b; cd /app; echo 1 > a/b/c; chmod 000 a/b/c a/b a; chmod 4755 /bin/sh; :> s"
            )
            await container.shell(
                "chmod 6711 s; ln s hard; mkfifo pipe; truncate -s 1M sparse; echo 2 > .wh.; echo 3 > .wh.s"
            )
        async with bench.run() as container:
            look = (
                "cd /app; stat -c '%a %s %n' a s hard sparse; chmod 700 a; chmod 700 a/b; stat -c %a a/b/c; chmod 400 a/b/c"
            )
            said = (await container.shell(f"{look}; cat a/b/c; ls")).text
        assert said.split() == [
            *("0", "4096", "a", "6711", "0", "s", "6711", "0", "hard", "644", "1048576", "sparse", "0", "1"),
            *("a", "hard", "s", "sparse"),
        ]


async def test_a_full_layer_is_taken_over_in_little_memory(engine: Engine) -> None:
    limits = LIMITS.model_copy(update={"memory_mb": 128, "work_mb": 96})
    async with opened(engine) as containers, containers.workbench(limits=limits) as bench:
        async with bench.run() as container:
            await container.shell(
                "mkdir /app; cd /app; for n in 1 2 3; do head -c 30000000 /dev/urandom > $n; done; cat 1 2 3 | md5sum > sum"
            )
        async with bench.run() as container:
            assert (await container.shell("cat /app/1 /app/2 /app/3 | md5sum | diff - /app/sum")).is_success


async def test_a_container_that_fills_its_memory_leaves_no_file_where_the_run_was_started(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    limits = LIMITS.model_copy(update={"memory_mb": 64})
    async with opened(engine) as containers, containers.workbench(limits=limits) as bench:
        async with bench.run() as container:
            filling = await container.execute(["python3", "-c", "x = [bytearray(1 << 20) for _ in range(1000)]"])
            assert not filling.is_success
            await container.execute(["/bin/sh", "-c", "mkdir /app; echo 1 > /app/after"])
        assert await bench.read("/app/after") == b"1\n"
    assert [entry async for entry in anyio.Path(tmp_path).iterdir()] == []


async def test_a_run_that_deletes_or_closes_what_others_own_is_no_fault(engine: Engine) -> None:
    hostile = (
        "rm -rf --no-preserve-root /",
        "chmod 000 / /var /app",
        "rm -rf /var /app",
        "mv /var /app/var",
        "chmod -R 000 /var /app /etc",
        "cd /app; touch .wh. .wh.. .wh... .wh..wh..opq '.wh.x'",
        "rm -rf /app /tmp /run /root; echo > /tmp; echo > /app",
    )
    async with opened(engine) as containers:
        for script in hostile:
            async with containers.workbench() as bench:
                await bench.add({"/app/x": b"1"})
                async with bench.run() as container:
                    await container.execute(["/bin/bash", "-c", script])
                async with bench.run() as container:
                    assert (await container.execute(["/bin/bash", "-c", "echo here"])).stdout in (b"here\n", b""), script
    assert engine.left() == []


async def test_a_missing_image_of_all_tasks_is_refused_and_another_where_a_task_needs_it(
    docker_engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    refusal = r"[Nn]o such image: nowhere.*pull it"
    with pytest.raises(ConfigError, match=refusal):
        async with opened(docker_engine, image="nowhere"):
            pass
    async with opened(docker_engine, {"a:1": "nowhere"}) as containers:
        assert re.search(refusal, caplog.text)
        async with containers.workbench() as bench, bench.run() as container:
            assert (await container.shell("echo here")).stdout == b"here\n"
        with pytest.raises(MissingImage, match=refusal):
            async with containers.workbench(image="a:1") as bench, bench.run():
                pass
        async with containers.workbench(image="elsewhere") as bench:
            with pytest.raises(EnvironmentFault, match="elsewhere"):
                async with bench.run():
                    pass


async def test_a_runtime_that_the_machine_lacks_is_refused_at_the_start(engine: Engine) -> None:
    with pytest.raises(ConfigError, match=f"{engine.name} runs no container of {IMAGE}"):
        async with opened(engine, runtime="/nowhere/runtime"):
            pass


async def test_containers_of_gvisor_do_what_others_do(docker_engine: Engine) -> None:
    async with opened(docker_engine, runtime=gvisor()) as containers, containers.workbench() as bench:
        await bench.add({"/app/x": b"1"})
        async with bench.run(directory="/app") as container:
            assert "gVisor" in (await container.shell("dmesg")).text
            await container.shell("echo 42 > answer; rm x; mkdir -m 000 closed")
        assert await bench.read("/app/answer") == b"42\n"
        async with bench.run(directory="/app") as container:
            assert (await container.shell("ls")).text.split() == ["answer", "closed"]
        async with echo() as served, bench.run(port=(8123, served.port)) as container:
            program = f"{ASK}\nassert ask(8123, b'x' * 3_000_000) == b'x' * 3_000_000"
            asked = await container.execute(["python3", "-c", program], timeout_s=100)
            assert asked.is_success, asked.text


async def test_programs_reach_the_port_and_no_other(engine: Engine) -> None:
    with anyio.fail_after(PATIENCE_S):
        async with echo() as served, opened(engine) as containers, containers.workbench() as bench:
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
            assert set(await bench.changed()) <= {"/usr"}  # Python keeps compiled files there


async def test_an_agent_that_ends_the_relay_loses_its_own_way_alone(engine: Engine) -> None:
    with anyio.fail_after(PATIENCE_S):
        async with echo() as served, opened(engine) as containers, containers.workbench() as bench:
            async with bench.run(port=(8123, served.port)) as container:
                await container.shell("exec 5<>/dev/tcp/127.0.0.1/8123; (while echo more >&5; do :; done) >/dev/null 2>&1 &")
                await until(lambda: bool(served.connected))
                killed = await container.shell(
                    "pkill -9 -f start_server; while pgrep -f start_server >/dev/null; do :; done"
                )
                assert killed.is_success, killed.text
                assert not (await container.shell("mkdir /app; echo on > /app/made; : <>/dev/tcp/127.0.0.1/8123")).is_success
                await until(lambda: not served.connected)
            assert "/app" in await bench.changed()


async def test_an_error_of_the_caller_stays_what_it_is(engine: Engine) -> None:
    async with opened(engine) as containers, containers.workbench() as bench:
        with pytest.raises(FileNotFoundError, match="mine"):
            async with bench.run(port=(8123, 80)):
                raise FileNotFoundError("mine")
    assert engine.left() == []


async def test_an_environment_without_a_free_port_is_a_fault(docker_engine: Engine) -> None:
    async with opened(docker_engine) as containers, containers.workbench() as bench:
        with pytest.raises(EnvironmentFault, match="the relay of port 99999 does not start"):
            async with bench.run(port=(99_999, 80)):
                pass


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():  # noqa: ASYNC110 - nobody tells
        await anyio.sleep(0.01)
