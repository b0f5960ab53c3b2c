"""The changes of a file system as the archive of a layer, where no overlay holds them apart.

Invariant: an archive has the form of an OCI image's layers: `.wh.NAME` stands for what was deleted. Only the file system of
the root counts, without what is mounted into it. Files beyond the budget are left out, as on a disk that is full.
"""

from __future__ import annotations

import base64
import io
import os
import shutil
import stat
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_WHITEOUT = ".wh."
_OPAQUE = ".wh..wh..opq"
OWN = {"run/agentrl", "proc", "sys", "dev"}
Look = dict[str, tuple[int, ...]]


class Changes:
    """What was there at a moment, and what has changed since."""

    def __init__(self, root: str = "/") -> None:
        self.root = root
        self.before: Look = {}

    def mark(self) -> None:
        """Remember the file system as it is now."""
        self.before = self.look()

    def look(self) -> Look:
        """Return the marks of every file by its path below the root; the time of a change cannot be set by a program."""
        found: Look = {}
        device = os.lstat(self.root).st_dev
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
                            todo.append(path)
        return found

    def pack(self, budget: int) -> str:
        """Return the archive of what changed since `mark`, as base64."""
        after, buffer = self.look(), io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
            written: set[str] = set()
            for path in sorted(self.before):
                old, new = self.before[path][0], after.get(path, (0,))[0]
                if stat.S_IFMT(old) != stat.S_IFMT(new) and self.is_kept_above(path, after):
                    self.add_parents(archive, path, written)
                    folder, name = os.path.split(path)
                    archive.addfile(tarfile.TarInfo(os.path.join(folder, _WHITEOUT + name)))
            for path in sorted(after):
                if self.before.get(path) != after[path]:
                    self.add_parents(archive, path, written)
                    budget -= self.add(archive, path, budget, written)
        return base64.b64encode(buffer.getvalue()).decode()

    def is_kept_above(self, path: str, after: Look) -> bool:
        """Return whether the directory above is still one, so that the deletion is not a part of another."""
        folder = os.path.dirname(path)
        return not folder or (folder in after and stat.S_ISDIR(after[folder][0]) and stat.S_ISDIR(self.before[folder][0]))

    def add_parents(self, archive: tarfile.TarFile, path: str, written: set[str]) -> None:
        for parent in reversed(list(Path(path).parents)[:-1]):
            if str(parent) not in written:
                self.add(archive, str(parent), 0, written)

    def add(self, archive: tarfile.TarFile, path: str, budget: int, written: set[str]) -> int:
        """Add one entry, unless it is over the budget, and return how much of that it takes."""
        if path in written:
            return 0
        place = os.path.join(self.root, path)
        with suppress(OSError):
            known = os.lstat(place)
            entry = tarfile.TarInfo(path)
            entry.mode, entry.mtime = stat.S_IMODE(known.st_mode), int(known.st_mtime)
            if stat.S_ISREG(known.st_mode) and known.st_size <= budget:
                descriptor = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
                with os.fdopen(descriptor, "rb") as file:
                    data = file.read(budget + 1)
                if len(data) > budget:
                    return 0
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
                written.add(path)
                return len(data) + 512
            if stat.S_ISDIR(known.st_mode):
                entry.type = tarfile.DIRTYPE
            elif stat.S_ISLNK(known.st_mode):
                entry.type, entry.linkname = tarfile.SYMTYPE, os.readlink(place)
            else:
                return 0
            archive.addfile(entry)
            written.add(path)
        return 512

    def unpack(self, content: str) -> None:
        """Apply an archive to the file system, as an overlay would show it."""
        data = io.BytesIO(base64.b64decode(content))
        modes: dict[str, int] = {}
        with tarfile.open(fileobj=data) as archive:
            for member, place in self.members(archive):
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
        for place, mode in reversed(modes.items()):
            os.chmod(place, mode)

    def members(self, archive: tarfile.TarFile) -> Iterator[tuple[tarfile.TarInfo, str]]:
        for member in archive:
            parts = Path(member.name).parts
            if parts and ".." not in parts and not member.name.startswith("/"):
                yield member, os.path.join(self.root, *parts)


def remove(place: str) -> None:
    """Delete whatever is at a path."""
    if os.path.isdir(place) and not os.path.islink(place):
        shutil.rmtree(place)
    else:
        with suppress(FileNotFoundError):
            os.unlink(place)
