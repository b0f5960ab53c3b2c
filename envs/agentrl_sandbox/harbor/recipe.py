"""What a Dockerfile makes, step by step, as a sandbox without Docker and without a network can do it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TypeAlias

import msgspec

from agentrl.errors import ConfigError
from agentrl_sandbox.containers.protocol import ANY_IMAGE


class CopiedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that COPY or ADD puts into the image."""

    source: Path | None
    """None: a here-document."""
    text: str = ""
    """Of a here-document."""
    target: str
    """Its absolute path in the image."""
    inner: str = ""
    """Its path below `target` where that is a directory when the file comes; empty: `target` is where it goes."""
    mode: int | None = None
    """Its permissions; None: those of a program or of another file."""


class CopyStep(msgspec.Struct, frozen=True, kw_only=True):
    """COPY, ADD, WORKDIR or VOLUME."""

    said: str
    """File, line and name of the instruction."""
    files: tuple[CopiedFile, ...] = ()
    folders: tuple[str, ...] = ()
    """Directories that there are afterwards, perhaps without a file."""


class RunStep(msgspec.Struct, frozen=True, kw_only=True):
    """RUN, or what COPY and ADD fetch from elsewhere."""

    said: str
    text: str
    """The command as it is written, for messages."""
    argv: tuple[str, ...]
    directory: str
    environment: dict[str, str]
    """Of the instructions above it."""
    folders: tuple[str, ...] = ()
    """Directories of its caches, which there have to be."""
    network: str = ""
    """The program, the image or the address that needs a network; empty: none does."""


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """An instruction that is not carried out."""

    said: str
    """File, line and name of the instruction."""
    text: str
    why: str


Step: TypeAlias = CopyStep | RunStep


class EngineBuild(msgspec.Struct, frozen=True, kw_only=True):
    """A folder of which docker or podman builds the image, as its Dockerfile says."""

    folder: Path
    workdir: str | None
    """What the task sets in the place of the image's own working directory."""


class ImageRecipe(msgspec.Struct, frozen=True, kw_only=True):
    """The environment of a task."""

    image: str | None
    """The image that it begins with; None: the task names none."""
    workdir: str
    env: dict[str, str]
    """Of all instructions, for whatever runs in the container."""
    steps: tuple[Step, ...] = ()
    """In the order of the file."""
    left_out: tuple[LeftOut, ...] = ()
    """Instructions that the image makes superfluous."""
    build: EngineBuild | None = None
    """What an engine has to build before anything else of this is known; None: nothing."""
    built_from: str = ""
    """The folder of which an engine has built `image`; empty: it has not."""

    @property
    def commands(self) -> list[RunStep]:
        """The steps that run something."""
        return [step for step in self.steps if isinstance(step, RunStep)]

    @property
    def files(self) -> Iterator[CopiedFile]:
        """The files that are put in."""
        return (file for step in self.steps if isinstance(step, CopyStep) for file in step.files)

    def settled(self, has_packages: Collection[str] = ()) -> ImageRecipe:
        """Return the recipe without the commands that need a network, which count as done in an image that is named.

        Args:
            has_packages: images, by the names that tasks have for them, that hold what these commands fetch; `"*"`: all.

        Raises:
            ConfigError: another image would have to run one; the message names file and line.
        """
        if self.build is not None:
            raise ConfigError(f"{self.build.folder}: its image is not built yet")
        asks = [step for step in self.commands if step.network]
        if not asks:
            return self
        if self.image not in has_packages and ANY_IMAGE not in has_packages:
            raise ConfigError(
                f"{asks[0].said} {asks[0].network} needs a network, which the sandbox does not have; give `images` an image "
                f"with the files of {self.image!r} and what this command fetches, and name it in `has_packages: "
                f"[{self.image!r}]`, or set environment.docker_image"
            )
        why = f"the image {self.image!r} counts as having it"
        done = tuple(LeftOut(said=step.said, text=step.text, why=why) for step in asks)
        steps = tuple(step for step in self.steps if isinstance(step, CopyStep) or not step.network)
        return msgspec.structs.replace(self, steps=steps, left_out=(*self.left_out, *done))
