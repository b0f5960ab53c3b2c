"""A worker process: jobs come in on stdin, replies go out on stdout, as JSON in frames.

Invariant: it holds no descriptors but its streams and the notice of its parent's end, and no environment but what the pool
gives it. It ends when its stdin or its parent ends. A job that spends its CPU time ends the process by SIGPROF,
whatever code runs.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, cast

from agentrl.processes.frames import framed, read_frames, read_in_thread, take_standard_streams

MAX_FILE_BYTES = 2**20
"""Most bytes that a process with limits may write into any file, its own stderr included."""
MAX_OPEN_FILES = 64
_MAX_TRACEBACK_CHARS = 4_000


def run_jobs(loader: str, cpu_s: float, memory_bytes: int) -> None:
    """Answer jobs until stdin ends; `cpu_s` and `memory_bytes` are limits of a job and of the process, 0: none."""
    source, sink = take_standard_streams()

    def send(reply: dict[str, object]) -> None:
        sink.write(framed(json.dumps(reply).encode()))
        sink.flush()

    module, _, name = loader.partition(":")
    function = cast("Callable[..., object]", getattr(importlib.import_module(module), name)())
    if memory_bytes:
        _limit_resources(memory_bytes)
    jobs: SimpleQueue[bytes] = SimpleQueue()
    read_in_thread(read_frames(source), jobs.put, _leave)
    send({"ready": True})
    while True:
        reply = _answer(function, jobs.get(), cpu_s)
        send(reply)
        if "value" not in reply:
            return  # an interrupted function may have left anything behind in its libraries


def _limit_resources(memory_bytes: int) -> None:
    for kind, limit in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, MAX_FILE_BYTES),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
    ):
        hard = resource.getrlimit(kind)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, limit))


def _leave(_problem: BaseException | None) -> None:
    os._exit(0)  # the parent has ended, or does not need this process any more; a job may still run


def _answer(function: Callable[..., object], job: bytes, cpu_s: float) -> dict[str, object]:
    arguments: list[Any] = json.loads(job)
    # Processor time, not the clock: on a busy machine a job gets as much of it as on an idle one.
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        value = function(*arguments)
        # Here, so that a value that is no JSON is an error of the job and not of the process.
        json.dumps(value)
        return {"value": value}
    except MemoryError:
        return {"limit": "memory"}
    except BaseException:  # noqa: BLE001 - it is reported to the parent, which raises
        return {"error": traceback.format_exc()[-_MAX_TRACEBACK_CHARS:]}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def main() -> None:
    """Run the jobs of the pool that started this process."""
    run_jobs(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))


if __name__ == "__main__":
    main()
