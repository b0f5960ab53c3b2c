"""The parent of a warm start: forks a Python that has started already, once for each program.

Invariant: it never reads a program, so none finds another in its memory. Its processes are out of a program's sight; the
program's own are in a namespace that ends, with every thread, before its result is reported. Whatever fails before the
program begins is reported as a fault, and whatever fails from then on is the program's doing.
"""

from __future__ import annotations

import atexit
import base64
import gc
import importlib
import json
import os
import resource
import runpy
import signal
import socket
import sys
import traceback
import typing
from contextlib import suppress
from pathlib import Path

FOLDER = str(Path(__file__).parent)
sys.path.insert(0, FOLDER)
from capture import hide  # noqa: E402
from walls import enter_namespaces, furnish, give_up_rights  # noqa: E402

FAULT = 255
"""Exit status of a program's first process that started no program."""
_SIGNALLED = 128
_CONTROL = 3
_PRELOADED = (importlib, typing)
"""What nearly every program imports."""
_NAMES = [name for name in dir(resource) if name.startswith("RLIMIT_")]
for _name in ("capture", "walls"):
    del sys.modules[_name]  # programs may have modules of these names


class Forked(typing.NamedTuple):
    """What a fork gets: its job, its three streams, and the socket on which it reports."""

    job: int
    streams: list[int]
    report: socket.socket


class Settings(typing.NamedTuple):
    """What all programs have in common."""

    limits: dict[str, int]
    sizes: dict[str, int]
    num_files: int
    seccomp: bytes


def _own_limits() -> dict[str, tuple[int, int]]:
    return {name: resource.getrlimit(getattr(resource, name)) for name in _NAMES}


def _restore_limits(wanted: dict[str, tuple[int, int]]) -> None:
    """Set this process's limits to `wanted`, and end it if one cannot be had: every program inherits them."""
    for name, value in wanted.items():
        number = getattr(resource, name)
        if resource.getrlimit(number) != value:
            with suppress(OSError, ValueError):
                resource.setrlimit(number, value)
    if (found := _own_limits()) != wanted:
        changed = {name: found[name] for name in wanted if found[name] != wanted[name]}
        sys.exit(f"the limits of the warm interpreter were changed to {changed}; they cannot be raised again")


def fork_for_each(control: socket.socket) -> Forked:
    """Fork for each message, until there are no more; return in the fork alone."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel collects the forks
    os.environ.pop("PYTHONHASHSEED", None)
    hide()
    limits = _own_limits()
    gc.collect()
    gc.freeze()
    control.send(b"ready")
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1, 5)
        if not data:
            sys.exit(0)
        _restore_limits(limits)
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            control.close()
            job, *streams, report = descriptors
            return Forked(job, streams, socket.socket(fileno=report))
        for descriptor in descriptors:
            os.close(descriptor)


def part(forked: Forked, settings: Settings) -> None:
    """Put this fork behind walls of its own, and return in the program's process alone.

    The fork stays outside, and reports the first process of its namespace and how that one ended. The first process stays
    too: it collects orphans, and its end ends the others.
    """
    try:
        enter_namespaces()
        if (first := os.fork()) != 0:
            _report_end(forked, first)
        job = _move_in(forked, settings)
        if (program := os.fork()) != 0:
            _wait_for_program(program)
        _become_program(forked, job, settings)
    except Exception as error:  # noqa: BLE001 - of whichever kind, no program has begun
        with suppress(OSError):
            forked.report.send(f"fault {type(error).__name__}: {error}".encode()[:4096])
        os._exit(FAULT)


def _report_end(forked: Forked, first: int) -> typing.NoReturn:
    """Report a descriptor of the first process; when the kernel has ended all others, report its end."""
    descriptor = os.pidfd_open(first)
    socket.send_fds(forked.report, [b"started"], [descriptor])
    for number in (0, 1, 2, forked.job, *forked.streams):
        os.close(number)
    _, status = os.waitpid(first, 0)
    forked.report.send(b"ended %d" % os.waitstatus_to_exitcode(status))
    os._exit(0)


def _move_in(forked: Forked, settings: Settings) -> dict[str, typing.Any]:
    """Be the first process of the namespaces: make the program's directories and files, and return its job."""
    os.setsid()
    furnish(settings.sizes, settings.num_files)
    os.chdir(next(iter(settings.sizes)))
    with os.fdopen(os.dup(forked.job), "rb") as file:
        job = json.load(file)
    for name, data in job["files"].items():
        if "/" in name:
            os.makedirs(os.path.dirname(name), exist_ok=True)
        with open(name, "wb") as file:
            file.write(base64.b64decode(data))
    return job


def _wait_for_program(program: int) -> typing.NoReturn:
    """Be the first process of a namespace until `program` ends, then end with its exit status, or 128 and its signal.

    The program may set limits of this process: one that this process cannot live with is the program's own doing.
    """
    status = _SIGNALLED + signal.SIGKILL
    with suppress(BaseException):
        while True:
            found, word = os.wait()
            if found == program:
                code = os.waitstatus_to_exitcode(word)
                status = min(code, FAULT - 1) if code >= 0 else _SIGNALLED - code
                break
    os._exit(status)


def _become_program(forked: Forked, job: dict[str, typing.Any], settings: Settings) -> None:
    """Take the program's streams, limits and rights; the last step closes every other descriptor."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, descriptor in enumerate(forked.streams):
        os.dup2(descriptor, number)
    for name, value in settings.limits.items():
        hard = value + 1 if name == "CPU" else value  # SIGXCPU first
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, hard))
    give_up_rights(settings.seccomp)
    os.environ.update(job["environment"])
    sys.argv = job["argv"]
    sys.path[:] = [os.path.dirname(os.path.abspath(sys.argv[0])), *(path for path in sys.path if path != FOLDER)]
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with suppress(OSError):  # that of the list itself
                os.close(int(name))


def run_main() -> int:
    """Run the program as `__main__`; return its exit status, after the traceback if it raised."""
    path = os.path.abspath(sys.argv[0])
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as stopped:
        if stopped.code is None or isinstance(stopped.code, int):
            return (stopped.code or 0) & 0xFF
        sys.stderr.write(f"{stopped.code}\n")
        return 1
    except BaseException as error:  # noqa: BLE001 - the program's own
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != path:
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace)
        return 1
    return 0


def _finish() -> None:
    """Do what Python does at its end, short of freeing objects, which would copy every page that the forks share."""
    with suppress(BaseException):
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage] - there is no public name
    for stream in (sys.stdout, sys.stderr):
        with suppress(BaseException):
            stream.flush()


def main() -> None:
    """Serve; in a fork, run a program and end as Python does, except that it takes no module apart."""
    given = json.loads(sys.argv[1])
    settings = Settings(given["limits"], given["sizes"], given["num_files"], base64.b64decode(given["seccomp"]))
    forked = fork_for_each(socket.socket(fileno=_CONTROL))
    part(forked, settings)
    status = run_main()
    _finish()
    os._exit(status)


if __name__ == "__main__":
    main()
