"""Starts bubblewrap over layers: the same walls as any sandbox, around a root that may be written.

Invariant: a container is entered from the namespace of its layers, as an unprivileged user of this machine. In it that user
is root without a capability. What the sandbox itself needs, its programs, `/dev` and `/proc`, is mounted over the layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from agentrl_sandbox.bubblewrap.host import Ended, Host, UserIds
from agentrl_sandbox.bubblewrap.start import SUPERVISOR_FOLDER, BoxParts, BubblewrapStarter, in_memory
from agentrl_sandbox.bubblewrap.usage import ControlGroups
from agentrl_sandbox.containers.layer_memory import LayerMemory, LayerTools
from agentrl_sandbox.containers.roots import CONTAINER_UID, RootFolder
from agentrl_sandbox.types import Limits

HOST_FOLDER: Final = f"{SUPERVISOR_FOLDER}/host"
"""Where an image of its own shows this machine's `/usr`, for the Python of the supervisor."""
WRAPPER: Final = f"{SUPERVISOR_FOLDER}/python"
WRAPPER_TEXT: Final = f"""#!/bin/sh
u={HOST_FOLDER}/usr
for l in x86_64-linux-gnu/ld-linux-x86-64.so.2 aarch64-linux-gnu/ld-linux-aarch64.so.1 ld-linux-aarch64.so.1; do
  [ -e "$u/lib/$l" ] && exec "$u/lib/$l" --library-path "$u/lib/x86_64-linux-gnu:$u/lib/aarch64-linux-gnu:$u/lib64:$u/lib" \\
    "$u/bin/python3" "$@"
done
l=$u/lib64/ld-linux-x86-64.so.2
exec "$l" --library-path "$u/lib64:$u/lib" "$u/bin/python3" "$@"
"""
"""Runs this machine's Python in an image that may have none, or another C library."""
_MOUNT: Final = """set -e
mount=$1 place=$2 size=$3 lower=$4; shift 4
"$mount" -t tmpfs -o "mode=755,$size" layer "$place"
mkdir "$place/upper" "$place/work" "$place/merged" "$place/kept"
"$mount" -t overlay -o "userxattr,lowerdir=$lower,upperdir=$place/upper,workdir=$place/work" layers "$place/merged"
exec "$@\""""
"""Mounts a new layer over the others and becomes the rest of its words."""


class OneUserId(UserIds):
    """Gives all containers of this process one user, as whom the images are readable and writable."""

    def take(self) -> int:
        """Return the user of containers."""
        return CONTAINER_UID

    def give_back(self, uid: int, sandbox: Ended) -> None:
        """Close the killed `sandbox` when none of its processes is alive."""
        super().give_back(uid, sandbox)
        self._free.clear()

    def give_back_unused(self, uid: int) -> None:
        """Do nothing: the user is never used up."""


class LayerStarter(BubblewrapStarter):
    """Starts the boxes of one run over layers."""

    folders = (".", "dev/shm")

    def __init__(
        self,
        host: Host,
        seccomp: bytes,
        uids: UserIds,
        groups: ControlGroups | None,
        *,
        tools: LayerTools,
        memory: LayerMemory,
        root: RootFolder,
        lower: Sequence[str],
        place: str,
        limits: Limits,
        environment: Mapping[str, str],
    ) -> None:
        """Start over the layers `lower`, the topmost first, with a new one mounted at the directory `place`."""
        super().__init__(host, seccomp, uids, groups)
        self._machine, self._tools, self._memory, self._root = host, tools, memory, root
        self.own_files = {} if root.shows_usr else {WRAPPER: WRAPPER_TEXT.encode()}
        self._lower, self._place, self._size, self._environment = tuple(lower), place, limits, dict(environment)

    def words(self, parts: BoxParts) -> list[str]:
        """Return the arguments of `bwrap`."""
        words = ["--unshare-all", "--unshare-user", "--disable-userns", "--assert-userns-disabled", "--new-session"]
        words += ["--die-with-parent", "--as-pid-1", "--cap-drop", "ALL", "--hostname", "sandbox", "--clearenv"]
        words += ["--uid", "0", "--gid", "0", "--json-status-fd", str(parts.status)]
        words += ["--seccomp", str(parts.descriptors["seccomp"])]
        for name, value in {**self._environment, **parts.program.environment}.items():
            words += ["--setenv", name, value]
        words += ["--bind", f"{self._place}/merged", "/"]
        if self._root.shows_usr:
            words += ["--ro-bind", "/usr", "/usr"]
        words += ["--dev", "/dev", "--dev-bind", "/dev/full", "/dev/zero"]
        words += ["--perms", "0555", "--size", "4096", "--tmpfs", "/dev/pts", "--remount-ro", "/dev/pts"]
        words += [*in_memory("/dev/shm", parts.limits.shared_mb), "--remount-ro", "/dev"]
        words += ["--perms", "0755", "--size", "1048576", "--tmpfs", SUPERVISOR_FOLDER]
        if not self._root.shows_usr:
            words += ["--ro-bind", "/usr", f"{HOST_FOLDER}/usr"]
        for path, descriptor in parts.files.items():
            words += ["--perms", "0555", "--file", str(descriptor), path]
        words += ["--remount-ro", SUPERVISOR_FOLDER, "--proc", "/proc"]
        words += ["--ro-bind", "/dev/null", "/proc/cmdline", "--ro-bind", "/proc/sys", "/proc/sys"]
        return [*words, "--chdir", "/"]

    def command(self, uid: int) -> list[str]:
        """Return the command that enters the namespace of the layers and mounts a new one."""
        size = f"size={self._size.work_mb}m,nr_inodes={self._size.num_files}"
        enter = [self._tools.nsenter, f"--target={self._memory.pid}", "--user", "--mount", "--preserve-credentials", "--"]
        mount = ["/bin/sh", "-c", _MOUNT, "sh", self._tools.mount, self._place, size, ":".join(self._lower)]
        return [*self._machine.entry(uid), *enter, *mount, self._machine.bwrap]
