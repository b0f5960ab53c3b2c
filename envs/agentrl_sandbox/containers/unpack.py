"""Unpack an image once into a folder that containers begin with.

    python -m agentrl_sandbox.containers.unpack debian.tar /srv/images/debian-12

The image is what `docker save` or `podman save` writes, or an OCI layout (a directory, or a tar of one). No daemon is asked
and nothing is downloaded.

Invariant: no file is written outside the folder, whatever the image holds; a folder that could not be filled is removed.
"""

from __future__ import annotations

import io
import os
import platform
import shutil
import stat
import sys
import tarfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, Final, cast

import msgspec

from agentrl.errors import ConfigError
from agentrl_sandbox.containers.image_facts import facts_in, write_facts
from agentrl_sandbox.containers.layer_archive import OPAQUE, WHITEOUT, deleted_name
from agentrl_sandbox.containers.roots import CONTAINER_UID, give_away

_ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}
_MAX_LINKS: Final = 40
_ZSTD: Final = b"\x28\xb5\x2f\xfd"
_Read = Callable[[str], bytes]


def unpack_image(source: Path, folder: Path) -> None:
    """Unpack the image in `source` into the new folder `folder`.

    Raises:
        ConfigError: there is no image, it is for another processor, or the folder exists already.
    """
    if folder.exists():
        raise ConfigError(f"{folder}: it exists already; remove it, or name another folder")
    with _reader(source) as read:
        config, layers = _config_and_layers(source, read)
        folder.mkdir(parents=True)
        try:
            for number, name in enumerate(layers, 1):
                _apply(read(name), folder, f"{source}, layer {number}")
            write_facts(folder, facts_in(config))
            if os.geteuid() == 0:
                give_away(folder, CONTAINER_UID)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise


@contextmanager
def _reader(source: Path) -> Generator[_Read]:
    """Yield a function that reads a file of the image by its name."""
    if source.is_dir():
        yield lambda name: (source / name).read_bytes()
        return
    try:
        packed = tarfile.open(source)  # noqa: SIM115 - closed below
    except (OSError, tarfile.TarError) as error:
        raise ConfigError(f"{source}: expected a tar of `docker save`, or an OCI layout: {error}") from error

    def read(name: str) -> bytes:
        file = packed.extractfile(name)
        if file is None:
            raise KeyError(name)
        return file.read()

    with packed:
        yield read


def _config_and_layers(source: Path, read: _Read) -> tuple[bytes, list[str]]:
    """Return the configuration of the image, and the names of its layers, the lowest first."""
    try:
        return _oci_layers(source, read, _as_object(read("index.json")))
    except (KeyError, FileNotFoundError):
        pass
    try:
        [image] = cast("list[dict[str, Any]]", msgspec.json.decode(read("manifest.json")))
    except (KeyError, FileNotFoundError, ValueError) as error:
        raise ConfigError(f"{source}: it has neither index.json nor a manifest.json of one image: {error}") from error
    config = read(image["Config"])
    _check_architecture(source, _as_object(config))
    return config, list(image["Layers"])


def _oci_layers(source: Path, read: _Read, index: dict[str, Any]) -> tuple[bytes, list[str]]:
    manifests = [each for each in index["manifests"] if _fits(each.get("platform"))]
    if len(manifests) != 1:
        raise ConfigError(f"{source}: expected one image for this processor, {_own_processor()}, found {len(manifests)}")
    manifest = _as_object(read(_blob(manifests[0]["digest"])))
    if "manifests" in manifest:
        return _oci_layers(source, read, manifest)
    config = read(_blob(manifest["config"]["digest"]))
    _check_architecture(source, _as_object(config))
    return config, [_blob(each["digest"]) for each in manifest["layers"]]


def _as_object(data: bytes) -> dict[str, Any]:
    return cast("dict[str, Any]", msgspec.json.decode(data))


def _blob(digest: str) -> str:
    return "blobs/" + digest.replace(":", "/")


def _own_processor() -> str:
    machine = platform.machine()
    return _ARCHITECTURES.get(machine, machine)


def _fits(wanted: dict[str, str] | None) -> bool:
    return wanted is None or (
        wanted.get("os", "linux") == "linux" and wanted.get("architecture", _own_processor()) == _own_processor()
    )


def _check_architecture(source: Path, config: dict[str, Any]) -> None:
    if not _fits(config):
        what = f"{config.get('os', 'linux')}/{config.get('architecture')}"
        raise ConfigError(f"{source}: an image for {what}; this machine runs linux/{_own_processor()}")


def _apply(data: bytes, root: Path, where: str) -> None:
    if data.startswith(_ZSTD):
        raise ConfigError(f"{where}: compressed with zstd; save the image again with `docker save`, or with gzip")
    try:
        with tarfile.open(fileobj=io.BytesIO(data)) as layer:
            for member in layer:
                _extract(layer, member, root)
    except tarfile.TarError as error:
        raise ConfigError(f"{where}: {error}") from error


def _extract(layer: tarfile.TarFile, member: tarfile.TarInfo, root: Path) -> None:
    path = PurePosixPath("/", member.name)
    if path == PurePosixPath("/") or ".." in path.parts:
        return
    parent = _inside(root, path.parent)
    parent.mkdir(parents=True, exist_ok=True)
    place = parent / path.name
    if path.name == OPAQUE:
        for each in parent.iterdir():
            _unlink_tree(each)
        return
    if path.name.startswith(WHITEOUT):
        _unlink_tree(parent / deleted_name(path.name))
        return
    if member.isdir():
        if place.is_symlink() or (place.exists() and not place.is_dir()):
            _unlink_tree(place)
        place.mkdir(exist_ok=True)
        place.chmod(0o700 | member.mode & 0o1777)
        return
    _unlink_tree(place)
    if member.issym():
        place.symlink_to(member.linkname)
    elif member.islnk():
        os.link(_inside(root, PurePosixPath("/", member.linkname).parent) / PurePosixPath(member.linkname).name, place)
    elif member.isfile() and (file := layer.extractfile(member)) is not None:
        with file, place.open("wb") as target:
            shutil.copyfileobj(file, target)
        place.chmod(0o600 | member.mode & 0o777)


def _inside(root: Path, path: PurePosixPath) -> Path:
    """Return the place of a directory of the image; its links lead to places of the image, never of this machine."""
    todo, found, links = list(path.parts[1:]), list[str](), 0
    while todo:
        part = todo.pop(0)
        if part == "..":
            found = found[:-1]
            continue
        place = root.joinpath(*found, part)
        if place.is_symlink():
            links += 1
            if links > _MAX_LINKS:
                raise ConfigError(f"{root}: {path} of the image is a circle of links")
            target = PurePosixPath(os.readlink(place))
            found = [] if target.is_absolute() else found
            todo = [each for each in target.parts if each != "/"] + todo
        else:
            found.append(part)
    return root.joinpath(*found)


def _unlink_tree(place: Path) -> None:
    try:
        mode = place.lstat().st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(mode):
        shutil.rmtree(place)
    else:
        place.unlink()


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m agentrl_sandbox.containers.unpack IMAGE FOLDER")
    try:
        unpack_image(Path(sys.argv[1]), Path(sys.argv[2]))
    except ConfigError as problem:
        sys.exit(str(problem))
