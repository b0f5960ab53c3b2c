"""The files of agentrl that a stretch of work enters, found by a profiler.

Invariant: a recording holds the files of its packages in which a function was called, or a waiting coroutine continued,
while it ran; coroutines that only wait around the recorded stretch do not count. It covers the thread that opened
`profiled` and the threads started inside the block; servers that run in a thread of their own from before the block are
not part of a journey. With a folder it covers the processes that are started with `environment(folder)`, too.
"""

from __future__ import annotations

import gc
import inspect
import mmap
import os
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import agentrl
import agentrl_doors
import agentrl_gguf
import agentrl_rewards
import agentrl_sandbox
import agentrl_simulate
import agentrl_viewer
import agentrl_workflows

PACKAGES = tuple(
    f"{Path(package.__path__[0])}/"
    for package in (
        *(agentrl, agentrl_doors, agentrl_gguf, agentrl_rewards, agentrl_sandbox, agentrl_simulate),
        *(agentrl_viewer, agentrl_workflows),
    )
)
"""Folders of the packages whose files count; the kit for tests, which plays the model, is no part of a journey."""


def file_name(path: str) -> str | None:
    """Return a path of source code as its package and the path in it; None where it is in none of `PACKAGES`."""
    for package in PACKAGES:
        if path.startswith(package):
            return f"{Path(package).name}/{path.removeprefix(package)}"
    return None


class JourneyRecorder:
    """Records which files are entered between `start` and `stop`."""

    def __init__(self, folder: Path | None = None) -> None:
        self.files: set[str] = set()
        """Such as `agentrl/client/client.py`, of the last recording."""
        self._recording = False
        self._around: set[FrameType] = set()
        self._entered = None if folder is None else ProcessRecordings(folder)

    def start(self) -> None:
        """Start a recording; it replaces the one before."""
        self.files = set()
        frame = inspect.currentframe()
        self._around = set()
        while frame is not None:
            self._around.add(frame)
            frame = frame.f_back
        if self._entered is not None:
            self._entered.start()
        self._recording = True

    def stop(self) -> None:
        """Stop recording; `files` stays."""
        self._recording = False
        self._around = set()
        if self._entered is not None:
            self.files |= self._entered.stop()

    def profile(self, frame: FrameType, event: str, _: object) -> None:
        """Note the file of a call; this is a function for `sys.setprofile`."""
        path = frame.f_code.co_filename
        if self._recording and event == "call" and path.startswith(PACKAGES) and frame not in self._around:
            name = file_name(path)
            assert name is not None
            self.files.add(name)


class ProcessRecordings:
    """Recordings in other processes, by `tests/support/recording`, which a byte in memory starts and stops."""

    def __init__(self, folder: Path) -> None:
        self._entered = folder / "entered"
        with (folder / "number").open("w+b") as file:
            file.write(b"\0")
            file.flush()
            self._number = mmap.mmap(file.fileno(), 1)
        self._last = 0

    def start(self) -> None:
        """Start a recording."""
        self._last += 1
        self._number[0] = self._last

    def stop(self, pid: int | None = None) -> set[str]:
        """Stop the recording, and return the files that the processes, or `pid` alone, have entered."""
        self._number[0] = 0
        lines = self._entered.read_text().splitlines() if self._entered.exists() else []
        found = [line.split(" ", 2) for line in lines]
        paths = {path for process, number, path in found if int(number) == self._last and pid in (None, int(process))}
        return {name for path in paths if (name := file_name(path)) is not None}


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of processes whose files `ProcessRecordings(folder)` records."""
    paths = [str(Path(__file__).parent / "recording"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    path = os.pathsep.join(filter(None, paths))
    return {"PYTHONPATH": path, "AGENTRL_TEST_RECORDING": str(folder), "AGENTRL_TEST_PACKAGES": os.pathsep.join(PACKAGES)}


@contextmanager
def profiled(folder: Path | None = None) -> Generator[JourneyRecorder]:
    """Yield a recorder that sees this thread, and every thread that is started before the block ends."""
    recorder, before = JourneyRecorder(folder), sys.getprofile()
    gc.collect()  # what earlier tests left behind is finalized before the block, not in a journey
    gc.disable()
    threading.setprofile(recorder.profile)
    sys.setprofile(recorder.profile)
    try:
        yield recorder
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
        gc.enable()
