"""Layers as bytes: each is a tar in the form of an OCI image's layers, where `.wh.NAME` stands for what was deleted.

A snapshot is the list of a workbench's layers, the lowest first. It fits any backend that has the same image.

Invariant: no link is followed, in either direction, and nothing is written outside the new layer, whatever an archive says.
What is no file, directory, link or pipe is left out.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import tarfile
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Final

import msgspec

from agentrl.errors import ConfigError
from agentrl_sandbox.types import FileContents

WHITEOUT: Final = ".wh."
OPAQUE: Final = ".wh..wh..opq"
_OPAQUE_NAME: Final = "user.overlay.opaque"
"""The attribute by which overlayfs marks a directory that hides all layers below."""
_PERMISSIONS: Final = 0o7777


def make_layer(files: Mapping[str, FileContents]) -> bytes:
    """Return the layer with these files, as `Workbench.add` describes them."""
    buffer, folders = io.BytesIO(), set[PurePosixPath]()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, file in files.items():
            path = PurePosixPath(name)
            if not path.is_absolute() or ".." in path.parts or len(path.parts) < 2:
                raise ConfigError(f"containers: expected the absolute path of a file without '..', got {name!r}")
            path = path.relative_to("/")
            add_folders(archive, [*reversed(path.parents), *([path] if name.endswith("/") else [])], folders)
            if not name.endswith("/"):
                entry = tarfile.TarInfo(str(path))
                entry.size, entry.mode = len(file.content), _mode_of(file)
                entry.mtime = int(time.time())
                archive.addfile(entry, io.BytesIO(file.content))
    return buffer.getvalue()


def _mode_of(file: FileContents) -> int:
    if file.mode is not None:
        return file.mode & 0o777  # a program that runs as another user would have that user's rights
    return 0o755 if file.can_run else 0o644


def add_folders(archive: tarfile.TarFile, paths: Sequence[PurePosixPath], known: set[PurePosixPath]) -> None:
    """Add the directories that are not `known` yet."""
    for path in paths:
        if path not in known and path != PurePosixPath("."):
            known.add(path)
            entry = tarfile.TarInfo(str(path))
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(entry)


def read_layers(layers: Sequence[Path]) -> bytes:
    """Return a snapshot of these directories of overlayfs, the lowest first."""
    return msgspec.msgpack.encode([pack_layer(layer) for layer in layers])


def snapshot_layers(snapshot: bytes) -> list[bytes]:
    """Return the layers of a snapshot; bytes that are none are a ConfigError."""
    try:
        return msgspec.msgpack.decode(snapshot, type=list[bytes])
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"containers: expected a snapshot of a workbench, got {len(snapshot)} other bytes: {error}"
        ) from None


def write_layers(layers: Sequence[bytes], places: Sequence[Path]) -> None:
    """Write the layers of a snapshot as directories of overlayfs, one at each of the new `places`."""
    for data, place in zip(layers, places, strict=True):
        unpack_layer(data, place)


def pack_layer(layer: Path) -> bytes:
    """Return the archive of one directory of overlayfs."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        _pack_folder(archive, layer, "")
    return buffer.getvalue()


def _pack_folder(archive: tarfile.TarFile, folder: Path, inner: str) -> None:
    with _opened_up(folder, 0o700):
        if inner and _is_opaque(folder):
            archive.addfile(tarfile.TarInfo(f"{inner}/{OPAQUE}"))
        for name in sorted(os.listdir(folder)):
            path, place = folder / name, f"{inner}/{name}".lstrip("/")
            found = path.lstat()
            entry = tarfile.TarInfo(place)
            entry.mode, entry.mtime = stat.S_IMODE(found.st_mode), int(found.st_mtime)
            if stat.S_ISDIR(found.st_mode):
                entry.type = tarfile.DIRTYPE
                archive.addfile(entry)
                _pack_folder(archive, path, place)
            elif stat.S_ISREG(found.st_mode):
                entry.size = found.st_size
                with _opened_up(path, 0o400), path.open("rb") as file:
                    archive.addfile(entry, file)
            elif stat.S_ISLNK(found.st_mode):
                entry.type, entry.linkname = tarfile.SYMTYPE, os.readlink(path)
                archive.addfile(entry)
            elif stat.S_ISFIFO(found.st_mode):
                entry.type = tarfile.FIFOTYPE
                archive.addfile(entry)
            elif stat.S_ISCHR(found.st_mode) and found.st_rdev == 0:
                archive.addfile(tarfile.TarInfo(f"{inner}/{WHITEOUT}{name}".lstrip("/")))


def _is_opaque(folder: Path) -> bool:
    with suppress(OSError):
        return os.getxattr(folder, _OPAQUE_NAME, follow_symlinks=False) == b"y"
    return False


@contextmanager
def _opened_up(path: Path, bits: int) -> Generator[None]:
    """Let the owner use a file or directory whose permissions shut it out, for as long as the block."""
    mode = stat.S_IMODE(path.lstat().st_mode)
    if mode & bits == bits:
        yield
        return
    path.chmod(mode | bits)
    try:
        yield
    finally:
        path.chmod(mode)


def unpack_layer(data: bytes, layer: Path) -> None:
    """Write one archive as a new directory of overlayfs.

    Raises:
        ConfigError: it is no archive of a layer.
    """
    layer.mkdir(mode=0o755)
    modes: dict[Path, int] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            for member, path in layer_members(archive):
                _unpack_member(archive, member, layer / path)
                if member.isdir():
                    modes[layer / path] = member.mode & _PERMISSIONS
    except tarfile.TarError as error:
        raise ConfigError(f"containers: a layer of a snapshot is no archive: {error}") from None
    for place, mode in reversed(modes.items()):
        place.chmod(mode)


def layer_members(archive: tarfile.TarFile) -> Iterator[tuple[tarfile.TarInfo, PurePosixPath]]:
    """Yield each member of a layer with its path.

    Raises:
        ConfigError: a path is not relative, leaves the layer, deletes what is no name, or has no directory above it.
    """
    folders = {PurePosixPath(".")}
    for member in archive:
        path = PurePosixPath(member.name)
        if path.is_absolute() or ".." in path.parts or "\0" in member.name or path == PurePosixPath("."):
            raise ConfigError(f"containers: a layer has the path {member.name!r}; expected a relative one without '..'")
        if path.parent not in folders:
            raise ConfigError(f"containers: a layer has {member.name!r}, and no directory above it")
        if path.name != OPAQUE and path.name.startswith(WHITEOUT):
            deleted_name(path.name)
        elif member.isdir():
            folders.add(path)
        yield member, path


def deleted_name(name: str) -> str:
    """Return the name of the file that the member `.wh.NAME` deletes; ConfigError: it is the name of no file."""
    deleted = name.removeprefix(WHITEOUT)
    if deleted in ("", ".", ".."):
        raise ConfigError(f"containers: a layer has {name!r}, which deletes {deleted!r}; expected the name of a file")
    return deleted


def _unpack_member(archive: tarfile.TarFile, member: tarfile.TarInfo, place: Path) -> None:
    if place.name == OPAQUE:
        os.setxattr(place.parent, _OPAQUE_NAME, b"y")
        return
    if place.name.startswith(WHITEOUT):
        os.mknod(place.with_name(deleted_name(place.name)), stat.S_IFCHR | 0o600, 0)
        return
    if member.isdir():
        place.mkdir(mode=0o700)
        return
    if member.issym():
        place.symlink_to(member.linkname)
    elif member.isfifo():
        os.mkfifo(place, member.mode & _PERMISSIONS)
    elif member.isfile() and (source := archive.extractfile(member)) is not None:
        descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with source, os.fdopen(descriptor, "wb") as file:
            while piece := source.read(1 << 20):
                file.write(piece)
        place.chmod(member.mode & _PERMISSIONS)
        os.utime(place, (member.mtime, member.mtime))
    else:
        raise OSError(errno.EINVAL, "a layer has no such kind of file", member.name)
