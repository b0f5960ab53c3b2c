"""What is known of the files and directories of an image while its Dockerfile is read."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Final

from agentrl.errors import ConfigError

_FOLDERS: Final = ("/", "/bin", "/dev", "/etc", "/home", "/opt", "/root", "/sbin", "/srv", "/tmp", "/usr", "/var")
"""Directories of every image."""


class Places:
    """Directories and files that there are for certain: a command may make others."""

    def __init__(self) -> None:
        self._folders = set[str](_FOLDERS)
        self._files = set[str]()

    def is_folder(self, place: str) -> bool:
        """Return whether a directory is known by this path."""
        return place in self._folders

    def make_folder(self, place: str, said: str) -> None:
        """Note that there is a directory, and those above it; a file that was copied there is a ConfigError."""
        if place in self._folders:
            return
        for each in (place, *map(str, PurePosixPath(place).parents)):
            if each in self._files:
                raise ConfigError(f"{said}: expected a directory, but {each} is a file since an earlier COPY; rename one")
            self._folders.add(each)

    def make_file(self, place: str, said: str) -> None:
        """Note that there is a file; a directory of its name is a ConfigError."""
        if place in self._folders:
            raise ConfigError(f"{said}: expected a file, but {place} is a directory; rename one")
        self.make_folder(str(PurePosixPath(place).parent), said)
        self._files.add(place)

    def forget_files(self) -> None:
        """Note that a command ran, which may have put directories in the place of files."""
        self._files.clear()
