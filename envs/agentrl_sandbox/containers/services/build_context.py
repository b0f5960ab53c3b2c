"""What an engine builds an image from: a folder, its Dockerfile, and the images that it begins with.

Invariant: the same files with the same modes have the same digest, wherever the folder is; a file that no one can read as a
file, such as a pipe, is refused by name.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from agentrl.errors import ConfigError
from agentrl_sandbox.containers.protocol import ANY_IMAGE

_FROM: Final = re.compile(
    r"^([ \t]*FROM[ \t]+(?:--\S+[ \t]+)*)([^\s$]+)(?=[ \t\r]*$|[ \t]+AS[ \t]+(\S+))", re.IGNORECASE | re.MULTILINE
)


def context_digest(folder: Path) -> str:
    """Return the digest of all files of a folder; a link counts as a link, as engines take it.

    Raises:
        ConfigError: a file cannot be read, or is none.
    """
    digest = hashlib.sha256()
    try:
        for path in _below(folder):
            found = path.lstat()
            name = os.fsencode(path.relative_to(folder))
            digest.update(b"%d %o %s\0" % (len(name), found.st_mode, name))
            if stat.S_ISLNK(found.st_mode):
                digest.update(os.fsencode(path.readlink()) + b"\0")
            elif stat.S_ISREG(found.st_mode):
                with path.open("rb") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
            elif not stat.S_ISDIR(found.st_mode):
                raise ConfigError(f"{path}: expected files, directories and links, got something else; remove it")
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be read for the build of its image: {error}") from error
    return digest.hexdigest()


def _below(folder: Path) -> Iterator[Path]:
    return iter(sorted(folder.rglob("*"), key=lambda path: os.fsencode(path)))


def base_images(dockerfile: str) -> list[str]:
    r"""Return the images that a Dockerfile begins its stages with, as far as they are written without a variable.

    Example:
        >>> base_images("FROM debian:12 AS a\nFROM --platform=linux/amd64 python:3\nFROM a\nFROM $X")
        ['debian:12', 'python:3']
    """
    stages: set[str] = set()
    found: list[str] = []
    for match in _FROM.finditer(dockerfile):
        name = match[2]
        if name.lower() not in stages and name != "scratch" and name not in found:
            found.append(name)
        stages |= {match[3].lower()} if match[3] else set()
    return found


def with_images(dockerfile: str, images: Mapping[str, str | None]) -> str:
    r"""Return a Dockerfile that begins with the images that `images` has in the place of those it names.

    Example:
        >>> with_images("FROM debian:12 AS a\nFROM a", {"debian:12": "mine:1"})
        'FROM mine:1 AS a\nFROM a'
    """
    bases = base_images(dockerfile)

    def replaced(match: re.Match[str]) -> str:
        name = match[2]
        return f"{match[1]}{image_for(name, images) if name in bases else name}"

    return _FROM.sub(replaced, dockerfile)


def image_for(name: str, images: Mapping[str, str | None]) -> str:
    """Return what the engine calls an image that a task names."""
    return images.get(name, images.get(ANY_IMAGE)) or name
