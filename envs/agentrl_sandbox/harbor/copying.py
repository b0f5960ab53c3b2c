"""COPY and ADD: which files of a task's folder go where.

Invariant: no file outside of the folder is read, through no link and by no path.
"""

from __future__ import annotations

import fnmatch
import os
import re
import stat
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Final

from agentrl.errors import ConfigError
from agentrl_sandbox.harbor.ignoring import IgnoredFiles
from agentrl_sandbox.harbor.instructions import HereDocument
from agentrl_sandbox.harbor.links import refuse_link_out, refuse_links_out
from agentrl_sandbox.harbor.places import Places
from agentrl_sandbox.harbor.recipe import CopiedFile, CopyStep

_WILD: Final = re.compile(r"[*?\[]")
_MODE: Final = re.compile(r"[0-7]{3,4}")
_IGNORE_FILES: Final = ("Dockerfile.dockerignore", ".dockerignore")
"""The first one that there is counts."""
OWNER: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(:[A-Za-z0-9_][A-Za-z0-9_.-]*)?")


class MissingFileError(ConfigError):
    """A source of COPY is not in the folder of the task."""


class FolderCopies:
    """Resolves the sources of COPY and ADD.

    Args:
        folder: `environment` of the task.
        places: what is known of the directories of the image.
    """

    def __init__(self, folder: Path, places: Places) -> None:
        self._folder, self._places = folder, places
        file = next((folder / name for name in _IGNORE_FILES if os.path.lexists(folder / name)), None)
        self._ignored = None if file is None else IgnoredFiles(folder, file)

    def step(
        self,
        words: Sequence[str],
        options: Mapping[str, str],
        documents: Mapping[str, tuple[HereDocument, str]],
        here: str,
        said: str,
    ) -> CopyStep:
        """Return what COPY or ADD with these words does.

        Args:
            words: its sources and its target, without quotes and variables.
            options: such as `chmod`, with their values.
            documents: here-documents with their text, by the word that stands for them.
            here: the working directory.
            said: what messages begin with.

        Raises:
            MissingFileError: a source is no file of the folder.
            ConfigError: a word or an option cannot be honoured.
        """
        mode = _checked_options(options, said)
        if len(words) < 2:
            raise ConfigError(f"{said}: expected files of the folder and a target, got {' '.join(words)!r}")
        *sources, target = words
        place = absolute(here, target)
        found = [each for source in sources if source not in documents for each in self._found(source, said)]
        into = target.endswith(("/", "/.")) or target == "." or len(found) + sum(word in documents for word in sources) > 1
        files: list[CopiedFile] = []
        folders: list[str] = []
        for source in sources:
            if source in documents:
                document, text = documents[source]
                files.append(self._file(None, document.name, place, into=into, text=text, mode=mode, said=said))
        for path in found:
            if path.is_dir():
                inner_files, inner_folders = self._tree(path, place, mode, said)
                files += inner_files
                folders += inner_folders
            else:
                files.append(self._file(path, path.name, place, into=into, text="", mode=mode, said=said))
        return CopyStep(said=said, files=tuple(files), folders=tuple(folders))

    def _found(self, source: str, said: str) -> list[Path]:
        """Return the files and directories that a source names, which may have wildcards."""
        parts = [part for part in PurePosixPath("/", source).parts[1:] if part != "."]
        if ".." in parts:
            raise ConfigError(f"{said}: {source!r} is no file of {self._folder}; expected a path without '..'")
        found = [self._folder]
        for part in parts:
            if _WILD.search(part) is None:
                found = [each / part for each in found if os.path.lexists(each / part)]
                continue
            matches = re.compile(fnmatch.translate(part.replace("[^", "[!")))
            found = [
                each / name for each in found if each.is_dir() for name in sorted(os.listdir(each)) if matches.match(name)
            ]
        left = [each for each in found if not self._is_ignored(each)]
        if found and not left:
            raise MissingFileError(f"{said}: {source!r} is left out by .dockerignore of {self._folder}; correct one of them")
        if not left:
            raise MissingFileError(f"{said}: {source!r} is no file of {self._folder}; put it there, or correct its name")
        found = left
        for path in found:
            # A directory above it may be the link.
            for place in (path, *path.parents):
                if not place.is_relative_to(self._folder):
                    break
                refuse_link_out(place, self._folder if place != self._folder else self._folder.parent, f"{said}: ")
            refuse_links_out(path, self._folder, f"{said}: ")
            if not path.exists():
                raise MissingFileError(f"{said}: {source!r} is no file of {self._folder}; put it there, or correct its name")
        return found

    def _is_ignored(self, path: Path) -> bool:
        return self._ignored is not None and self._ignored.is_ignored(path)

    def _tree(self, top: Path, place: str, mode: int | None, said: str) -> tuple[list[CopiedFile], list[str]]:
        """Return the files below a directory, and all its directories, as they are in the image."""
        files: list[CopiedFile] = []
        folders = [place]
        self._places.make_folder(place, said)
        for folder, names, leaves in os.walk(top):
            names[:] = sorted(name for name in names if not self._is_ignored(Path(folder, name)))
            below = Path(folder).relative_to(top)
            for name in names:
                if Path(folder, name).is_symlink():
                    path = Path(folder, name)
                    raise ConfigError(f"{said}: {path} is a link to a directory; put a copy of the directory in its place")
                folders.append(absolute(place, str(below / name)))
                self._places.make_folder(folders[-1], said)
            for name in sorted(name for name in leaves if not self._is_ignored(Path(folder, name))):
                target = absolute(place, str(below / name))
                files.append(self._file(Path(folder, name), name, target, into=False, text="", mode=mode, said=said))
        return files, folders

    def _file(
        self, path: Path | None, name: str, place: str, *, into: bool, text: str, mode: int | None, said: str
    ) -> CopiedFile:
        if path is not None:
            _refuse_special(path, said)
        if into or self._places.is_folder(place):
            self._places.make_folder(place, said)
            place, inner = absolute(place, name), ""
        else:
            inner = name
        self._places.make_file(place, said)
        return CopiedFile(source=path, text=text, target=place, inner=inner, mode=mode)


def refuse_archives(step: CopyStep) -> None:
    """Refuse ADD of an archive, which Docker unpacks."""
    for file in step.files:
        if file.source is not None and tarfile.is_tarfile(file.source):
            raise ConfigError(
                f"{step.said}: {file.source.name} is an archive, which ADD unpacks; write COPY, and RUN tar -xf"
            )


def _refuse_special(path: Path, said: str) -> None:
    if not stat.S_ISREG(path.stat().st_mode):
        raise ConfigError(f"{said}: {path} is neither a file nor a directory; take it out of the folder")


def _checked_options(options: Mapping[str, str], said: str) -> int | None:
    """Return the permissions that `--chmod` names; other options that change what is copied are refused."""
    for name, value in options.items():
        if name == "chown" and OWNER.fullmatch(value) is None:
            raise ConfigError(f"{said}: expected --chown=USER or --chown=USER:GROUP, got {value!r}")
        if name not in ("chown", "chmod", "link"):
            raise ConfigError(f"{said}: expected --chown, --chmod or --link, got --{name}; the sandbox cannot do this")
    mode = options.get("chmod")
    if mode is not None and _MODE.fullmatch(mode) is None:
        raise ConfigError(f"{said}: expected --chmod with an octal number such as 755, got {mode!r}")
    return None if mode is None else int(mode, 8)


def absolute(here: str, path: str) -> str:
    """Return a path that begins with a slash and has no `..`.

    Example:
        >>> absolute("/srv/app", "../data"), absolute("/srv", "/x/./y/")
        ('/srv/data', '/x/y')
    """
    parts: list[str] = []
    for part in PurePosixPath(here, path).parts:
        if part == "..":
            parts = parts[:-1]
        elif not part.startswith("/"):
            parts.append(part)
    return "/" + "/".join(parts)
