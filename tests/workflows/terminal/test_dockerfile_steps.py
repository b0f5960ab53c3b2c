"""The instructions of a task's Dockerfile are carried out in their order, where the files of the image lead."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest

from agentrl.errors import EnvironmentFault
from agentrl_sandbox.containers import Containers, open_containers
from agentrl_sandbox.harbor.task import read_harbor_folder
from agentrl_workflows.terminal.benches import TaskBenches
from tests.support.terminal import SCRIPT_LIMITS

pytestmark = [pytest.mark.anyio, pytest.mark.starts]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def write_task(folder: Path, *lines: str, files: Collection[str] = ("a.txt",)) -> Path:
    for part in ("environment", "tests"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    (folder / "task.toml").write_text('schema_version = "1.1"\n[environment]\nenv = {OF_TASK = "1"}\n')
    (folder / "instruction.md").write_text("Look.\n")
    (folder / "tests" / "test.sh").write_text("true\n")
    for name in files:
        (folder / "environment" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "environment" / name).write_text(f"{name}\n")
    (folder / "environment" / "Dockerfile").write_text("\n".join(["FROM debian:12", *lines, ""]))
    return folder


async def seen(benches: TaskBenches, folder: Path, script: str) -> str:
    """Return what a script prints in the working directory of a task."""
    harbor = read_harbor_folder(folder)
    async with benches.opened(harbor, SCRIPT_LIMITS) as bench:
        run = bench.run(directory=harbor.image.workdir, environment=harbor.image.env)
        async with run as container:
            return (await container.execute(["/bin/bash", "-c", script])).text


def images(containers: Containers, *, has_packages: Collection[str] = ()) -> TaskBenches:
    return TaskBenches(containers, has_packages=has_packages)


async def test_instructions_run_in_the_order_of_the_file(tmp_path: Path) -> None:
    folder = write_task(
        tmp_path,
        "RUN mkdir -p /data && ln -s /data /opt/link && echo old > /data/b.txt",
        "COPY a.txt /data",
        "COPY a.txt b.txt /opt/link/",
        "COPY tree /opt/link",
        "WORKDIR /opt/link/work",
        "ENV PATH=/opt/link:$PATH GREETING='hello  there'",
        "COPY --chmod=750 --chown=app:app tool /opt/link/tool",
        "RUN <<END",
        "#!/bin/bash",
        'echo "$GREETING $OF_TASK" > "$(pwd)/said"',
        "END",
        'SHELL ["/bin/bash", "-c"]',
        "RUN [[ -x /data/tool ]] && cat <<'END' >> said",
        "$0",
        "END",
        "COPY <<END new",
        "$GREETING",
        "END",
        files=("a.txt", "b.txt", "tool", "tree/deep/c.txt"),
    )
    async with open_containers(images={"debian:12": None}) as containers:
        said = await seen(images(containers), folder, "pwd -P; cat *; cat /data/a.txt /data/b.txt; stat -c %a /data/tool")
        assert said.splitlines() == [
            "/data/work",
            *["hello  there", "hello  there ", "$0"],
            *["a.txt", "b.txt", "750"],
        ]
        assert "link -> /data" in await seen(images(containers), folder, "ls -l /opt; cat /data/deep/c.txt")


async def test_layers_are_shared_by_instructions_and_contents(tmp_path: Path) -> None:
    number = "RUN head -c 16 /dev/urandom | sha256sum > /opt/id"
    one = write_task(tmp_path / "one", number, "COPY a.txt /x/")
    two = write_task(tmp_path / "two", "# the same", number, "COPY a.txt /y/", "RUN cp /opt/id /y/id")
    three = write_task(tmp_path / "three", "COPY a.txt /x/", number)
    async with open_containers(images={"debian:12": None}) as containers:
        benches = images(containers)
        first = await seen(benches, one, "cat /opt/id /x/a.txt")
        assert first == await seen(benches, one, "cat /opt/id /x/a.txt")
        second = await seen(benches, two, "cat /y/id /y/a.txt")
        assert second == first.replace("one", "two")
        third = await seen(benches, three, "cat /opt/id")
        assert third == await seen(benches, three, "cat /opt/id")
        assert third not in first
        (three / "environment" / "a.txt").write_text("another text\n")
        assert third != await seen(benches, three, "cat /opt/id")
        assert await seen(benches, three, "cat /x/a.txt") == "another text"


async def test_a_command_that_fails_is_a_fault_that_names_its_line(tmp_path: Path) -> None:
    folder = write_task(tmp_path, "RUN true", "RUN echo because >&2; exit 3")
    async with open_containers(images={"debian:12": None}) as containers:
        with pytest.raises(EnvironmentFault, match=r"Dockerfile:3: RUN echo because.*: because\n\[exit status 3\]"):
            await seen(images(containers), folder, "true")


async def test_a_command_that_needs_a_network_is_not_run_where_the_image_has_the_packages(tmp_path: Path) -> None:
    folder = write_task(tmp_path, "RUN apt-get update && touch /opt/ran", "RUN touch /opt/other")
    async with open_containers(images={"debian:12": None}) as containers:
        with pytest.raises(EnvironmentFault, match="Dockerfile:2: RUN apt-get needs a network"):
            await seen(images(containers), folder, "true")
        assert await seen(images(containers, has_packages=["debian:12"]), folder, "ls /opt") == "other"
