"""Real engines for tests: a dockerd and a podman with folders of their own, which are gone at the end with all they hold.

`scripts/containers_install.sh` installs the engines and makes the image. Where it did not, tests fail. They are skipped for
users other than root, and where the kernel gives root no namespaces.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest

IMAGE = "debian:12"
INSTALL = "run `make containers-install` as root"
_SETTINGS = {
    "runtimes": {
        "runsc": {"path": "/usr/bin/runsc", "runtimeArgs": ["--platform=ptrace", "--network=none", "--ignore-cgroups"]}
    }
}
"""gVisor, as a runtime that asks for nothing which nested machines lack."""
_PATIENCE_S = 120


class Engine(NamedTuple):
    """A running engine that has `IMAGE`."""

    name: str
    command: tuple[str, ...]
    runtime: str | None

    def containers(self, **further: object) -> Mapping[str, object]:
        """Return the choice of containers in a run file that names this engine."""
        own = {"backend": self.name, "image": IMAGE, "command": list(self.command)}
        return {**own, **({} if self.runtime is None else {"runtime": self.runtime}), **further}

    def said(self, *words: str) -> str:
        """Return what its command says."""
        return subprocess.run([*self.command, *words], check=True, capture_output=True, text=True).stdout.strip()

    def left(self) -> list[str]:
        """Return the containers that it has."""
        return self.said("ps", "--all", "--quiet").split()


@contextmanager
def running_docker() -> Generator[Engine]:
    """Start a daemon, and end it with everything in it."""
    image, daemon = _image("docker", "dockerd"), shutil.which("dockerd", path=_PATH)
    assert daemon is not None
    with _folder() as folder, _new_groups("docker"):
        command = ("docker", "--host", f"unix://{folder}/docker.sock")
        (folder / "daemon.json").write_text(json.dumps(_SETTINGS))
        options = ["--iptables=false", "--ip6tables=false", "--bridge=none", "--config-file", f"{folder}/daemon.json"]
        options += ["--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec", "--pidfile", f"{folder}/pid"]
        reasons: list[str] = []
        for driver in ("overlay2", "vfs"):
            words = [daemon, *options, "--storage-driver", driver, "-H", f"unix://{folder}/docker.sock"]
            with (folder / "log").open("w") as log:
                process = subprocess.Popen(words, stdout=log, stderr=log, env={**os.environ, "PATH": _PATH})
            try:
                if _answers(process, [*command, "version"]):
                    engine = Engine("docker", command, None)
                    engine.said("import", str(image), IMAGE)
                    yield engine
                    assert engine.left() == []
                    return
            finally:
                process.terminate()
                process.wait(_PATIENCE_S)
            reasons += (folder / "log").read_text().splitlines()[-1:]
        raise AssertionError(f"dockerd does not start: {reasons}")


@contextmanager
def running_podman() -> Generator[Engine]:
    """Give podman folders of its own, and remove them."""
    image = _image("podman", "runc")
    with _folder() as folder, _new_groups("libpod_parent", "conmon"):
        reasons: list[str] = []
        for driver in ("overlay", "vfs"):
            places = ["--root", f"{folder}/{driver}", "--runroot", f"{folder}/run-{driver}", "--storage-driver", driver]
            command = ("podman", *places, "--cgroup-manager", "cgroupfs")
            done = subprocess.run([*command, "import", str(image), IMAGE], capture_output=True, text=True, check=False)
            if done.returncode == 0:
                engine = Engine("podman", command, _runtime_of_podman())
                yield engine
                assert engine.left() == []
                engine.said("rmi", "--all", "--force")
                return
            reasons += done.stderr.splitlines()[-1:]
        raise AssertionError(f"podman imports no image: {reasons}")


def _runtime_of_podman() -> str | None:
    """Return runc where crun refuses: it wants control groups of one version."""
    is_hybrid = Path("/sys/fs/cgroup/unified").exists() and not Path("/sys/fs/cgroup/cgroup.controllers").exists()
    return "runc" if is_hybrid else None


_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def gvisor() -> str:
    """Return the name of the runtime that is gVisor."""
    _need("/usr/bin/runsc")
    return "runsc"


def _image(*programs: str) -> Path:
    """Return the archive of the image, on a machine that runs containers and has the programs."""
    if os.geteuid() != 0:
        pytest.skip("only root starts a dockerd, or a podman with folders of its own")
    namespaces = ["unshare", "--mount", "--pid", "--net", "--ipc", "--uts", "--fork", "true"]
    refusal = subprocess.run(namespaces, capture_output=True, text=True, check=False).stderr.strip()
    if refusal:
        pytest.skip(f"this machine forbids containers: {refusal}")
    for program in programs:
        _need(program)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(os.environ.get("AGENTRL_TEST_IMAGES") or cache / "agentrl" / "containers")
    images = sorted(folder.glob("image-*.tar"), key=lambda path: path.stat().st_mtime)
    assert images, f"there is no image in {folder}; {INSTALL}"
    return images[-1]


def _need(program: str) -> None:
    assert shutil.which(program, path=_PATH) is not None, f"{program} is missing; {INSTALL}"


def _answers(process: subprocess.Popen[bytes], command: list[str]) -> bool:
    """Return whether a daemon answers before it ends."""
    while process.poll() is None:
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            return True
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
    return False


@contextmanager
def _folder() -> Generator[Path]:
    """Yield a folder with a short path, for sockets; at the end nothing is mounted below it, and it is gone."""
    folder = Path(tempfile.mkdtemp(prefix="agentrl-engine-", dir="/tmp"))
    try:
        yield folder
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        below = sorted((mount for mount in mounts if mount.startswith(f"{folder}/")), reverse=True)
        for mount in below:  # the graph driver's own
            subprocess.run(["umount", "--lazy", mount], check=True)
        assert [mount for mount in below if "/merged" in mount or "/shm" in mount] == []
        assert _processes_of(folder) == []
    finally:
        for pid in _processes_of(folder):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def _processes_of(folder: Path) -> list[int]:
    """Return the processes whose command names the folder, this one aside."""
    found: list[int] = []
    for place in Path("/proc").iterdir():
        if place.name.isdecimal() and int(place.name) != os.getpid():
            with suppress(OSError):
                if str(folder).encode() in (place / "cmdline").read_bytes():
                    found.append(int(place.name))
    return found


@contextmanager
def _new_groups(*names: str) -> Generator[None]:
    """Remove at the end the control groups of these names that were not there at the beginning, which are empty then."""
    root = Path("/sys/fs/cgroup")
    before = {path for name in names for path in (*root.glob(f"*/{name}"), *root.glob(name))}
    yield
    for name in names:
        for path in {*root.glob(f"*/{name}"), *root.glob(name)} - before:
            for inner in sorted(path.glob("**/"), reverse=True):
                with suppress(OSError):  # another process of tests uses it
                    inner.rmdir()
