"""A control group for each sandbox, where this process has been given a part of cgroup v2 to manage.

Invariant: a sandbox enters its group before anything of it starts, so the kernel counts every byte and process of it.
"""

from __future__ import annotations

import itertools
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from agentrl.sandbox.types import MIB, Limits

_DRIVER: Final = "agentrl-driver"
"""The group into which this process moves: a group with processes cannot give controllers to groups below it."""
_CONTROLLERS: Final = ("memory", "pids")
_OWN_PROCESSES: Final = 5
"""Those of bubblewrap outside the namespace of the sandbox, and those of a warm Python between it and its programs."""
_NUMBERS: Final = itertools.count()
"""Of the groups of this process, whose sandboxes may share a parent."""


class ControlGroup:
    """The group of one sandbox; one that cannot be made is an OSError."""

    def __init__(self, path: Path, limits: Limits) -> None:
        path.mkdir()
        self.path = path
        self._most = limits.memory_mb * MIB
        (path / "memory.max").write_text(str(self._most))
        with suppress(FileNotFoundError):  # a kernel without swap
            (path / "memory.swap.max").write_text("0")
        (path / "memory.oom.group").write_text("1")
        (path / "pids.max").write_text(str(limits.processes + _OWN_PROCESSES))

    @property
    def entry(self) -> str:
        """The file into which a process writes 0 to enter."""
        return str(self.path / "cgroup.procs")

    def memory(self) -> int:
        """Return the bytes in use; more than the limit once the kernel has ended the processes for them."""
        used = int((self.path / "memory.current").read_text())
        return max(used, self._most + 1) if self.ran_out() else used

    def ran_out(self) -> bool:
        """Return whether the kernel has ended the processes for their memory."""
        events = (line.split() for line in (self.path / "memory.events").read_text().splitlines())
        return any(name == "oom_kill" and int(count) > 0 for name, count in events)

    def kill(self) -> None:
        """End every process."""
        with suppress(OSError):  # before Linux 5.14; the namespace ends them all the same
            (self.path / "cgroup.kill").write_text("1")

    def remove(self) -> None:
        """Remove the group, which has no process any more."""
        with suppress(OSError):
            self.path.rmdir()


class ControlGroups:
    """Makes groups below one that is this process's to manage."""

    def __init__(self, parent: Path) -> None:
        self._parent = parent

    def make(self, limits: Limits) -> ControlGroup:
        """Return a new group with these limits."""
        return ControlGroup(self._parent / f"agentrl-{os.getpid()}-{next(_NUMBERS)}", limits)


def find_control_groups(mount: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> ControlGroups | None:
    """Return the groups below this process's own, which it must be alone in and may write; None: there are none.

    This process then moves into a group of its own below that one, which cgroup v2 demands.
    """
    try:
        [path] = [line[3:] for line in own.read_text().splitlines() if line.startswith("0::")]
        group = mount / path.strip("/")
        if group.name == _DRIVER:
            return ControlGroups(group.parent)
        offered = (group / "cgroup.controllers").read_text().split()
        members = (group / "cgroup.procs").read_text().split()
        if not set(_CONTROLLERS) <= set(offered) or members != [str(os.getpid())]:
            return None
        (group / _DRIVER).mkdir(exist_ok=True)
        (group / _DRIVER / "cgroup.procs").write_text(str(os.getpid()))
        (group / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in _CONTROLLERS))
    except (OSError, ValueError):
        return None
    return ControlGroups(group)
