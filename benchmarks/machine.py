"""The machine and versions of a benchmark, for its JSON."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from agentrl.inference.config import InferenceConfig
from agentrl.inference.launch.sglang import find_sglang_python


def describe_machine(*packages: str, sglang: bool = False) -> dict[str, str]:
    """Return the processor, its cores, Python, the versions of `packages`, of SGLang where it is used, and the date."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    described = {
        "cpu": next(names, platform.processor()),
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
        "date": datetime.now(UTC).date().isoformat(),
    }
    if sglang:
        code = "from importlib.metadata import version; print(version('sglang'), version('torch'))"
        command = [find_sglang_python(InferenceConfig(backend="sglang")), "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        described["sglang"], described["sglang_torch"] = done.stdout.split()
    return described


def processes_below(parent: int) -> list[int]:
    """Return the processes that descend from `parent`."""
    below = [child for children in Path(f"/proc/{parent}/task").glob("*/children") for child in children.read_text().split()]
    return [process for child in map(int, below) for process in (child, *processes_below(child))]


def cpu_seconds_of(processes: Iterable[int]) -> float:
    """Return the CPU time that processes have used so far; one that has ended counts as none."""
    return sum(map(_cpu_seconds, processes))


def _cpu_seconds(process: int) -> float:
    try:
        used = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]
    except OSError:
        return 0.0
    return sum(map(int, used)) / os.sysconf("SC_CLK_TCK")
