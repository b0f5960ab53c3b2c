"""Prints what a process was started with, as JSON, and ends as its words say: `python -m tests.support.circumstances`."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
from pathlib import Path


def circumstances() -> dict[str, object]:
    """Return what a process can know of its start."""
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
    handlers = {number.name: str(signal.getsignal(number)).partition(" at ")[0] for number in signal.Signals}
    streams = {name: getattr(sys, name) for name in ("stdin", "stdout", "stderr")}
    return {
        "parent": os.getppid(),
        "leads a session": os.getsid(0) == os.getpid(),
        "leads a group": os.getpgid(0) == os.getpid(),
        "thread": threading.get_native_id() == os.getpid(),
        "words": Path("/proc/self/cmdline").read_bytes().decode().rstrip("\0").split("\0"),
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "path": sys.path,
        "directory": os.getcwd(),
        "variables": {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"},
        "umask": status["Umask"],
        "blocked": status["SigBlk"],
        "handlers": handlers,
        "limits": [resource.getrlimit(limit) for limit in range(resource.RLIMIT_NPROC)],
        "descriptors": sorted(fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")),
        "streams": {name: (stream.encoding, stream.errors, stream.line_buffering) for name, stream in streams.items()},
        "name": __name__,
        "said": sys.stdin.read(),
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(circumstances()))
    sys.stdout.flush()
    match sys.argv[1:]:
        case ["wait", *_]:
            signal.pause()
        case ["say", text, *_]:
            sys.exit(text)
        case [code, *_]:
            sys.exit(int(code))
        case _:
            pass
