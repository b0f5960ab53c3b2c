"""The parent of a warm start: forks a Python that has started already, once for each program, and puts it behind walls.

Invariant: it never reads a program, so none finds another in its memory. Its processes are out of a program's sight; the
program's own are in a namespace that ends, with every thread, before its result is reported. Whatever fails before the
program begins, a wall that cannot be put up too, is reported as a fault; whatever fails from then on is the program's doing.
"""

from __future__ import annotations

import atexit
import base64
import ctypes
import fcntl
import gc
import importlib
import json
import os
import resource
import runpy
import signal
import socket
import struct
import sys
import traceback
import typing
from contextlib import suppress
from pathlib import Path

OWN_FOLDER = str(Path(__file__).parent)
FAULT = 255
"""Exit status of a program's first process that started no program."""
_SIGNALLED = 128
_CONTROL = 3
_PRELOADED = (importlib, typing)
"""Nearly every program imports them."""
_NAMES = [name for name in dir(resource) if name.startswith("RLIMIT_")]
_NEW_NAMESPACES = 0x20000000 | 0x00020000 | 0x08000000 | 0x40000000
"""Processes, mounts, System V IPC and message queues, network."""
_NOSUID_NODEV, _NOEXEC, _READ_ONLY, _BIND, _REMOUNT = 2 | 4, 8, 1, 4096, 32
_SET_DUMPABLE, _SET_SECCOMP, _DROP_BOUNDING, _SET_NO_NEW_PRIVILEGES, _AMBIENT = 4, 22, 24, 38, 47
_CLEAR_ALL, _FILTER_MODE = 4, 2
_CAPABILITIES_VERSION = 0x20080522
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1

_libc = ctypes.CDLL(None, use_errno=True)


class Forked(typing.NamedTuple):
    """The inheritance of a fork: its job, its three streams, and the socket on which it reports."""

    job: int
    streams: list[int]
    report: socket.socket


class Settings(typing.NamedTuple):
    """The settings that all programs have in common."""

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
    with suppress(OSError):
        _prctl(_SET_DUMPABLE, 0)  # keeps its memory and descriptors from other processes of the user
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
    sys.path[:] = [os.path.dirname(os.path.abspath(sys.argv[0])), *(path for path in sys.path if path != OWN_FOLDER)]
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


def _succeeded(result: int, said: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{said}: {os.strerror(number)}")
    return result


def _prctl(option: int, *words: int) -> None:
    padded = [ctypes.c_ulong(word) for word in (*words, 0, 0, 0, 0)[:4]]
    _succeeded(_libc.prctl(option, *padded), f"prctl({option})")


def _mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    words = [word if word is None else word.encode() for word in (source, target, kind)]
    data = None if options is None else options.encode()
    _succeeded(_libc.mount(*words, ctypes.c_ulong(flags), data), f"mount {target}")


def enter_namespaces() -> None:
    """Give this process, and the processes that it forks, namespaces of their own; the next fork is the first process."""
    _succeeded(_libc.unshare(_NEW_NAMESPACES), "unshare")


def furnish(sizes: dict[str, int], num_files: int) -> None:
    """Give this mount namespace empty directories of these `sizes` in bytes, its own `/proc`, and a loopback."""
    mode = "0700"
    for path, size in sizes.items():
        _mount("tmpfs", path, "tmpfs", _NOSUID_NODEV, f"size={size},nr_inodes={num_files},mode={mode}")
        mode = "1777"
    _mount("proc", "/proc", "proc", _NOSUID_NODEV | _NOEXEC)
    _mount("/dev/null", "/proc/cmdline", None, _BIND)
    _mount("/proc/sys", "/proc/sys", None, _BIND)
    _mount("/proc/sys", "/proc/sys", None, _BIND | _REMOUNT | _READ_ONLY | _NOSUID_NODEV | _NOEXEC)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
        request = struct.pack("16sH22x", b"lo", 0)
        _, flags = struct.unpack_from("16sH", fcntl.ioctl(made, _SIOCGIFFLAGS, request))
        fcntl.ioctl(made, _SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", flags | _IFF_UP))


def give_up_rights(seccomp: bytes) -> None:
    """Drop every capability for good, and put this process under the filter `seccomp`, an array of `sock_filter`."""
    _prctl(_SET_NO_NEW_PRIVILEGES, 1)
    with open("/proc/sys/kernel/cap_last_cap") as file:
        last = int(file.read())
    _prctl(_AMBIENT, _CLEAR_ALL)
    for capability in range(last + 1):
        _prctl(_DROP_BOUNDING, capability)
    header, nothing = struct.pack("=Ii", _CAPABILITIES_VERSION, 0), bytes(24)
    _succeeded(_libc.capset(header, nothing), "capset")
    _prctl(_SET_DUMPABLE, 1)
    code = ctypes.create_string_buffer(seccomp, len(seccomp))
    program = struct.pack("@HP", len(seccomp) // 8, ctypes.addressof(code))
    held = ctypes.create_string_buffer(program, len(program))
    _prctl(_SET_SECCOMP, _FILTER_MODE, ctypes.addressof(held))


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
