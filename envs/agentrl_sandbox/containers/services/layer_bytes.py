"""Layers as archives in memory: cut down to what is kept, looked into. Their form is that of `layer_archive`.

Invariant: an archive that came from a container is only read, member by member; none of its links is followed.
"""

from __future__ import annotations

import errno
import io
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePosixPath

from agentrl.errors import ConfigError, EnvironmentFault
from agentrl_sandbox.containers.layer_archive import OPAQUE, WHITEOUT, add_folders, deleted_name, layer_members
from agentrl_sandbox.containers.layer_files import is_utf8


def keep_in_layer(layer: bytes, paths: Sequence[str], homes: Sequence[str]) -> bytes:
    """Return a layer with these parts alone, as `Workbench.keep` describes."""
    wanted = [PurePosixPath(path).relative_to("/") for path in paths]
    at_home = [PurePosixPath(home).relative_to("/") for home in homes]

    def is_kept(path: PurePosixPath) -> bool:
        if any(path.is_relative_to(part) for part in wanted):
            return True
        below = (path.relative_to(home).parts for home in at_home if path.is_relative_to(home))
        return any(parts and not parts[0].startswith(".") for parts in below)

    roots = {*wanted, *(path for path in _tops_of_homes(layer, at_home))}
    return _filtered(layer, lambda member, path: is_kept(path) and not (path in roots and member.issym()))


def _tops_of_homes(layer: bytes, homes: Sequence[PurePosixPath]) -> set[PurePosixPath]:
    return {path for _, path, _ in _layer_members(layer) if path.parent in homes}


def _filtered(layer: bytes, is_kept: Callable[[tarfile.TarInfo, PurePosixPath], bool]) -> bytes:
    buffer, folders = io.BytesIO(), set[PurePosixPath]()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as target:
        for member, path, content in _layer_members(layer):
            if not is_kept(member, path):
                continue
            add_folders(target, list(reversed(path.parents)), folders)
            if member.isdir() and member.name == str(path):
                if path in folders:
                    continue
                folders.add(path)
            target.addfile(member, None if content is None else io.BytesIO(content))
    return buffer.getvalue()


def _layer_members(layer: bytes) -> Iterator[tuple[tarfile.TarInfo, PurePosixPath, bytes | None]]:
    """Yield each member, the path that it is about, and its content; what is no layer is an EnvironmentFault."""
    try:
        with tarfile.open(fileobj=io.BytesIO(layer)) as archive:
            for member, place in layer_members(archive):
                path = place
                if place.name == OPAQUE:
                    path = place.parent
                elif place.name.startswith(WHITEOUT):
                    path = place.with_name(deleted_name(place.name))
                source = archive.extractfile(member) if member.isfile() else None
                yield member, path, None if source is None else source.read()
    except (tarfile.TarError, ConfigError) as error:
        raise EnvironmentFault(f"containers: what came from a container is no layer: {error}") from None


def is_layer(layer: bytes) -> bool:
    """Return whether bytes that came from a container are a layer."""
    try:
        for _ in _layer_members(layer):
            pass
    except EnvironmentFault:
        return False
    return True


def names_at_top(layer: bytes) -> list[str]:
    """Return the absolute paths of what a layer has at its top, as `Workbench.changed` describes."""
    return sorted({f"/{path.parts[0]}" for _, path, _ in _layer_members(layer) if is_utf8(path.parts[0])})


def read_in_layer(layer: bytes, path: str, max_bytes: int) -> bytes:
    """Return a regular file of a layer, as `Workbench.read` describes."""
    wanted = PurePosixPath(path).relative_to("/")
    for member, found, content in _layer_members(layer):
        if found == wanted and member.isfile() and content is not None and member.name == str(wanted):
            if len(content) > max_bytes:
                raise OSError(errno.EFBIG, f"it is larger than {max_bytes} bytes", path)
            return content
    raise FileNotFoundError(errno.ENOENT, "the newest layer has no such file", path)
