"""The files of agentrl that a stretch of work enters, found by a profiler.

Invariant: a recording holds the files of the package in which a function was called, or a waiting coroutine continued,
while it ran; coroutines that only wait around the recorded stretch do not count. It covers the thread that opened
`profiled` and the threads started inside the block; servers that run in a thread of their own from before the block are
not part of a journey.
"""

from __future__ import annotations

import gc
import inspect
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import agentrl

PACKAGE = f"{Path(agentrl.__file__).parent}/"


class JourneyRecorder:
    """Records which files are entered between `start` and `stop`."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        """Paths inside the package, of the last recording."""
        self._recording = False
        self._around: set[FrameType] = set()

    def start(self) -> None:
        """Start a recording; it replaces the one before."""
        self.files = set()
        frame = inspect.currentframe()
        self._around = set()
        while frame is not None:
            self._around.add(frame)
            frame = frame.f_back
        self._recording = True

    def stop(self) -> None:
        """Stop recording; `files` stays."""
        self._recording = False
        self._around = set()

    def profile(self, frame: FrameType, event: str, _: object) -> None:
        """Note the file of a call; this is a function for `sys.setprofile`."""
        path = frame.f_code.co_filename
        if self._recording and event == "call" and path.startswith(PACKAGE) and frame not in self._around:
            self.files.add(path.removeprefix(PACKAGE))


@contextmanager
def profiled() -> Generator[JourneyRecorder]:
    """Yield a recorder that sees this thread, and every thread that is started before the block ends."""
    recorder, before = JourneyRecorder(), sys.getprofile()
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
