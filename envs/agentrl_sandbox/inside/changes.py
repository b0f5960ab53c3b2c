"""The changes of a file system as the archive of a layer, where no overlay holds them apart.

Invariant: an archive has the form of an OCI image's layers: `.wh.NAME` stands for what was deleted. Only the file system of
the root counts, without what is mounted into it. Files beyond the budget are left out, as on a disk that is full. Whatever
programs did to their files, packing ends, and what it returns can be unpacked.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

_WHITEOUT = ".wh."
_OPAQUE = ".wh..wh..opq"
_CHUNK = 1 << 20
_MACHINE = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ENOMEM, errno.EMFILE, errno.ENFILE}
"""Errors of this machine; all others come from the contents of a layer."""
OWN = {"run/agentrl", "proc", "sys", "dev"}
Look = dict[str, tuple[int, ...]]


class Changes:
    """What was there at a moment, and what has changed since."""

    def __init__(self, root: str = "/") -> None:
        let_in(root, os.lstat(root))  # podman gives the root 0555
        self.root = root
        self.before: Look = {}

    def mark(self) -> None:
        """Remember the file system as it is now."""
        self.before, opened = self.look()
        for place, mode in reversed(opened):
            os.chmod(place, mode)

    def look(self) -> tuple[Look, list[tuple[str, int]]]:
        """Return the marks of every file by its path below the root, and the directories that this opened, with their modes.

        The time of a change cannot be set by a program. Directories that shut their owner out are opened and stay so.
        """
        found: Look = {}
        known = os.lstat(self.root)
        device, opened = known.st_dev, let_in(self.root, known)
        todo = [""]
        while todo:
            folder = todo.pop()
            with suppress(OSError), os.scandir(os.path.join(self.root, folder)) as entries:
                for entry in entries:
                    path = os.path.join(folder, entry.name)
                    if path in OWN:
                        continue
                    with suppress(OSError):
                        known = entry.stat(follow_symlinks=False)
                        if known.st_dev != device:
                            continue
                        is_folder = stat.S_ISDIR(known.st_mode)
                        # A directory changes with each of its entries, which have marks of their own.
                        marks = (known.st_mode,) if is_folder else (known.st_mode, known.st_ino, known.st_ctime_ns)
                        found[path] = marks
                        if is_folder:
                            opened += let_in(os.path.join(self.root, path), known)
                            todo.append(path)
        return found, opened

    def pack(self, budget: int) -> Iterator[bytes]:
        """Yield the archive of what changed since `mark`, in pieces; no program runs any more.

        A name like that of a whiteout stands for no file in an archive, so such files are left out.
        """
        after, _ = self.look()
        written: set[str] = set()
        for path in sorted(self.before):
            old, new = self.before[path][0], after.get(path, (0,))[0]
            if stat.S_IFMT(old) != stat.S_IFMT(new) and self.is_kept_above(path, after):
                yield from self.parents(path, after, written)
                folder, name = os.path.split(path)
                yield _bytes_of_header(tarfile.TarInfo(os.path.join(folder, _WHITEOUT + name)))
        for path in sorted(after):
            if budget < tarfile.BLOCKSIZE:
                break
            if self.before.get(path) != after[path] and not any(map(_is_reserved, path.split("/"))):
                for piece in (*self.parents(path, after, written), *self.entry(path, after[path][0], budget, written)):
                    budget -= len(piece)
                    yield piece
        yield b"\0" * 2 * tarfile.BLOCKSIZE

    def is_kept_above(self, path: str, after: Look) -> bool:
        """Return whether the directory above is still one, so that the deletion is not a part of another."""
        folder = os.path.dirname(path)
        return not folder or (folder in after and stat.S_ISDIR(after[folder][0]) and stat.S_ISDIR(self.before[folder][0]))

    def parents(self, path: str, after: Look, written: set[str]) -> Iterator[bytes]:
        """Yield the entries of the directories above a path that have none yet."""
        missing: list[str] = []
        while (path := os.path.dirname(path)) and path not in written:
            missing.append(path)
        for folder in reversed(missing):
            yield from self.entry(folder, after[folder][0], 0, written)

    def entry(self, path: str, mode: int, budget: int, written: set[str]) -> Iterator[bytes]:
        """Yield one entry, in pieces, unless it is a file over the budget."""
        place = os.path.join(self.root, path)
        if path in written:
            return
        with suppress(OSError):
            known = os.lstat(place)
            entry = tarfile.TarInfo(path)
            entry.mode, entry.mtime = stat.S_IMODE(mode), int(known.st_mtime)
            if stat.S_ISREG(known.st_mode) and known.st_size <= budget:
                entry.size = known.st_size
                yield from _file(entry, place, known)
            elif stat.S_ISDIR(known.st_mode):
                entry.type = tarfile.DIRTYPE
                yield _bytes_of_header(entry)
            elif stat.S_ISLNK(known.st_mode):
                entry.type, entry.linkname = tarfile.SYMTYPE, os.readlink(place)
                yield _bytes_of_header(entry)
            written.add(path)

    def unpack(self, file: BinaryIO, *, strict: bool) -> None:
        """Apply an archive to the file system, as an overlay would show it.

        Args:
            file: the archive.
            strict: raise an OSError for a member that cannot be applied; False: only where this machine is the reason.
        """
        modes: dict[str, int] = {}
        with tarfile.open(fileobj=file) as archive:
            for member, place in self.members(archive):
                try:
                    self.apply(archive, member, place, modes)
                except OSError as error:
                    if strict or error.errno in _MACHINE:
                        raise
        for place, mode in reversed(modes.items()):
            with suppress(FileNotFoundError):  # a later member may stand in its place
                os.chmod(place, mode)

    def apply(self, archive: tarfile.TarFile, member: tarfile.TarInfo, place: str, modes: dict[str, int]) -> None:
        """Apply one member; the modes of directories wait until all are there."""
        folder, name = os.path.split(place)
        if name == _OPAQUE:
            for each in os.listdir(folder):
                remove(os.path.join(folder, each))
        elif name.startswith(_WHITEOUT):
            if name[len(_WHITEOUT) :] not in ("", ".", ".."):
                remove(os.path.join(folder, name[len(_WHITEOUT) :]))
        elif member.isdir():
            if not os.path.isdir(place) or os.path.islink(place):
                remove(place)
                os.mkdir(place, 0o700)
            let_in(place, os.lstat(place))
            modes[place] = member.mode & 0o7777
        elif member.issym():
            remove(place)
            os.symlink(member.linkname, place)
        elif member.isfile():
            remove(place)
            source = archive.extractfile(member)
            with open(place, "xb") as file:
                if source is not None:
                    shutil.copyfileobj(source, file)
            os.chmod(place, member.mode & 0o7777)
            os.utime(place, (member.mtime, member.mtime))

    def members(self, archive: tarfile.TarFile) -> Iterator[tuple[tarfile.TarInfo, str]]:
        for member in archive:
            parts = Path(member.name).parts
            if parts and ".." not in parts and not member.name.startswith("/"):
                yield member, os.path.join(self.root, *parts)
            archive.members = []  # pyright: ignore[reportAttributeAccessIssue] - they are not looked at again, and may be many


def let_in(folder: str, known: os.stat_result) -> list[tuple[str, int]]:
    """Open a directory of this user that shuts it out, and return it with its mode; nothing for all others."""
    if known.st_uid != os.geteuid() or known.st_mode & 0o700 == 0o700:
        return []
    with suppress(OSError):
        os.chmod(folder, stat.S_IMODE(known.st_mode) | 0o700)
        return [(folder, stat.S_IMODE(known.st_mode))]
    return []


def remove(place: str) -> None:
    """Delete whatever is at a path, as far as this user may.

    Raises:
        OSError: something is still there.
    """
    try:
        known = os.lstat(place)
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(known.st_mode):
        os.unlink(place)
        return
    folders, todo = list[str](), [place]
    while todo:
        folders.append(todo.pop())
        with suppress(OSError):
            let_in(folders[-1], os.lstat(folders[-1]))
            with os.scandir(folders[-1]) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        todo.append(entry.path)
                    else:
                        with suppress(OSError):
                            os.unlink(entry.path)
    for folder in reversed(folders[1:]):
        with suppress(OSError):
            os.rmdir(folder)
    os.rmdir(place)


def _is_reserved(name: str) -> bool:
    return name.startswith(_WHITEOUT)


def _bytes_of_header(entry: tarfile.TarInfo) -> bytes:
    return entry.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _file(entry: tarfile.TarInfo, place: str, known: os.stat_result) -> Iterator[bytes]:
    """Yield the entry of a regular file, which may shut its owner out."""
    if known.st_uid == os.geteuid() and not known.st_mode & 0o400:
        os.chmod(place, stat.S_IMODE(known.st_mode) | 0o400)
    descriptor = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        yield _bytes_of_header(entry)
        for at in range(0, entry.size, _CHUNK):
            wanted = min(_CHUNK, entry.size - at)
            piece = file.read(wanted)
            yield piece + b"\0" * (wanted - len(piece))
    yield b"\0" * (-entry.size % tarfile.BLOCKSIZE)
