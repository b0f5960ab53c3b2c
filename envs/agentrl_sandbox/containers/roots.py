"""Root file systems: this machine's own programs over an empty root, or a folder that an image was unpacked into.

Invariant: a container never writes to one; it is the lowest layer. The default root shows `/usr` of this machine read-only
and no file of a person: `/etc` has the few files that programs need.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agentrl.errors import ConfigError

CONTAINER_UID: Final = 65_500
"""The user of this machine that is root in a container, where root starts containers; it owns unpacked images."""
_EMPTY: Final = ("app", "dev", "home", "logs", "mnt", "opt", "proc", "root", "run", "srv", "sys", "tmp", "usr", "var", "etc")
_INNER: Final = ("var/tmp", "var/log", "var/lib", "var/cache", "run/agentrl")
_LINKED: Final = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_SETTINGS: Final = {
    "passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "group": "root:x:0:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "shells": "/bin/sh\n/bin/bash\n",
    "hostname": "sandbox\n",
}
_COPIED: Final = (
    "ld.so.cache",
    "ld.so.conf",
    "debian_version",
    "os-release",
    "localtime",
    "mime.types",
    "services",
    "protocols",
)
_FORBIDDEN: Final = ",:\\\n"
"""They would end a path among the options of a mount."""


@dataclass(frozen=True, slots=True)
class RootFolder:
    """A root file system on this machine's disk."""

    path: Path
    shows_usr: bool
    """Whether `/usr` is this machine's own, read-only."""

    def check_holds(self, names: Iterable[str]) -> None:
        """Raise a ConfigError where one of these absolute paths lies where a layer over this root has no effect."""
        for name in names:
            if self.shows_usr and name.strip("/").partition("/")[0] in ("usr", *_LINKED):
                raise ConfigError(
                    f"containers: {name!r} is in /usr of this machine, which the default root shows read-only; choose "
                    "another path, or name a folder in `images` for the image of the task"
                )


def make_default_root(folder: Path, owner: int | None) -> RootFolder:
    """Write the default root into an empty folder; `owner` owns its directories, None: this process's user."""
    for name in (*_EMPTY, *_INNER):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for name in ("tmp", "var/tmp"):
        (folder / name).chmod(0o1777)
    for name in _LINKED:
        if Path("/", name).is_symlink():
            (folder / name).symlink_to(os.readlink(f"/{name}"))
        elif Path("/", name).is_dir():
            raise ConfigError(f"containers: /{name} of this machine is no link into /usr; give an image, such as a folder")
    for name, text in _SETTINGS.items():
        (folder / "etc" / name).write_text(text)
    for name in _COPIED:
        with suppress(OSError):
            shutil.copyfile(f"/etc/{name}", folder / "etc" / name)
    with suppress(OSError):
        shutil.copytree("/etc/alternatives", folder / "etc" / "alternatives", symlinks=True)
    if owner is not None:
        give_away(folder, owner)
    return RootFolder(folder, shows_usr=True)


def folder_root(path: Path) -> RootFolder:
    """Return the root in a folder that an image was unpacked into.

    Raises:
        ConfigError: it is no root file system, or a container cannot reach it.
    """
    path = path.resolve()
    if set(_FORBIDDEN) & set(str(path)):
        raise ConfigError(f"containers: {path}: a comma, a colon or a backslash in the path of an image; rename a folder")
    if not (path / "usr").is_dir() or not ((path / "bin" / "bash").exists() or (path / "usr" / "bin" / "bash").exists()):
        raise ConfigError(f"containers: {path}: expected an unpacked image with /usr and bash; see docs/howto/terminal.md")
    for name in ("dev", "proc", "run", "tmp", "logs", "tests"):
        if (path / name).is_symlink():
            raise ConfigError(f"containers: {path / name} is a link; an image has directories there")
    if os.geteuid() == 0:
        for part in (path, *path.parents):
            if not part.stat().st_mode & 0o001:
                raise ConfigError(f"containers: {part} is closed to the user that runs containers; move {path} elsewhere")
    return RootFolder(path, shows_usr=False)


def give_away(folder: Path, owner: int) -> None:
    """Let `owner` own everything below a folder, links included."""
    os.chown(folder, owner, owner)
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            os.chown(Path(place, name), owner, owner, follow_symlinks=False)
