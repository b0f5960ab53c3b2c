"""How much memory of this machine, or of its container, is free."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def free_memory() -> int | None:
    """Return the bytes that this machine and this process's container can still give; None where the system does not tell.

    File pages that the kernel can drop count as free.
    """
    found: list[int] = []
    with suppress(OSError, IndexError, ValueError):
        text = Path("/proc/meminfo").read_text()
        found.append(int(text.partition("MemAvailable:")[2].split()[0]) << 10)
    with suppress(OSError, IndexError, ValueError):  # no limit, or no cgroups of version 2
        dropped = int((_CGROUP / "memory.stat").read_text().partition("\ninactive_file ")[2].split()[0])
        used = int((_CGROUP / "memory.current").read_text()) - dropped
        found.append(int((_CGROUP / "memory.max").read_text()) - used)
    return min(found, default=None)
