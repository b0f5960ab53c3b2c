"""Images of tasks that docker and podman build themselves: what Docker can build, once, and what cannot be built by name."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import tarfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from agentrl.commands.validate import TaskValidation
from agentrl.config import parse_config
from agentrl_sandbox.containers.services.building import LABEL
from agentrl_testing import play_async
from agentrl_workflows.terminal import TerminalCommand
from tests.support.container_engines import Engine

pytestmark = [pytest.mark.external, pytest.mark.timeout(900)]
STAGES = """\
# What the sandbox cannot do step by step, and Docker can.
ARG BASE=debian:12
FROM $BASE AS tools
RUN mkdir /made && echo 40 > /made/number
FROM debian:12
SHELL ["/bin/bash", "-c"]
ARG MORE=2
ENV KIND=kept PATH=/opt/tools:$PATH
WORKDIR /srv/work
COPY --from=tools /made/number /opt/tools/number
COPY . ./
RUN [[ -f left.txt && ! -e ignored.txt ]] && mkdir -p /opt/tools && install -m 755 /dev/null /opt/tools/more && \\
    printf '#!/bin/sh\\necho $(( $(cat /opt/tools/number) + %s ))\\n' $MORE > /opt/tools/more
USER nobody
USER root
ENTRYPOINT ["/bin/false"]
"""
TEST = """\
#!/bin/bash
if [ "$(pwd)" = /srv/work ] && [ "$KIND" = kept ] && [ "$(cat answer.txt)" = 42 ] && [ "$(more)" = 42 ]; then
  echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


@pytest.fixture(params=["docker", "docker with BuildKit", "podman"])
def builder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Each engine, and docker with each of its builders."""
    name, *buildkit = request.param.split(" with ")
    engine: Engine = request.getfixturevalue(f"{name}_engine")
    if name == "docker":
        monkeypatch.setenv("DOCKER_BUILDKIT", "1" if buildkit else "0")
        old = Path("/usr/bin/docker")  # Debian's, whose BuildKit needs no buildx
        if buildkit and old.exists():
            return engine._replace(command=(str(old), *engine.command[1:]))
    return engine


def write_task(folder: Path, dockerfile: str, *, toml: str = "", test: str = TEST) -> dict[str, str]:
    for part in ("environment", "tests", "solution"):
        (folder / part).mkdir(parents=True)
    (folder / "task.toml").write_text(f'schema_version = "1.1"\n{toml}')
    (folder / "instruction.md").write_text("Write the number.\n")
    (folder / "environment" / "Dockerfile").write_text(dockerfile)
    (folder / "tests" / "test.sh").write_text(test)
    (folder / "solution" / "solve.sh").write_text("more > answer.txt\n")
    return {"question": "Write the number.", "folder": str(folder)}


def write_stages(folder: Path) -> dict[str, str]:
    task = write_task(folder, STAGES)
    for name, text in ((".dockerignore", "ignored.txt\n"), ("left.txt", ""), ("ignored.txt", "")):
        (folder / "environment" / name).write_text(text)
    return task


def arguments(engine: Engine, command: str, **further: object) -> dict[str, Any]:
    containers = engine.containers(build_network="none", **further)
    return {"command": ["bash", "-c", command], "containers": containers, "no_call": "allow"}


async def reward(engine: Engine, task: dict[str, str], command: str, **further: object) -> object:
    """Return what an agent of one command is paid, or why its episode failed."""
    played = await play_async(TerminalCommand, task, [], workflow_args=arguments(engine, command, **further))
    return played.final_reward if played.failure is None else played.failure.message


@contextmanager
def built(engine: Engine, caplog: pytest.LogCaptureFixture, count: int) -> Generator[None]:
    """Check how many images the block lets the engine build."""
    caplog.clear()
    with caplog.at_level(logging.INFO, "agentrl_sandbox.containers.services.building"):
        yield
    said = [line for line in caplog.messages if f"{engine.name} built the image of" in line]
    assert len(said) == count, caplog.messages


async def test_what_docker_can_build_is_built_once_and_its_tests_pay(
    builder: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = write_stages(tmp_path / "one"), write_stages(tmp_path / "two")
    with built(builder, caplog, 1):
        assert await reward(builder, one, "more > answer.txt") == 1.0
    with built(builder, caplog, 0):
        assert await reward(builder, one, "true") == 0.0
        assert await reward(builder, two, "more > answer.txt") == 1.0
    (tmp_path / "two" / "environment" / "left.txt").write_text("other")
    with built(builder, caplog, 1):
        assert await reward(builder, two, "more > answer.txt") == 1.0
    assert builder.left() == []
    builder.said("image", "prune", "--all", "--force", "--filter", f"label={LABEL}")


async def test_tests_have_the_image_of_their_own_dockerfile_and_a_named_image_keeps_what_it_says(
    builder: Engine, tmp_path: Path
) -> None:
    apart = '[verifier.environment]\nworkdir = "/judge"\n'
    judge = '[ -e /tests/made ] && [ ! -e /root/agent ] && [ "$OWN" = yes ] && cat /logs/artifacts/n'
    task = write_task(tmp_path / "task", STAGES, toml=apart, test=f"{judge} > /logs/verifier/reward.txt\n")
    (tmp_path / "task" / "environment" / "left.txt").touch()
    (tmp_path / "task" / "environment" / ".dockerignore").write_text("ignored.txt\n")
    tests = ("FROM debian:12 AS a", "RUN echo > /made", "FROM debian:12", "ENV OWN=yes", "COPY --from=a /made /tests/made")
    (tmp_path / "task" / "tests" / "Dockerfile").write_text("\n".join([*tests, "COPY . /tests\n"]))
    agent = "touch /root/agent; mkdir -p /logs/artifacts; more > x; [ $(cat x) = 42 ] && echo 1 > /logs/artifacts/n"
    assert await reward(builder, task, agent) == 1.0
    tag = "localhost/named:1"
    own = ("--runtime", builder.runtime) if builder.runtime else ()
    form = ("--format", "docker") if builder.name == "podman" else ()
    builder.said(*own, "build", *form, "--network", "none", "--tag", tag, str(tmp_path / "task" / "environment"))
    named = write_task(tmp_path / "named", "FROM none\nRUN false\n", toml=f'[environment]\ndocker_image = "{tag}"\n')
    assert await reward(builder, named, "more > answer.txt") == 1.0


async def test_a_build_that_fails_is_named_with_its_last_lines_and_the_others_go_on(
    builder: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_task(tmp_path / "bad", "FROM debian:12\nRUN for n in $(seq 40); do echo line $n; done; echo gone >&2; exit 7\n")
    write_stages(tmp_path / "good")
    run = {
        "workflow": "agentrl_workflows.terminal:TerminalCommand",
        "workflow_args": arguments(builder, "true"),
        "tasks": {"path": str(tmp_path), "format": "harbor"},
        "model": {"path": "none"},
    }
    with caplog.at_level(logging.INFO, "agentrl_sandbox.containers.services.building"):
        report = await TaskValidation(parse_config(run)).check()
    assert (report.counts["train"].tasks, report.counts["train"].full) == (2, 1)
    assert {finding.where for finding in report.findings} == {"train task bad"}
    for finding in report.findings:
        said = finding.detail
        assert f"{tmp_path}/bad/environment: {builder.name} cannot build its image at " in said
        assert "for n in" in said
        assert "line 40" in said
        assert "gone" in said
        assert "line 2\n" not in said
    begun = [line for line in caplog.messages if f"{builder.name} builds the image of {tmp_path}/bad" in line]
    assert len(begun) == 1
    with anyio.fail_after(120):
        await until(lambda: builder.left() == [])


async def test_a_build_that_hangs_ends_at_its_deadline_and_leaves_no_process(builder: Engine, tmp_path: Path) -> None:
    task = write_task(tmp_path / "late", "FROM debian:12\nRUN echo begun && sleep 98765\n")
    said = str(await reward(builder, task, "true", build_s=10))
    assert f"late/environment: {builder.name} did not build its image within 10 s (containers.build_s)" in said
    with anyio.fail_after(120):
        await until(lambda: not processes("sleep\x0098765"))
        await until(lambda: builder.left() == [])


async def test_an_image_of_another_architecture_is_refused(builder: Engine, tmp_path: Path) -> None:
    builder.said("load", "--input", str(write_image(tmp_path / "other.tar", "other:1", "s390x")))
    named = write_task(tmp_path / "named", STAGES, toml='[environment]\ndocker_image = "other:1"\n')
    assert "the image 'other:1': expected an image for" in str(await reward(builder, named, "true"))
    said = str(await reward(builder, write_task(tmp_path / "built", "FROM other:1\nENV A=1\n"), "true"))
    assert "built/environment: " in said
    assert "got one for s390x" in said or "cannot build its image at" in said  # BuildKit looks for one of its own


def write_image(file: Path, name: str, architecture: str) -> Path:
    """Write an archive, as `save` does, of an image with one empty file."""
    layer = archive_of({"a": b""})
    config = {
        **{"architecture": architecture, "os": "linux", "config": {}},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    files = {"config.json": config, "manifest.json": manifest}
    file.write_bytes(archive_of({"layer.tar": layer} | {key: json.dumps(value).encode() for key, value in files.items()}))
    return file


def archive_of(files: dict[str, bytes]) -> bytes:
    found = io.BytesIO()
    with tarfile.open(fileobj=found, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return found.getvalue()


def processes(words: str) -> list[str]:
    """Return the processes of this machine whose command holds these words."""
    found: list[str] = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += [str(place)] if words.encode() in place.read_bytes() else []
        except OSError:
            continue
    return found


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():  # noqa: ASYNC110 - nobody tells
        await anyio.sleep(0.1)
