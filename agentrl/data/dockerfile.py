"""What a Dockerfile of a task says, as far as a sandbox without Docker and without a network can do it.

Honoured: FROM one image, WORKDIR, ENV, COPY and ADD of files of the folder, RUN. Files are put in before the first RUN, so
a COPY after a RUN is refused, as is everything else that would change what the container holds.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

import msgspec

from agentrl.errors import ConfigError

_WITHOUT_EFFECT: Final = frozenset({"CMD", "ENTRYPOINT", "LABEL", "EXPOSE", "MAINTAINER", "STOPSIGNAL"})
"""They describe how a container is started or named, and agentrl starts it itself."""
_NEEDS_NETWORK: Final = re.compile(r"(?:^|[;&|(]\s*|\s)(apt-get|apt|apk|dnf|yum|pip3?|uv|npm|curl|wget)\s+(?!--version)")
_SETS: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
DEFAULT_WORKDIR: Final = "/app"


class ImageRecipe(msgspec.Struct, frozen=True, kw_only=True):
    """The environment of a task."""

    image: str | None
    """The image that it begins with; None: the task names none."""
    workdir: str
    env: dict[str, str]
    copies: tuple[tuple[str, str], ...]
    """Pairs of a path below `environment/` and an absolute path in the container."""
    commands: tuple[tuple[str, str], ...]
    """Pairs of a directory and a command, which run in this order once the files are there."""


def read_dockerfile(folder: Path, *, docker_image: str | None, workdir: str | None) -> ImageRecipe:
    """Return what the folder `environment` of a task describes; with `docker_image` its Dockerfile is not read.

    Raises:
        ConfigError: an instruction cannot be honoured; the message names file and line.
    """
    file = folder / "Dockerfile"
    if docker_image is not None or not file.is_file():
        place = _absolute("/", workdir or DEFAULT_WORKDIR)
        return ImageRecipe(image=docker_image, workdir=place, env={}, copies=(), commands=())
    _refuse_link_out(folder, folder.parent, "")
    image, here = None, "/"
    env: dict[str, str] = {}
    copies: list[tuple[str, str]] = []
    commands: list[tuple[str, str]] = []
    for number, line in _instructions(file):
        name, _, rest = line.partition(" ")
        name, rest, where = name.upper(), rest.strip(), f"{file}:{number}"
        if name == "FROM":
            if image is not None:
                raise ConfigError(f"{where}: FROM: a build of several stages needs Docker; set environment.docker_image")
            image = rest.split()[0]
        elif name == "WORKDIR":
            here = _absolute(here, shlex.split(rest)[0])
        elif name in ("ENV", "ARG"):
            env |= _variables(rest, where) if name == "ENV" or "=" in rest else {}
        elif name in ("COPY", "ADD"):
            if commands:
                raise ConfigError(f"{where}: {name} after a RUN: files are put in before the first command; move it up")
            copies += _copies(folder, rest, here, where)
        elif name == "RUN":
            if needed := _NEEDS_NETWORK.search(rest):
                raise ConfigError(
                    f"{where}: RUN {needed[1]} needs a network, which the sandbox does not have; build the image elsewhere, "
                    "and set environment.docker_image to a name for which `images` has its files"
                )
            commands.append((here, rest))
        elif name == "USER" and rest in ("root", "0"):
            continue
        elif name not in _WITHOUT_EFFECT:
            raise ConfigError(f"{where}: {name}: the sandbox cannot do this; leave the task out")
    place = _absolute(here, workdir) if workdir else here if here != "/" else DEFAULT_WORKDIR
    return ImageRecipe(image=image, workdir=place, env=env, copies=tuple(copies), commands=tuple(commands))


def _instructions(file: Path) -> Iterator[tuple[int, str]]:
    """Yield each instruction with the number of its first line; a backslash at its end joins a line to the next."""
    parts: list[str] = []
    first = 0
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        if "<<" in text and not parts and text.upper().startswith(("RUN", "COPY")):
            raise ConfigError(f"{file}:{number}: a here-document; write it as a file beside the Dockerfile")
        first = first if parts else number
        parts.append(text.removesuffix("\\").strip())
        if not text.endswith("\\"):
            yield first, " ".join(parts)
            parts = []
    if parts:
        yield first, " ".join(parts)


def _variables(text: str, where: str) -> dict[str, str]:
    words = shlex.split(text)
    if words and "=" not in words[0]:
        return {words[0]: " ".join(words[1:])}
    found: dict[str, str] = {}
    for word in words:
        match = _SETS.fullmatch(word)
        if match is None or "$" in match[2]:
            raise ConfigError(f"{where}: ENV: expected NAME=value without a variable in it, got {word!r}")
        found[match[1]] = match[2]
    return found


def _copies(folder: Path, text: str, here: str, where: str) -> list[tuple[str, str]]:
    words = json.loads(text) if text.startswith("[") else shlex.split(text)
    if len(words) < 2 or any(word.startswith("--") or "://" in word or "*" in word for word in words):
        raise ConfigError(f"{where}: COPY: expected files of the folder and a target, without options, got {text!r}")
    *sources, target = words
    into = target.endswith("/") or len(sources) > 1 or target == "."
    found: list[tuple[str, str]] = []
    for source in sources:
        path = folder / source
        if not path.resolve().is_relative_to(folder.resolve()) or not path.exists():
            raise ConfigError(f"{where}: COPY: {source!r} is no file of {folder}")
        refuse_links_out(path, folder, f"{where}: COPY: ")
        place = _absolute(here, target)
        found.append((source, str(PurePosixPath(place) / path.name) if path.is_file() and into else place))
    return found


def refuse_links_out(tree: Path, top: Path, where: str = "") -> None:
    """Refuse a link at or below `tree` that leads out of `top`: whatever reads the files would read those of this machine.

    Raises:
        ConfigError: there is one; the message begins with `where`, and names the link.
    """
    for path in (tree, *sorted(tree.rglob("*"))):
        _refuse_link_out(path, top, where)


def _refuse_link_out(path: Path, top: Path, where: str) -> None:
    target = os.path.realpath(path)
    if path.is_symlink() and not Path(target).is_relative_to(os.path.realpath(top)):
        raise ConfigError(f"{where}{path} is a link, and leads to {target}, out of {top}; put a copy in its place")


def _absolute(here: str, path: str) -> str:
    """Return a path that begins with a slash and has no `..`."""
    parts: list[str] = []
    for part in PurePosixPath(here, path).parts[1:]:
        if part == "..":
            parts = parts[:-1]
        else:
            parts.append(part)
    return "/" + "/".join(parts)
