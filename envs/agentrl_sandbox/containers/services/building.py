"""Images that an engine builds from the folders of tasks: one build for all with the same contents, kept by the engine.

Invariant: an image has the digest of its folder, and of the images that it begins with, as its tag, so that no other
contents pass for it. A build that failed has failed for the whole run. No build outlives its block, and none its deadline.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import anyio
import anyio.to_thread
import msgspec
from anyio.abc import TaskGroup

from agentrl.errors import ConfigError, EnvironmentFault
from agentrl.support.concurrency import outside_work, task_group
from agentrl_sandbox.containers.image_facts import ImageFacts, facts_in
from agentrl_sandbox.containers.protocol import BuiltImage, MissingImage
from agentrl_sandbox.containers.services.build_context import base_images, context_digest, image_for, with_images
from agentrl_sandbox.containers.services.build_output import BuildOutput
from agentrl_sandbox.containers.services.engine_command import ask, watch
from agentrl_sandbox.docker import docker_variables

logger = logging.getLogger(__name__)
LABEL: Final = "agentrl=task"
"""Label of every built image; a user removes the images by it."""
_NAME: Final = "localhost/agentrl-task"
_TAG_CHARS: Final = 32
_TELL_S: Final = 30.0
"""Seconds between two log lines about one build."""
_INSPECT: Final = '{"architecture":{{json .Architecture}},"config":{{json .Config}}}'
_PASSED: Final = (
    "http_proxy",
    "https_proxy",
    "no_proxy",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "TMPDIR",
    "XDG_RUNTIME_DIR",
)
"""Variables of this process that the command of a build needs beside those of every command; Dockerfiles do not see them."""
_LAST_WITHIN: Final = 23
"""The first version of docker's command whose BuildKit is a program of its own, buildx."""


class _InspectedConfig(msgspec.Struct):
    User: str | None = None


class _Inspected(msgspec.Struct):
    architecture: str = ""
    config: _InspectedConfig | None = None


class _Build:
    """One image, and the wait for it."""

    def __init__(self) -> None:
        self.is_over = anyio.Event()
        self.image: BuiltImage | None = None
        self.error: EnvironmentFault | MissingImage | None = None


class ImageBuilder:
    """Builds images by the command of docker or podman.

    Args:
        engine: `docker` or `podman`.
        command: its words.
        tasks: in which builds run, so that the end of an episode ends none.
        images: what the engine calls the images that Dockerfiles begin with, where it has another name for them.
        missing: why images of `images` are not there, by the engine's names.
        runtime: of podman's builds; docker's have that of its daemon.
        network: of builds; None: the engine's default.
        max_building: builds at a time.
        build_s: seconds that each build has; None: those that its task gives.
    """

    def __init__(
        self,
        engine: str,
        command: tuple[str, ...],
        tasks: TaskGroup,
        *,
        images: Mapping[str, str | None],
        missing: Mapping[str, ConfigError],
        runtime: str | None = None,
        network: str | None = None,
        max_building: int = 2,
        build_s: float | None = None,
    ) -> None:
        self._engine, self._command, self._tasks = engine, command, tasks
        self._images, self._missing = dict(images), missing
        self._runtime, self._network, self._build_s = runtime, network, build_s
        self._building = anyio.Semaphore(max_building)
        self._builds: dict[Path, _Build] = {}
        self._described: dict[str, BuiltImage] = {}
        self._turns: dict[str, anyio.Lock] = {}
        """One for each tag: folders with the same contents wait for one build."""
        self._own: tuple[str, bool] | None = None
        """The engine's architecture, and whether its command builds with BuildKit."""
        self._asking = anyio.Lock()
        self.num_built = 0
        """Builds that ran to a good end."""

    async def built_from(self, folder: Path, *, timeout_s: float) -> BuiltImage:
        """Return the image of a folder with a Dockerfile, which is built where the engine does not have it.

        Raises:
            EnvironmentFault: it cannot be built; the message has the folder and the last lines of the engine.
            MissingImage: `images` names what it begins with, and that is not there.

        A cancelled call does not end the build; the next call gets its result.
        """
        build = self._builds.get(folder)
        if build is None:
            build = self._builds[folder] = _Build()
            self._tasks.start_soon(self._settle, build, folder, timeout_s)
        with outside_work():
            await build.is_over.wait()
        if build.image is None:
            assert build.error is not None
            raise type(build.error)(str(build.error)) from build.error
        return build.image

    async def described(self, name: str) -> BuiltImage | None:
        """Return what an image of the engine says of itself, by the name that tasks have for it; None: it is not there.

        Raises:
            EnvironmentFault: it is of another architecture.
        """
        if name not in self._described:
            found = await self._inspected(image_for(name, self._images), f"the image {name!r}")
            if found is None:
                return None
            self._described[name] = found
        return self._described[name]

    async def _settle(self, build: _Build, folder: Path, timeout_s: float) -> None:
        try:
            build.image = await self._image_of(folder, timeout_s)
        except (EnvironmentFault, MissingImage) as error:
            build.error = error
        except (ConfigError, OSError) as error:
            build.error = EnvironmentFault(str(error))
        finally:
            build.is_over.set()

    async def _image_of(self, folder: Path, timeout_s: float) -> BuiltImage:
        dockerfile = folder / "Dockerfile"
        written = await anyio.to_thread.run_sync(partial(dockerfile.read_text, encoding="utf-8", errors="surrogateescape"))
        text = with_images(written, self._images)
        for base in base_images(text):
            if base in self._missing:
                raise MissingImage(str(self._missing[base]))
        digest = await anyio.to_thread.run_sync(context_digest, folder)
        async with self._turns.setdefault(digest, anyio.Lock()), self._building:
            tag = await self._tag(digest, text)
            if (found := await self._inspected(tag, str(folder))) is not None:
                return found
            await self._build(folder, tag, None if text == written else text, timeout_s)
            self.num_built += 1
            # What the image begins with may have come with the build, and is known only now.
            if (later := await self._tag(digest, text)) != tag:
                await ask([*self._command, "tag", tag, later])
            found = await self._inspected(later, str(folder))
        if found is None:
            raise EnvironmentFault(f"{folder}: {self._engine} built the image {later}, and does not have it")
        return found

    async def _tag(self, digest: str, dockerfile: str) -> str:
        parts = [digest, *base_images(dockerfile)]
        for base in base_images(dockerfile):
            answer = await ask([*self._command, "image", "inspect", "--format", "{{.Id}}", base])
            parts.append(answer.text if answer.is_success else "")
        return f"{_NAME}:{_hex(parts)[:_TAG_CHARS]}"

    async def _inspected(self, image: str, whose: str) -> BuiltImage | None:
        answer = await ask([*self._command, "image", "inspect", "--format", _INSPECT, image])
        if not answer.is_success:
            return None
        try:
            found = msgspec.json.decode(answer.text, type=_Inspected)
        except msgspec.DecodeError as error:
            raise EnvironmentFault(
                f"{whose}: `{self._engine} image inspect {image}` says {answer.text:.200}: {error}"
            ) from error
        own, _ = await self._abilities()
        if found.architecture and found.architecture != own:
            raise EnvironmentFault(
                f"{whose}: expected an image for {own}, the architecture of {self._engine} here, got one for "
                f"{found.architecture}; take an image for {own}, or leave the task out"
            )
        user = (found.config or _InspectedConfig()).User or ""
        facts: ImageFacts = facts_in(answer.text.encode())
        return BuiltImage(image=image, env=facts.env, workdir=facts.workdir, user=user.partition(":")[0])

    async def _abilities(self) -> tuple[str, bool]:
        async with self._asking:
            if self._own is None:
                self._own = (await self._architecture(), self._engine == "docker" and await self._has_buildkit())
            return self._own

    async def _architecture(self) -> str:
        words = ["version", "--format", "{{.Server.Arch}}"]
        if self._engine == "podman":
            words = ["info", "--format", "{{.Host.Arch}}"]
        answer = await ask([*self._command, *words])
        if not answer.is_success:
            raise EnvironmentFault(f"containers: `{self._engine} {words[0]}` failed: {answer.text}")
        return answer.text

    async def _has_buildkit(self) -> bool:
        if os.environ.get("DOCKER_BUILDKIT") == "0":
            return False
        if (await ask([*self._command, "buildx", "version"])).is_success:
            return True
        version = (await ask([*self._command, "version", "--format", "{{.Client.Version}}"])).text.partition(".")[0]
        return version.isdecimal() and int(version) < _LAST_WITHIN

    async def _build(self, folder: Path, tag: str, dockerfile: str | None, timeout_s: float) -> None:
        output, limit_s = BuildOutput(), self._build_s or timeout_s
        logger.info("%s builds the image of %s", self._engine, folder)
        began = anyio.current_time()
        async with task_group() as telling:
            telling.start_soon(self._tell, folder, output)
            try:
                status = await self._run(folder, tag, dockerfile, output, limit_s)
            finally:
                telling.cancel_scope.cancel()
            if problem := self._problem(status, output, limit_s):
                raise EnvironmentFault(f"{folder}: {self._engine} {problem}. Its last lines:\n{output.last_lines()}")
        logger.info("%s built the image of %s in %.0f s", self._engine, folder, anyio.current_time() - began)

    async def _run(self, folder: Path, tag: str, dockerfile: str | None, output: BuildOutput, limit_s: float) -> int | None:
        """Run the command of a build; return its exit status, or None where it took too long."""
        _, has_buildkit = await self._abilities()
        variables = docker_variables() | {name: os.environ[name] for name in _PASSED if name in os.environ}
        if self._engine == "docker":
            variables["DOCKER_BUILDKIT"] = "1" if has_buildkit else "0"
        with TemporaryDirectory(prefix="agentrl-build-") as own:
            file = None if dockerfile is None else Path(own, "Dockerfile")
            if file is not None and dockerfile is not None:
                file.write_text(dockerfile, encoding="utf-8", errors="surrogateescape")
            words = self._words(folder, tag, file, has_buildkit=has_buildkit)
            try:
                return await watch(words, output.take, variables=variables, directory=own, deadline_s=limit_s)
            except OSError as error:
                raise EnvironmentFault(f"{folder}: cannot start {words[0]}: {error}; install {self._engine}") from error

    def _problem(self, status: int | None, output: BuildOutput, limit_s: float) -> str:
        """Return why a build did not come to a good end, or nothing."""
        step = f" at {output.step}" if output.step else ""
        if status is None:
            given = "containers.build_s" if self._build_s else "environment.build_timeout_sec of its task.toml"
            fix = "give it more (`build_s` in `containers`), or leave the task out"
            return f"did not build its image within {limit_s:g} s ({given}){step}; {fix}"
        return f"cannot build its image{step}{output.hint()}" if status else ""

    def _words(self, folder: Path, tag: str, file: Path | None, *, has_buildkit: bool) -> list[str]:
        words = [*self._command]
        if self._engine == "podman" and self._runtime is not None:
            words += ["--runtime", self._runtime]
        words += ["build", "--tag", tag, "--label", LABEL]
        words += ["--network", self._network] if self._network else []
        if self._engine == "podman":
            words += ["--format", "docker"]  # the other one forgets SHELL
        else:
            words += ["--progress", "plain"] if has_buildkit else ["--force-rm"]
        words += [] if file is None else ["--file", str(file)]
        return [*words, str(folder)]

    async def _tell(self, folder: Path, output: BuildOutput) -> None:
        """Say now and then how far a build is, where a run is seen to wait."""
        began = anyio.current_time()
        while True:
            await anyio.sleep(_TELL_S)
            taken = anyio.current_time() - began
            step = output.step or "it has begun"
            logger.warning("%s builds the image of %s, for %.0f s so far: %s", self._engine, folder, taken, step)


def _hex(parts: list[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode(errors="surrogateescape")).hexdigest()
