"""How much memory of this machine, or of its container, is free, and whether published weights get a copy in it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final, Literal

_CGROUP = Path("/sys/fs/cgroup")
AUTO_SHARE: Final = 3
"""With `trainer.snapshot: auto`, a snapshot takes at most the free memory divided by this."""


def snapshot_kind(setting: Literal["auto", "host", "stream"], num_bytes: int, free: int | None) -> Literal["host", "stream"]:
    """Return what `trainer.snapshot` takes for weights of `num_bytes`, where `free` bytes are free; None: not known.

    Example:
        >>> snapshot_kind("auto", 100, 300), snapshot_kind("auto", 101, 300), snapshot_kind("host", 101, 300)
        ('host', 'stream', 'host')
    """
    if setting != "auto":
        return setting
    return "stream" if free is not None and num_bytes * AUTO_SHARE > free else "host"


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
