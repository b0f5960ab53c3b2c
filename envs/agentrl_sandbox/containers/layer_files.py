"""Files of layers, as this process writes, keeps and reads them while no container runs over them.

Invariant: whatever a container left in a layer, no link of it is followed, and nothing here takes long: what is kept is
moved as whole directories, and what is forgotten is left to the end of the episode.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Final

from agentrl_sandbox.containers.protocol import LayerFile
from agentrl_sandbox.types import FileContents

_RUNNABLE: Final = 0o111


def read_layer_files(files: Mapping[str, LayerFile]) -> dict[str, FileContents]:
    """Return the contents of files that a layer gets, read as this process's own user."""
    found: dict[str, FileContents] = {}
    for name, data in files.items():
        if isinstance(data, Path):
            data = FileContents(data.read_bytes(), bool(data.stat().st_mode & _RUNNABLE))
        found[name] = FileContents(data, can_run=False) if isinstance(data, bytes) else data
    return found


@contextmanager
def files_as(owner: int | None) -> Generator[None]:
    """Let this thread reach files as the user `owner`, in whose namespace root of this machine cannot make any.

    None: this process's own user owns them. The kernel keeps this for each thread.
    """
    if owner is None:
        yield
        return
    library = ctypes.CDLL(None)
    own_group, own_user = library.setfsgid(owner), library.setfsuid(owner)
    try:
        yield
    finally:
        library.setfsuid(own_user)
        library.setfsgid(own_group)


def _ensure_folder(place: Path) -> None:
    if not place.is_dir():
        place.mkdir(mode=0o755)


def keep_parts(layer: Path, kept: Path, paths: Sequence[str], homes: Sequence[str]) -> None:
    """Move parts of a dead layer into the new layer `kept`, as `Workbench.keep` describes.

    A layer that is full has no room for a directory above a part, which is then not kept; neither is a closed home.
    """
    for path in paths:
        _move(layer, kept, PurePosixPath(path).parts[1:])
    for home in homes:
        parts = PurePosixPath(home).parts[1:]
        found = _folder_of(layer, parts)
        for name in _names_in(found) if found is not None else ():
            if not name.startswith("."):
                _move(layer, kept, (*parts, name))


def top_of_layer(layer: Path) -> list[str]:
    """Return the absolute paths at the top of a dead layer, without names that are not UTF-8."""
    return [f"/{name}" for name in _names_in(layer) if is_utf8(name)]


def is_utf8(name: str) -> bool:
    """Return whether the bytes of a file's name are UTF-8, so that it can be sent."""
    return name == name.encode(errors="ignore").decode()


def _names_in(folder: Path) -> list[str]:
    """Return the names in a directory of a layer, in order; none where a program has closed it to its owner."""
    try:
        return sorted(os.listdir(folder))
    except PermissionError:
        return []


def _folder_of(layer: Path, parts: Sequence[str]) -> Path | None:
    """Return a directory of a layer; None: it has none there, or a link is in the way."""
    place = layer
    for part in parts:
        place = place / part
        try:
            if not stat.S_ISDIR(place.lstat().st_mode):
                return None
        except OSError:
            return None
    return place


def _move(layer: Path, kept: Path, parts: Sequence[str]) -> None:
    parent = _folder_of(layer, parts[:-1])
    if parent is None or not parts:
        return
    source, target = parent / parts[-1], kept.joinpath(*parts)
    place = kept
    with suppress(OSError):
        mode = source.lstat().st_mode
        if stat.S_ISLNK(mode):
            return
        for part in parts[:-1]:
            place = place / part
            _ensure_folder(place)
        if stat.S_ISDIR(mode):
            source.chmod(0o700)  # to move a directory its owner must be able to write to it
        source.rename(target)
        if stat.S_ISDIR(mode):
            target.chmod(stat.S_IMODE(mode))


def read_from_layer(layer: Path, path: str, max_bytes: int) -> bytes:
    """Return a regular file of a dead layer, as `Workbench.read` describes."""
    *folders, name = PurePosixPath(path).parts[1:]
    place = os.open(layer, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for folder in folders:
            inner = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=place)
            os.close(place)
            place = inner
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=place)
    finally:
        os.close(place)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", path)
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {max_bytes} bytes", path)
    return data
