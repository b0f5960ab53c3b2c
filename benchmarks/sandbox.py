"""Programs in the sandbox: seconds to run a one-line Python program, against a bare start of the same Python.

Measures one program at a time (bare, bubblewrap), as many at a time as there are cores (a pool), a session's opening and
a call in it, programs and grades of code with four tests each (in sandboxes, and in forks of warm interpreters), and
what 1,000 runs leave behind: process namespaces, descriptors, files in the temporary directory.

Run: `python -m benchmarks.sandbox [--runs 1000]` (about a minute). It prints and writes benchmarks/results/sandbox.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio

from agentrl_rewards.code import CodeGrader, call_tests
from agentrl_rewards.code.grader import ProgramRunner
from agentrl_sandbox import Limits, Program, Result, SandboxPool, open_bubblewrap, open_warm_python, python_program
from agentrl_sandbox.bubblewrap.host import find_host
from benchmarks.machine import describe_machine

RESULT = Path(__file__).parent / "results" / "sandbox.json"
PROGRAM = "print(6 * 7)"
SUBMISSION = "```python\ndef f(x):\n    return 2 * x\n```"
AIM_OVERHEAD_MS = 60.0


def quantiles(seconds: list[float]) -> dict[str, float]:
    """Return the median and the 99th percentile, in milliseconds."""
    ordered = sorted(seconds)
    return {
        "p50_ms": round(1e3 * ordered[len(ordered) // 2], 1),
        "p99_ms": round(1e3 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], 1),
    }


def bare(python: str) -> float:
    """Return the seconds of one bare start."""
    began = time.perf_counter()
    subprocess.run([python, "-c", PROGRAM], check=True, stdout=subprocess.DEVNULL, env={})
    return time.perf_counter() - began


async def timed(action: Callable[[], Awaitable[object]]) -> float:
    began = time.perf_counter()
    await action()
    return time.perf_counter() - began


def left_behind() -> dict[str, int]:
    """Return what a run could leave: processes of this machine's sandboxes, own descriptors, temporary files."""
    namespaces: set[str] = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                namespaces.add(os.readlink(folder / "ns" / "pid"))
            except OSError:
                continue
    return {
        "process_namespaces": len(namespaces),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "temporary_files": len(os.listdir(tempfile.gettempdir())),
    }


async def grades_per_second(runner: ProgramRunner, count: int) -> float:
    """Return how many submissions a second are graded by four tests each; the first one is not counted."""
    grader = CodeGrader(runner)
    tests = call_tests([(f"f({number})", str(2 * number)) for number in range(4)])
    await grader.grade(SUBMISSION, tests)
    began = time.perf_counter()

    async def grade() -> None:
        grade = await grader.grade(SUBMISSION, tests)
        assert grade.is_solved, grade.feedback()

    async with anyio.create_task_group() as tasks:
        for _ in range(count):
            tasks.start_soon(grade)
    return round(count / (time.perf_counter() - began), 1)


async def programs_per_second(run: Callable[[Program], Awaitable[Result]], count: int) -> float:
    """Return how many one-line programs a second `run` does, as many at a time as there are cores."""
    program = python_program(PROGRAM)
    await run(program)
    limiter = anyio.CapacityLimiter(os.cpu_count() or 1)
    began = time.perf_counter()

    async def run_one() -> None:
        async with limiter:
            result = await run(program)
        assert result.text == "42", result

    async with anyio.create_task_group() as tasks:
        for _ in range(count):
            tasks.start_soon(run_one)
    return round(count / (time.perf_counter() - began), 1)


async def measure(runs: int) -> dict[str, object]:
    """Return every figure."""
    sandbox = await open_bubblewrap(limits=Limits(wall_s=60))
    program = python_program(PROGRAM)
    python = find_host().python
    few = max(20, runs // 10)
    bares: list[float] = []
    alone: list[float] = []
    for _ in range(few):  # in turn, so that a busy machine slows both
        bares.append(bare(python))
        alone.append(await timed(lambda: sandbox.run(program)))
    before = left_behind()
    pool = SandboxPool(sandbox)
    together: list[float] = []
    began = time.perf_counter()

    async def run_one() -> None:
        result = await pool.run(program)
        assert result.text == "42", result
        together.append(result.wall_s)

    async with anyio.create_task_group() as tasks:
        for _ in range(runs):
            tasks.start_soon(run_one)
    seconds = time.perf_counter() - began
    after = left_behind()
    opened: list[float] = []
    calls: list[float] = []
    for _ in range(10):
        began = time.perf_counter()
        async with sandbox.session() as session:
            await session.python("1")
            opened.append(time.perf_counter() - began)
            calls += [await timed(lambda: session.python("1 + 1")) for _ in range(20)]
    graded = {"sandboxes": await grades_per_second(pool, few)}
    ran = {"sandboxes": await programs_per_second(pool.run, few)}
    async with sandbox.session() as session:
        ran["one_session"] = await programs_per_second(session.run, few)
    async with open_warm_python(pool) as warm:
        graded["warm_interpreters"] = await grades_per_second(warm, few)
        ran["warm_interpreters"] = await programs_per_second(warm.run, few)
    overhead_ms = 1e3 * (sorted(alone)[few // 2] - sorted(bares)[few // 2])
    return {
        "bare": quantiles(bares),
        "sandbox": quantiles(alone),
        "overhead_ms": round(overhead_ms, 1),
        "aim_overhead_ms": AIM_OVERHEAD_MS,
        "pool": {
            "runs": runs,
            "at_a_time": pool.max_running,
            "per_second": round(runs / seconds, 1),
            **quantiles(together),
        },
        "session_first_call": quantiles(opened),
        "session_call": quantiles(calls),
        "programs_per_second": ran,
        "grades_per_second": graded,
        "left_behind": {name: after[name] - before[name] for name in before},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder  # so that the count holds this program's files only
        figures = anyio.run(measure, options.runs)
    found = {"machine": describe_machine("anyio"), **figures}
    RESULT.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
