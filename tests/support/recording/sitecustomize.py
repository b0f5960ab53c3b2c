"""Python imports this at its start: where a test asks for it, the process records which files of agentrl it enters.

`tests.support.journeys` puts this folder on the path of processes, and says when to record. Nothing of it is shipped.
"""

from __future__ import annotations

import inspect
import mmap
import os
import sys
import threading
from types import FrameType


def record(folder: str, packages: tuple[str, ...]) -> None:
    """Append to `entered` the process id, the number of the recording, and each file, while there is a recording."""
    with open(os.path.join(folder, "number"), "r+b") as file:
        number = mmap.mmap(file.fileno(), 1)
    entered = os.open(os.path.join(folder, "entered"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    seen: set[tuple[int, str]] = set()

    def profile(frame: FrameType, event: str, _: object) -> None:
        path = frame.f_code.co_filename
        if not number[0] or event != "call" or not path.startswith(packages) or (number[0], path) in seen:
            return
        if frame.f_code.co_flags & inspect.CO_OPTIMIZED and not is_importing(frame):
            seen.add((number[0], path))
            os.write(entered, f"{os.getpid()} {number[0]} {path}\n".encode())

    threading.setprofile(profile)
    sys.setprofile(profile)


def is_importing(frame: FrameType | None) -> bool:
    """Return whether the call belongs to the import of a module, which no function of agentrl is entered for."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


if "AGENTRL_TEST_RECORDING" in os.environ:
    record(os.environ["AGENTRL_TEST_RECORDING"], tuple(os.environ["AGENTRL_TEST_PACKAGES"].split(os.pathsep)))
