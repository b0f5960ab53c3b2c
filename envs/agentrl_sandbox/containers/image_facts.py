"""What is known of an image before it runs: who makes it, and what it says itself, kept in the folder it was unpacked into.

Invariant: the file is a regular one of the folder's own; a link in its place is not followed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, Final, TypeAlias, cast

import msgspec

from agentrl.errors import ConfigError
from agentrl_sandbox.containers.protocol import ANY_IMAGE

ENGINES: Final = ("docker", "podman")
FACTS_FILE: Final = ".agentrl-image.json"


class ImageFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What an image itself says."""

    env: dict[str, str] = {}
    workdir: str = "/"


FactsOf: TypeAlias = Callable[[str], ImageFacts | None]
"""Returns what the image of a name says; None: only its files are known."""


class _Config(msgspec.Struct):
    """The part of an image's configuration that counts here, by the names of OCI."""

    Env: list[str] | None = None
    WorkingDir: str | None = None


class _Image(msgspec.Struct):
    config: _Config | None = None


def facts_in(config: bytes) -> ImageFacts:
    """Return what the configuration of an image says; bytes that are none say nothing.

    Example:
        >>> facts_in(b'{"config": {"Env": ["PATH=/opt/bin:/bin"], "WorkingDir": "/srv"}}')
        ImageFacts(env={'PATH': '/opt/bin:/bin'}, workdir='/srv')
    """
    try:
        given = msgspec.json.decode(config, type=_Image).config or _Config()
    except msgspec.DecodeError:
        return ImageFacts()
    pairs = (each.partition("=") for each in given.Env or ())
    env = {name: value for name, equals, value in pairs if equals and name.isidentifier() and "\0" not in value}
    workdir = PurePosixPath("/", given.WorkingDir or "/")
    return ImageFacts(env=env, workdir="/" if ".." in workdir.parts or "\0" in str(workdir) else str(workdir))


def write_facts(folder: Path, facts: ImageFacts) -> None:
    """Write what an image says into the new folder of its files, in the place of a file of that name."""
    place = folder / FACTS_FILE
    with suppress(FileNotFoundError):
        place.unlink()
    descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(facts))


def read_facts(folder: Path) -> ImageFacts | None:
    """Return what the image says that was unpacked into a folder; None: nobody wrote it down.

    Raises:
        ConfigError: the file is a link, or holds something else.
    """
    place = folder / FACTS_FILE
    try:
        descriptor = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            return msgspec.json.decode(file.read(), type=ImageFacts)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{place}: {error}; unpack the image again, or delete this file") from error


def facts_of_images(images: Mapping[str, str | None]) -> FactsOf:
    """Return the facts of the images of a run file, by the names that tasks have for them."""

    def facts_of(name: str) -> ImageFacts | None:
        folder = images.get(name, images.get(ANY_IMAGE))
        return None if folder is None else read_facts(Path(folder))

    return facts_of


def engine_builds(workflow_args: Mapping[str, Any]) -> bool:
    """Return whether an engine builds images from Dockerfiles, by `workflow_args.containers` and `has_packages`.

    Example:
        >>> engine_builds({"containers": {"backend": "docker"}}), engine_builds({"containers": {"build": "steps"}})
        (True, False)
    """
    given: object = workflow_args.get("containers")
    containers = cast("Mapping[str, object]", given) if isinstance(given, Mapping) else {}
    if containers.get("backend") not in ENGINES:
        return False
    return (containers.get("build") or ("steps" if workflow_args.get("has_packages") else "engine")) == "engine"
