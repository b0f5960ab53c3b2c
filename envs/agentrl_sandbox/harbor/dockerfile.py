"""What a Dockerfile of a task says, as far as a sandbox without Docker and without a network can do it.

Honoured: FROM one image for this machine's platform, WORKDIR, ENV, COPY and ADD of files of the folder, RUN. Files are put
in before the first RUN, so a COPY after a RUN is refused, as is everything else that would change what the container holds.
"""

from __future__ import annotations

import os
import platform
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
_WITHOUT_VARIABLES: Final = frozenset({"FROM", "WORKDIR", "COPY", "ADD"})
_FOLDERS: Final = ("/", "/bin", "/dev", "/etc", "/home", "/opt", "/root", "/sbin", "/srv", "/tmp", "/usr", "/var")
"""Directories of every image."""
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
    reading = _RecipeReading(folder)
    for number, line in _instructions(file):
        name, *rest = line.split(maxsplit=1)
        reading.follow(name.upper(), rest[0] if rest else "", f"{file}:{number}")
    here = reading.here
    place = _absolute(here, workdir) if workdir else here if here != "/" else DEFAULT_WORKDIR
    reading.make_folder(place, f"{file}: the working directory")
    copies, commands = tuple(reading.copies), tuple(reading.commands)
    return ImageRecipe(image=reading.image, workdir=place, env=reading.env, copies=copies, commands=commands)


class _RecipeReading:
    """Follows the instructions of one Dockerfile in their order."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.image: str | None = None
        self.here = "/"
        self.env: dict[str, str] = {}
        self.copies: list[tuple[str, str]] = []
        self.commands: list[tuple[str, str]] = []
        self._folders = set[str](_FOLDERS)
        self._files: set[str] = set()

    def follow(self, name: str, rest: str, where: str) -> None:
        """Do what one instruction says, or refuse it."""
        said = f"{where}: {name}"
        if name in _WITHOUT_VARIABLES and "$" in rest:
            raise ConfigError(f"{said}: expected no variable, got {rest!r}; write what it stands for")
        if name == "FROM":
            if self.image is not None:
                raise ConfigError(f"{said}: a build of several stages needs Docker; set environment.docker_image")
            self.image = _image_of(rest, said)
        elif name == "WORKDIR":
            words = _shell_words(rest, said)
            if len(words) != 1:
                raise ConfigError(f"{said}: expected one directory, got {rest!r}; put quotes around spaces")
            self.here = _absolute(self.here, words[0])
            self.make_folder(self.here, said)
        elif name == "ENV" or (name == "ARG" and "=" in rest):
            self.env |= _variables(rest, said)
        elif name in ("COPY", "ADD"):
            if self.commands:
                raise ConfigError(f"{said} after a RUN: files are put in before the first command; move it up")
            self._copy(rest, said)
        elif name == "RUN":
            self.commands.append((self.here, _command(rest, said)))
        elif name == "ARG" or (name == "USER" and rest in ("root", "0")):
            return
        elif name not in _WITHOUT_EFFECT:
            raise ConfigError(f"{said}: the sandbox cannot do this; leave the task out")

    def make_folder(self, place: str, said: str) -> None:
        """Note that there is a directory, and those above it; a file that was copied there is a ConfigError."""
        for each in (place, *map(str, PurePosixPath(place).parents)):
            if each in self._files:
                raise ConfigError(f"{said}: expected a directory, but {each} is a file since an earlier COPY; rename one")
            self._folders.add(each)

    def _copy(self, text: str, said: str) -> None:
        words = _exec_form(text) or _shell_words(text, said)
        if len(words) < 2 or any(word.startswith("--") or "://" in word or "*" in word for word in words):
            raise ConfigError(f"{said}: expected files of the folder and a target, without options, got {text!r}")
        *sources, target = words
        place = _absolute(self.here, target)
        into = target.endswith("/") or len(sources) > 1 or place in self._folders
        for source in sources:
            path = self._folder / source
            if not path.resolve().is_relative_to(self._folder.resolve()) or not path.exists():
                raise ConfigError(f"{said}: {source!r} is no file of {self._folder}")
            refuse_links_out(path, self._folder, f"{said}: ")
            found = str(PurePosixPath(place) / path.name) if path.is_file() and into else place
            self.make_folder(str(PurePosixPath(found).parent) if path.is_file() else found, said)
            if path.is_file():
                self._files.add(found)
            self.copies.append((source, found))


def _image_of(text: str, said: str) -> str:
    """Return the image that FROM names, for the platform of this machine."""
    words = text.split()
    if words and words[0].startswith("--platform="):
        own, asked = f"linux/{_platform()}", words.pop(0).partition("=")[2]
        if asked.removesuffix("/v8") != own:
            raise ConfigError(f"{said}: expected the platform of this machine, {own}, got {asked}; leave the task out")
    if not words or words[0].startswith("--"):
        raise ConfigError(f"{said}: expected one image, got {text!r}")
    return words[0]


def _platform() -> str:
    machine = platform.machine().lower()
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine)


def _command(text: str, said: str) -> str:
    """Return a line of bash for what RUN runs, which is one already or a list of words in JSON."""
    words = _exec_form(text)
    if text.startswith("--") or not text:
        raise ConfigError(f"{said}: expected a command without options, got {text!r}")
    if needed := _NEEDS_NETWORK.search(" ".join(words) if words else text):
        raise ConfigError(
            f"{said} {needed[1]} needs a network, which the sandbox does not have; build the image elsewhere, "
            "and set environment.docker_image to a name for which `images` has its files"
        )
    return shlex.join(words) if words else text


def _exec_form(text: str) -> list[str] | None:
    """Return a list of words in JSON; None: it is none, and so a line of words, as Docker takes it."""
    try:
        return msgspec.json.decode(text, type=list[str])
    except msgspec.DecodeError:
        return None


def _shell_words(text: str, said: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{said}: {error} in {text!r}") from None


def _instructions(file: Path) -> Iterator[tuple[int, str]]:
    """Yield each instruction with the number of its first line; a backslash at its end joins a line to the next."""
    parts: list[str] = []
    first = 0
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {error}") from error
    for number, line in enumerate(lines, 1):
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


def _variables(text: str, said: str) -> dict[str, str]:
    words = _shell_words(text, said)
    if "$" in text:
        raise ConfigError(f"{said}: expected no variable, got {text!r}; write what it stands for")
    if len(words) > 1 and "=" not in words[0]:
        words = [f"{words[0]}={' '.join(words[1:])}"]
    found: dict[str, str] = {}
    for word in words or [""]:
        match = _SETS.fullmatch(word)
        if match is None:
            raise ConfigError(f"{said}: expected NAME=value, got {text!r}")
        found[match[1]] = match[2]
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
