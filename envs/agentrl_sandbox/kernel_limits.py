"""The limits that the kernel keeps for each process, set on the way into a program.

Invariant: every process of a program has each limit from its first instruction, process 1 included, and none can raise one.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import Final

from agentrl.errors import ConfigError
from agentrl_sandbox.types import MIB, Limits

SYSTEM_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PENDING: Final = 1024
"""Signals that wait and timers, of all processes together; the kernel holds memory for each."""


def find_prlimit() -> str:
    """Return the path of util-linux's `prlimit`; a system without one is a ConfigError."""
    found = shutil.which("prlimit", path=SYSTEM_PATH)
    if found is None:
        raise ConfigError("sandbox: cannot find prlimit; install util-linux 2.34 or newer")
    return found


def process_limits(limits: Limits) -> dict[str, int]:
    """Return the limits of each process by the kernel's names, without that of CPU time.

    Example:
        >>> process_limits(Limits(processes=8, memory_mb=64))["AS"]
        67108864
    """
    return {
        "NPROC": limits.processes,
        "AS": (limits.address_space_mb or limits.memory_mb) * MIB,
        "FSIZE": max(limits.work_mb, limits.temp_mb) * MIB,
        "NOFILE": limits.open_files,
        "CORE": 0,
        "SIGPENDING": _PENDING,
        "MSGQUEUE": 0,
    }


def limited(prlimit: str, limits: Limits, argv: Sequence[str]) -> list[str]:
    """Return a command that becomes `argv` under the limits; inside a namespace NPROC counts that one's processes alone."""
    options = [f"--{name.lower()}={value}" for name, value in process_limits(limits).items()]
    return [prlimit, *options, f"--cpu={limits.cpu_s}:{limits.cpu_s + 1}", "--", *argv]
