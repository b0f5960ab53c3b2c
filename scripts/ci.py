"""What `.ci/run` runs: the targets that a change must pass, with the time that each takes.

    bash .ci/run         # what the change needs, as `scripts.lanes` finds it
    bash .ci/run all     # everything

Environments are installed while the first targets run. Every target runs, also after one that failed; its output is in
`build/ci/`, and that of targets that failed is printed again at the end. `build/ci_times.jsonl` gets a line for each.

Invariant: the exit status is 0 only where all targets have passed.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.lanes import lanes
from scripts.rooms import ROOT

LOGS = ROOT / "build" / "ci"
TIMES = ROOT / "build" / "ci_times.jsonl"
LAST_LINES = 300
"""How much of the output of a target that failed is printed again."""
EVERYTHING = (
    "check",
    "test",
    "test-clients",
    "test-envs CELLS=short",
    "test-sglang CELLS=short",
    "chaos CELLS=short",
)
INSTALLATIONS = {
    "test-clients": ("clients-install",),
    "test-conformance": ("sglang-install",),
    "test-envs": ("envs-install", "browser-install", "containers-install"),
    "test-sglang": ("sglang-install",),
}
"""What targets install, which begins before them."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A target that has ended."""

    target: str
    seconds: float
    cpu_seconds: float
    """Of its processes; less than `seconds` times the cores is time in which a core had nothing to do."""
    status: int
    log: Path


def targets(companions: Sequence[str] | None) -> list[str]:
    """Return the targets of make for the companions that a change touches; None: for any change."""
    if companions is None:
        return list(EVERYTHING)
    chosen = ["check", "test-core", *(f"lane PACKAGE={package}" for package in companions)]
    return [*chosen, "test-conformance", "chaos CELLS=short"]


def installations(chosen: Sequence[str]) -> list[str]:
    """Return the targets that install what the chosen ones need beside `.venv`."""
    found: list[str] = []
    for target in chosen:
        words = target.split()
        found += ["lane-install " + words[1]] if words[0] == "lane" else INSTALLATIONS.get(words[0], ())
    return list(dict.fromkeys(found))


def run_target(target: str) -> Ended:
    """Run a target of make, and write its output to this process's and to a file."""
    print(f"\n=== make {target}", flush=True)
    log = LOGS / f"{target.replace(' ', '-').replace('=', '-')}.log"
    begin, cpu_before = time.monotonic(), _cpu_seconds()
    with log.open("wb") as file:
        command = ["make", "--no-print-directory", *target.split()]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            assert process.stdout is not None
            while part := os.read(process.stdout.fileno(), 65536):
                file.write(part)
                sys.stdout.buffer.write(part)
                sys.stdout.buffer.flush()
    return Ended(target, time.monotonic() - begin, _cpu_seconds() - cpu_before, process.returncode, log)


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def write_times(ended: Sequence[Ended]) -> None:
    """Write a JSON line for each target: its words, the seconds that it took, and the cores of this machine."""
    cores = len(os.sched_getaffinity(0))
    rows = [
        {
            "target": end.target,
            "seconds": round(end.seconds, 1),
            "cpu_seconds": round(end.cpu_seconds, 1),
            "cores": cores,
        }
        for end in ended
    ]
    TIMES.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def summary(ended: Sequence[Ended]) -> str:
    """Return a table of the targets with their times, below the last lines of those that failed."""
    parts: list[str] = []
    for end in ended:
        if end.status:
            last = end.log.read_text(errors="replace").splitlines()[-LAST_LINES:]
            parts += [f"\n=== make {end.target} failed with status {end.status}; its last lines:", *last]
    width = max(len(end.target) for end in ended)
    rows = [(end.target, end.seconds, end.cpu_seconds, "failed" if end.status else "") for end in ended]
    rows.append(("in all", sum(end.seconds for end in ended), sum(end.cpu_seconds for end in ended), ""))
    parts += [
        "",
        *(
            f"{target:{width}} {seconds / 60:6.1f} min, {cpu / 60:6.1f} of a core  {said}".rstrip()
            for target, seconds, cpu, said in rows
        ),
    ]
    return "\n".join(parts)


def main(arguments: Sequence[str]) -> int:
    """Run what the change needs; return the exit status."""
    companions = None if arguments[:1] == ["all"] else lanes()
    chosen = targets(companions)
    print(
        "everything" if companions is None else f"the core's tests, and the lanes of: {', '.join(companions) or 'nothing'}"
    )
    LOGS.mkdir(parents=True, exist_ok=True)
    ended = [run_target("setup sandbox-install")]
    if ended[0].status:
        chosen = []  # each would fail for the same reason
    # Targets install the same, or wait for it: what fails here fails there again, with its message.
    script = "; ".join(f"make --no-print-directory {target}" for target in ["setup", *installations(chosen)])
    with (
        (LOGS / "installations.log").open("wb") as log,
        subprocess.Popen(["sh", "-c", script], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT),
    ):
        ended += [run_target(target) for target in chosen]
    write_times(ended)
    print(summary(ended))
    return 1 if any(end.status for end in ended) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
