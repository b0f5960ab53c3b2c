"""Makes a root file system for containers of the packages of this machine's Debian, without a network: `... TARGET.tar`.

The bundled terminal tasks find what they need in it. It has folders of another user than root, which a root without
capabilities cannot enter, as the images of registries have them.
"""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PACKAGES = (
    *("apt", "base-files", "base-passwd", "bash", "coreutils", "dash", "diffutils", "file", "findutils", "git", "grep"),
    *("gzip", "hostname", "jq", "make", "mawk", "procps", "python3", "sed", "sqlite3", "tar", "unzip"),
    *("util-linux", "xz-utils", "zip"),
)
"""With all that they depend on."""
LEFT_OUT = ("/usr/share/doc", "/usr/share/man", "/usr/share/locale", "/usr/share/info", "/usr/share/lintian")
FOREIGN_USER = 42
"""`_apt` of Debian's images; it owns what root may not enter without a capability."""
FOLDERS = {"dev": 0o755, "proc": 0o555, "sys": 0o555, "run": 0o755, "root": 0o700, "tmp": 0o1777, "var/tmp": 0o1777}
FOREIGN = {"var/cache/apt/archives/partial": None, "var/lib/apt/lists/partial": "of another user\n"}
"""Closed folders of another user, and the file in each."""


def said_by(*command: str) -> str:
    """Return what a command says; dpkg's fail where one of several packages is virtual, and say the rest."""
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False).stdout


def all_packages() -> list[str]:
    """Return the packages with all that they depend on and this machine has."""
    wishes = ("recommends", "suggests", "conflicts", "breaks", "replaces", "enhances")
    options = [f"--no-{wish}" for wish in wishes]
    found = said_by("apt-cache", "depends", "--recurse", "--installed", *options, *PACKAGES)
    return sorted({line for line in found.splitlines() if line[:1].isalnum()})


def files_of(packages: list[str]) -> list[str]:
    """Return the files of packages, and the links of alternatives."""
    listed = said_by("dpkg", "-L", *packages).splitlines()
    found = {line for line in listed if line.startswith("/") and not line.startswith(LEFT_OUT)}
    found |= {"/etc/alternatives", *(f"/etc/alternatives/{name}" for name in os.listdir("/etc/alternatives"))}
    found |= {f"/usr/bin/{name}" for name in os.listdir("/usr/bin") if _is_alternative(f"/usr/bin/{name}")}
    # What stands below a link of the root, such as /bin, stands below its target too.
    links = {f"/{name}" for name in os.listdir("/") if Path("/", name).is_symlink()}
    whole = {os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path)) for path in found}
    own = {f"/{name}" for name in (*FOLDERS, *FOREIGN)}
    return sorted(path.removeprefix("/") for path in (links | whole) - own - {"/"} if os.path.lexists(path))


def _is_alternative(path: str) -> bool:
    return os.path.islink(path) and os.readlink(path).startswith("/etc/alternatives/")


def add_folders(archive: tarfile.TarFile) -> None:
    """Add what packages do not bring: empty folders, users, and closed folders of another user."""
    for name, mode in FOLDERS.items():
        _add(archive, name, mode)
    for name in ("etc/passwd", "etc/group"):
        _add(archive, name, 0o644, content=Path("/usr/share/base-passwd", f"{Path(name).name}.master").read_bytes())
    for name, text in FOREIGN.items():
        _add(archive, name, 0o700, owner=FOREIGN_USER)
        if text is not None:
            _add(archive, f"{name}/file", 0o600, owner=FOREIGN_USER, content=text.encode())


def _add(archive: tarfile.TarFile, name: str, mode: int, *, owner: int = 0, content: bytes | None = None) -> None:
    entry = tarfile.TarInfo(name)
    entry.mode, entry.uid, entry.gid = mode, owner, owner
    entry.type = tarfile.DIRTYPE if content is None else tarfile.REGTYPE
    entry.size = len(content or b"")
    archive.addfile(entry, io.BytesIO(content or b""))


def version_of_image() -> str:
    """Return a digest of everything that the image is made of."""
    found = said_by("dpkg-query", "--show", *all_packages())
    return hashlib.sha256(found.encode() + Path(__file__).read_bytes()).hexdigest()[:16]


def make_image(target: Path) -> None:
    """Write the archive of the root file system."""
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f"{target.name}.{os.getpid()}")
    with tempfile.NamedTemporaryFile("w") as names:
        names.write("\n".join(files_of(all_packages())))
        names.flush()
        options = ["--no-recursion", "--numeric-owner", "-C", "/", "-cf", str(aside), "-T", names.name]
        subprocess.run(["tar", *options], check=True)
    with tarfile.open(aside, "a") as archive:
        add_folders(archive)
    aside.rename(target)


def main() -> None:
    """Make the image of this machine's packages in a folder, unless it is there; delete older ones, and print its path."""
    folder = Path(sys.argv[1])
    target = folder / f"image-{version_of_image()}.tar"
    if not target.exists():
        make_image(target)
    for older in folder.glob("image-*.tar"):
        if older != target:
            older.unlink()
    print(target)


if __name__ == "__main__":
    main()
