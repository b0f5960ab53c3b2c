"""A process that has imported what ranks, servers and commands import, and forks itself where one of them is to start.

Invariant: it has one thread and no descriptors but its link. What it forks is a child of the process that asked, as if that
one had started it: the same parent, group, directory, environment, streams, limits and signals, and the words of its
command in /proc. Then `runpy` runs the module, as `python -m` does, or the script.

A command starts processes itself. So its process begins with such a server of its own, which ends with it.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import platform
import resource
import runpy
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Final, NoReturn, cast

from tests.support.forked_starts import LIMITS, SERVER_NAME, Request, read_at_import, use_server

PRELOADED = (
    "agentrl.commands.evaluate",
    "agentrl.commands.train",
    "agentrl.servers.embedded.engine",
    "agentrl.servers.serve",
    "agentrl.trainer.policy",
    "agentrl.trainer.worker.outgoing",
    "transformers.models.qwen3.modeling_qwen3",
)
LEAVES = frozenset({"agentrl.trainer.worker.process", "agentrl.servers.serve"})
"""Modules whose processes start none."""
_CLONE: Final = {"x86_64": 56, "aarch64": 220}
"""Number of the system call, by machine."""
_CLONE_PARENT, _CLONE_CHILD_CLEARTID, _CLONE_CHILD_SETTID = 0x8000, 0x200000, 0x1000000
_PR_SET_MM, _PR_SET_MM_ARG_END, _PR_GET_TID_ADDRESS = 35, 9, 40


def _receive(link: socket.socket, size: int) -> bytes:
    """Return `size` bytes, or fewer at the end of the stream."""
    data = b""
    while len(data) < size and (part := link.recv(size - len(data))):
        data += part
    return data


def main() -> None:
    """Serve on descriptor `sys.argv[1]`. It raises in a process that is forked what the module that runs there raises."""
    link = socket.socket(fileno=int(sys.argv[1]))
    at_import = read_at_import(os.environ)
    own_paths = sys.path[2:]  # without the directory of the tests, and the current one
    try:
        for module in PRELOADED:
            importlib.import_module(module)
        _check_single()
    except BaseException:  # noqa: BLE001 - the process that started this one raises it
        _answer(link, {"error": traceback.format_exc()})
        os._exit(1)
    gc.collect()
    gc.freeze()  # so that a collection in a process that is forked copies no memory
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # it ends with its link
    _become_quiet()
    _answer(link, {"pid": os.getpid()})
    while True:
        request = _serve(link)
        if _module_of(request["command"]) not in LEAVES:
            here, there = socket.socketpair()
            if os.fork() == 0:  # the server of this command, which is as clean as the one that it comes from
                signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
                here.close()
                _become_quiet()
                _write_command_line([SERVER_NAME])
                link = there
                continue
            there.close()
            use_server(here, at_import)
        try:
            _run(request, own_paths)
        except SystemExit as end:
            _end(end.code)
        _end(None)


def _check_single() -> None:
    threads, open_now = os.listdir("/proc/self/task"), set(map(int, os.listdir("/proc/self/fd")))
    kept = {fd for fd in open_now if fd > 2 and os.path.exists(f"/proc/self/fd/{fd}")}
    if len(threads) != 1:
        raise RuntimeError(f"the imports have started {len(threads) - 1} threads, which a fork would lose: {PRELOADED}")
    if kept - {int(sys.argv[1])}:
        raise RuntimeError(f"the imports have left descriptors open: {[os.readlink(f'/proc/self/fd/{fd}') for fd in kept]}")


def _answer(link: socket.socket, reply: dict[str, object]) -> None:
    with suppress(OSError):  # the one that asked has ended
        link.sendall(json.dumps(reply).encode() + b"\n")


def _serve(link: socket.socket) -> Request:
    """Fork where a process is asked for; return in each of them, which stands where it is to run."""
    while True:
        head, descriptors, _, _ = socket.recv_fds(link, 4, 3)
        head += _receive(link, 4 - len(head))
        if len(head) < 4:
            os._exit(0)
        request = cast("Request", json.loads(_receive(link, int.from_bytes(head))))
        pid = _fork_sibling()
        if pid == 0:
            try:
                _enter(request, descriptors)
            except BaseException:  # noqa: BLE001 - the process that asked raises it
                _answer(link, {"error": traceback.format_exc()})
                os._exit(1)
            _answer(link, {"pid": os.getpid()})
            link.close()
            return request
        for descriptor in descriptors:
            os.close(descriptor)


def _become_quiet() -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    os.close(nothing)


def _fork_sibling() -> int:
    """Fork as `os.fork` does, but for the parent of the new process, which is the parent of this one."""
    libc, python = ctypes.PyDLL(None), ctypes.pythonapi
    address = ctypes.c_void_p()
    if libc.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(address), 0, 0, 0) != 0:
        raise OSError("this kernel does not tell where the C library keeps the number of a thread")
    flags = _CLONE_PARENT | _CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID | signal.SIGCHLD
    places = (address, None) if platform.machine() == "x86_64" else (None, address)
    call = [ctypes.c_long(_CLONE[platform.machine()]), ctypes.c_ulong(flags), None, None, *places]
    python.PyOS_BeforeFork()
    pid = int(libc.syscall(*call))
    if pid == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    return pid


def _enter(request: Request, descriptors: Sequence[int]) -> None:
    if request["session"]:
        os.setsid()
    if request["group"] >= 0:
        os.setpgid(0, request["group"])
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.umask(request["umask"])
    for limit, (soft, hard) in zip(LIMITS, request["limits"], strict=True):
        if resource.getrlimit(limit) != (soft, hard):
            resource.setrlimit(limit, (soft, hard))
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    _write_command_line(request["command"])
    # As in a young interpreter: an exception here could come within a callback, which would swallow it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])  # what came since the fork acts now


def _write_command_line(command: Sequence[str]) -> None:
    """Replace the words that /proc shows; they stand in the memory that this process got for its own."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])
    words = b"".join(os.fsencode(word) + b"\0" for word in command)[: end - begin]
    ctypes.memmove(begin, words.ljust(end - begin, b"\0"), end - begin)
    ctypes.CDLL(None).prctl(_PR_SET_MM, _PR_SET_MM_ARG_END, ctypes.c_ulong(begin + len(words)), 0, 0)  # a right of root


def _module_of(command: Sequence[str]) -> str | None:
    """Return the module that a command runs; None: a script."""
    return command[command.index("-m") + 1] if command[1] in ("-P", "-m") else None


def _run(request: Request, own_paths: Sequence[str]) -> None:
    """Run the module or the script, as the interpreter does."""
    command, module = request["command"], _module_of(request["command"])
    for stream in (sys.stdout, sys.stderr):
        if stream.isatty():
            cast("TextIOWrapper", stream).reconfigure(line_buffering=True)
    places = [os.path.abspath(place) for place in request["environment"].get("PYTHONPATH", "").split(os.pathsep) if place]
    sys.path[:] = [*places, *(place for place in own_paths if place not in places)]
    sys.orig_argv[:] = command
    importlib.invalidate_caches()
    space = vars(sys.modules["__main__"])
    space.pop("main")
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if module is None:
        script = Path(command[1])
        sys.argv[:] = command[1:]
        sys.path.insert(0, str(script.resolve().parent))
        space["__file__"] = command[1]
        exec(compile(script.read_bytes(), command[1], "exec"), space)
    else:
        sys.argv[:] = ["-m", *command[command.index("-m") + 2 :]]
        if command[1] == "-m":
            sys.path.insert(0, os.getcwd())
        sys.modules.pop(module, None)  # the main module is another one than the one that others import
        vars(runpy)["_run_module_as_main"](module)


def _end(code: object) -> NoReturn:
    """End as the interpreter does at `sys.exit(code)`, but without the half second in which it frees modules."""
    vars(threading)["_shutdown"]()
    vars(atexit)["_run_exitfuncs"]()
    if code is not None and not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # as after the reader has gone
            stream.flush()
    os._exit((code & 0xFF) if isinstance(code, int) else code is not None)
