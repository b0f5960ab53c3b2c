"""Builds of images by an engine that is a script: what is built once, what is refused, and what a failure says."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from agentrl.config import parse_config
from agentrl.data.load import load_tasks
from agentrl.errors import ConfigError, EnvironmentFault
from agentrl.plan.checks import task_remarks
from agentrl.support.concurrency import task_group
from agentrl_sandbox.containers.config import read_containers_config
from agentrl_sandbox.containers.image_facts import engine_builds
from agentrl_sandbox.containers.protocol import BuiltImage, MissingImage
from agentrl_sandbox.containers.services.build_context import base_images, context_digest, with_images
from agentrl_sandbox.containers.services.build_output import BuildOutput
from agentrl_sandbox.containers.services.building import ImageBuilder
from agentrl_sandbox.harbor.built import read_built_task
from agentrl_workflows.terminal import TerminalAgent
from tests.support.harbor import write_task

ENGINE = """#!/bin/sh
here=$(dirname "$0")
for last; do :; done
case "$1 $2" in
  "version "*) echo amd64;;
  "buildx version") exit 1;;
  "image inspect")
    [ -e "$here/has-$(echo "$last" | tr /: __)" ] || { echo "no such image" >&2; exit 1; }
    case "$4" in
      *config*) printf '{"architecture": "%s", "config": ' "$(cat "$here/architecture")"
        cat "$here/config"; echo '}';;
      *) echo "sha256:$last";;
    esac;;
  "build --tag")
    echo "$*" >> "$here/builds"
    echo "Step 1/2 : FROM debian:12"
    if [ -e "$last/fails" ]; then echo "Step 2/2 : RUN false"; echo "went wrong" >&2; exit 3; fi
    case "$*" in *"--file "*) sed -n 1p "$(echo "$*" | sed 's/.*--file \\([^ ]*\\) .*/\\1/')" >> "$here/files";; esac
    : > "$here/has-$(echo "$3" | tr /: __)";;
  "tag "*) ;;
esac
"""
CONFIG = '{"Env": ["PATH=/opt/bin:/bin", "A=1"], "WorkingDir": "/srv", "User": ""}'
DOCKER: Mapping[str, Any] = {"backend": "docker", "image": "debian:12"}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Script:
    """An engine that has the images it is given, and builds what it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.command = (str(folder / "docker"),)
        self.write("docker", ENGINE)
        (folder / "docker").chmod(0o755)
        self.write("config", CONFIG)
        self.write("architecture", "amd64")

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def lines(self, name: str) -> list[str]:
        file = self.folder / name
        return file.read_text().splitlines() if file.exists() else []

    @asynccontextmanager
    async def builder(self, **given: object) -> AsyncGenerator[ImageBuilder]:
        async with task_group() as tasks:
            settings: dict[str, Any] = {"images": {}, "missing": {}, **given}
            yield ImageBuilder("docker", self.command, tasks, **settings)
            tasks.cancel_scope.cancel()


@pytest.fixture
def script(tmp_path: Path) -> Script:
    return Script(tmp_path / "engine")


def write_context(folder: Path, dockerfile: str = "FROM debian:12\nRUN true\n", **files: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "Dockerfile").write_text(dockerfile)
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.anyio
@pytest.mark.starts
async def test_folders_with_the_same_contents_share_one_build_now_and_later(script: Script, tmp_path: Path) -> None:
    folders = [write_context(tmp_path / name) for name in "abc"]
    found: list[BuiltImage] = []

    async def ask(folder: Path) -> None:
        found.append(await builder.built_from(folder, timeout_s=600))

    async with script.builder() as builder:
        async with anyio.create_task_group() as asking:
            for folder in folders * 2:
                asking.start_soon(ask, folder)
        assert len({image.image for image in found}) == 1
        assert (found[0].env, found[0].workdir) == ({"PATH": "/opt/bin:/bin", "A": "1"}, "/srv")
        assert len(script.lines("builds")) == builder.num_built == 1
    (folders[1] / "Dockerfile").write_text("FROM debian:12\nRUN :\n")
    async with script.builder() as builder:
        assert await builder.built_from(folders[0], timeout_s=600) == found[0]
        assert (await builder.built_from(folders[1], timeout_s=600)).image != found[0].image
    assert len(script.lines("builds")) == 2
    script.write("has-debian_12", "")
    async with script.builder() as builder:  # what it begins with is another image now
        await builder.built_from(folders[0], timeout_s=600)
    assert len(script.lines("builds")) == 3


@pytest.mark.anyio
@pytest.mark.starts
async def test_a_build_that_failed_is_not_tried_again_in_the_run(script: Script, tmp_path: Path) -> None:
    bad, good = write_context(tmp_path / "bad", fails=""), write_context(tmp_path / "good")
    async with script.builder() as builder:
        for _ in range(2):
            with pytest.raises(
                EnvironmentFault, match=r"bad: docker cannot build its image at Step 2/2 : RUN false"
            ) as caught:
                await builder.built_from(bad, timeout_s=600)
            assert "\n  went wrong" in str(caught.value)
        assert (await builder.built_from(good, timeout_s=600)).workdir == "/srv"
    assert len(script.lines("builds")) == 2


@pytest.mark.anyio
@pytest.mark.starts
async def test_images_of_the_run_file_take_the_place_of_those_of_the_dockerfile(script: Script, tmp_path: Path) -> None:
    folder = write_context(tmp_path / "a", "FROM python:3 AS base\nFROM base\n")
    async with script.builder(images={"python:3": "mine:1", "debian:12": None}, network="host") as builder:
        await builder.built_from(folder, timeout_s=600)
    assert script.lines("files") == ["FROM mine:1 AS base"]
    assert "--network host --force-rm --file " in script.lines("builds")[0]
    missing = {"mine:1": ConfigError("no mine:1; pull it")}
    async with script.builder(images={"python:3": "mine:1"}, missing=missing) as builder:
        with pytest.raises(MissingImage, match="no mine:1; pull it"):
            await builder.built_from(folder, timeout_s=600)


@pytest.mark.anyio
@pytest.mark.starts
@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("architecture", "arm64", "environment: expected an image for amd64.*got one for arm64; take an image for amd64"),
        ("config", '{"User": "app"}', "environment: expected an image of root.*got USER app; end its Dockerfile with"),
    ],
)
async def test_an_image_that_no_container_runs_is_refused(
    script: Script, tmp_path: Path, name: str, text: str, said: str
) -> None:
    folder = write_task(tmp_path / "task")
    script.write(name, text)
    async with script.builder() as builder:
        with pytest.raises(EnvironmentFault, match=said):
            await read_built_task(folder, builder)


@pytest.mark.anyio
@pytest.mark.starts
async def test_a_task_has_what_its_images_say(script: Script, tmp_path: Path) -> None:
    folder = write_task(tmp_path / "built", dockerfile="FROM a\nFROM b\nCOPY --from=a /x /\n")
    named = write_task(tmp_path / "named", '[environment]\ndocker_image = "mine:1"\nworkdir = "in"\n', "FROM a\nENV B=2\n")
    apart = write_task(tmp_path / "apart", '[verifier.environment]\nworkdir = "/judge"\n')
    (apart / "tests" / "Dockerfile").write_text("FROM c\nADD https://x.org/y /\n")
    script.write("has-mine_1", "")
    async with script.builder() as builder:
        task = await read_built_task(folder, builder)
        assert task.image.image is not None
        assert task.image.image.startswith("localhost/agentrl-task:")
        assert (task.image.workdir, task.image.env["A"], task.image.steps) == ("/srv", "1", ())
        task = await read_built_task(named, builder)
        assert (task.image.image, task.image.workdir) == ("mine:1", "/srv/in")
        assert {"A": "1", "B": "2"}.items() <= task.image.env.items()
        task = await read_built_task(apart, builder)
        assert task.judge is not None
        assert task.for_judge().image.workdir == "/judge"
        assert task.for_judge().image.image not in (None, task.image.image)


@pytest.mark.anyio
@pytest.mark.starts
async def test_a_build_goes_on_when_who_asked_for_it_has_ended(script: Script, tmp_path: Path) -> None:
    os.mkfifo(script.folder / "gate")
    script.write("docker", ENGINE.replace('  "build --tag")', '  "build --tag") read x < "$here/gate"'))
    folder = write_context(tmp_path / "a")
    async with script.builder() as builder:
        async with anyio.create_task_group() as asking:
            asking.start_soon(lambda: builder.built_from(folder, timeout_s=600))
            await anyio.wait_all_tasks_blocked()
            asking.cancel_scope.cancel()
        await anyio.to_thread.run_sync((script.folder / "gate").write_text, "\n")
        await builder.built_from(folder, timeout_s=600)
    assert len(script.lines("builds")) == 1


def test_the_digest_of_a_folder_is_that_of_its_files_and_modes(tmp_path: Path) -> None:
    one, two = (write_context(tmp_path / name, a="1") for name in "xy")
    assert context_digest(one) == context_digest(two)
    (two / "a").chmod(0o755)
    changed = context_digest(two)
    (two / "a").write_text("2")
    assert len({context_digest(one), changed, context_digest(two)}) == 3
    os.mkfifo(two / "pipe")
    with pytest.raises(ConfigError, match="pipe: expected files, directories and links"):
        context_digest(two)


def test_bases_are_read_and_replaced_but_stages_are_not() -> None:
    text = "from --platform=$BUILDPLATFORM a:1 as Build\nFROM build\nFROM $BASE\nFROM scratch\nFROM b\n"
    assert base_images(text) == ["a:1", "b"]
    replaced = with_images(text, {"*": "c"})
    assert replaced == text.replace("a:1", "c").replace("FROM b\n", "FROM c\n")


def test_of_an_output_of_any_length_the_last_lines_stay() -> None:
    output = BuildOutput()
    for step in ("Step 3/9 : RUN a", "[1/2] STEP 4/9: RUN b", "#7 [build 5/9] RUN c", "#7 [5/9] RUN c"):
        output.take(f"\x1b[1m{step}\x1b[0m\nmore".encode())
        assert output.step.endswith(step[-5:])
        output.take(b"\n")
    output.take(b"#8 [internal] load 1/1\n#8 sha256:00\n#8 DONE 0.1s\n")
    assert output.last_lines().splitlines()[-1] == "  more"
    for number in range(100):
        output.take(b"x" * 100_000 + f"\r{number}\nno space left on device".encode())
        output.take(b"\n")
    assert len(output.last_lines()) < 7_000
    assert output.last_lines().splitlines()[-2:] == ["  99", "  no space left on device"]
    assert "RUN c" in output.step
    assert "image prune" in output.hint()


@pytest.mark.parametrize(
    ("containers", "builds"),
    [
        (None, False),
        ({"hosts": ["http://x:1"]}, False),
        (DOCKER, True),
        ({**DOCKER, "backend": "podman"}, True),
        ({**DOCKER, "build": "steps"}, False),
    ],
)
def test_an_engine_builds_unless_the_run_file_says_otherwise(containers: Mapping[str, Any] | None, builds: bool) -> None:
    assert engine_builds({"containers": containers}) is builds
    assert not engine_builds({"containers": containers, "has_packages": ["*"]})


def test_settings_of_builds_that_would_do_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="build_s: bubblewrap builds no images"):
        read_containers_config({"build_s": 3})
    with pytest.raises(ConfigError, match="has_packages: docker builds the images"):
        TerminalAgent(containers={**DOCKER, "build": "engine"}, has_packages=["*"])


def test_a_run_with_an_engine_takes_every_dockerfile_and_its_plan_counts_them(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_task(tmp_path / "set" / name, dockerfile="FROM a AS x\nRUN apt-get install -y vim\nFROM b\nUSER app\n")
    run: dict[str, Any] = {"workflow": "agentrl_workflows.terminal:TerminalAgent", "model": {"path": "m"}}
    run["tasks"] = {"path": str(tmp_path / "set"), "format": "harbor"}
    with pytest.raises(ConfigError, match="a build of several stages"):
        load_tasks(parse_config(run).tasks)
    run["workflow_args"] = {"containers": dict(DOCKER)}
    config = parse_config({**run, "tasks": {**run["tasks"], "eval": run["tasks"]}})
    assert len(load_tasks(config.tasks).finite) == 4
    said = (
        "docker builds 2 images from their Dockerfiles, where it does not have them yet, before the first episode over each"
    )
    assert task_remarks(config) == [said]
    (tmp_path / "set" / "b" / "environment" / "out").symlink_to("/etc/passwd")
    with pytest.raises(ConfigError, match="out is a link, and leads to /etc/passwd, out of"):
        load_tasks(parse_config(run).tasks)
