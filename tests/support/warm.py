"""The interpreters of warm starts that run on this machine."""

from __future__ import annotations

from pathlib import Path

from agentrl_sandbox.types import Limits


def warm_parents(limits: Limits) -> list[int]:
    """Return the process ids of the interpreters that fork programs with as many files as `limits` allows."""
    found: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
                above = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if b"/run/agentrl/forks.py" in words and f'"num_files": {limits.num_files},'.encode() in b" ".join(words):
                found[int(folder.name)] = above
    return [pid for pid, above in found.items() if above not in found]
