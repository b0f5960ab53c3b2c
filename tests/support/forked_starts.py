"""Starts of `python -m agentrl...` and of `agentrl`, by a fork of a process that has imported what they import.

Invariant: the caller cannot tell. `subprocess.Popen`, and with it anyio, asyncio and trio, gets the id of a child of its own
process, with the streams that it made. What a fork cannot give, such as variables that are read at an import, starts truly.
"""

from __future__ import annotations

import atexit
import json
import os
import platform
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypedDict

TESTS = Path(__file__).parents[1]
SCRIPT = str(Path(sys.executable).with_name("agentrl"))
PACKAGES = ("agentrl", "tests")
"""Beginnings of the modules that start so."""
AT_IMPORT = (
    "CUDA",
    "HF_",
    "HOME",
    "HUGGINGFACE",
    "LANG",
    "LC_",
    "LD_",
    "OMP_",
    "PYTHON",
    "TORCH",
    "TRANSFORMERS",
    "TZ",
    "XDG_",
)
"""Beginnings of the variables that the interpreter or a library reads before the main module runs."""
NOT_AT_IMPORT = frozenset({"PYTHONPATH", "TORCHINDUCTOR_CACHE_DIR"})
"""The server sets its path from the first, and torch sets the second."""
LIMITS = tuple(sorted({value for name, value in vars(resource).items() if name.startswith("RLIMIT_")}))
ALWAYS_IGNORED = frozenset({signal.SIGPIPE, signal.SIGXFSZ})
"""Signals that Python ignores, and that `Popen` gives back to what it starts."""
SERVER_NAME = "fork_server_of_the_tests"
"""Command line of the server of a command, by which tests tell it from what the command started."""
ROOM_FOR_WORDS = 16_384
"""Bytes of the command line of a server, over which those that it forks write theirs."""
_MAIN = "import sys; sys.path.insert(0, sys.argv[2]); from tests.support.fork_server import main; main()"


class Request(TypedDict):
    """What is to run, and where."""

    command: list[str]
    """The interpreter, and `-m MODULE`, `-P -m MODULE` or a script, with its arguments."""
    directory: str
    environment: dict[str, str]
    umask: int
    limits: list[tuple[int, int]]
    """Of each of `LIMITS`."""
    ignored: list[int]
    """Signals."""
    blocked: list[int]
    """Signals."""
    session: bool
    """Whether a session begins with it."""
    group: int
    """The group of processes to join, 0: a new one, -1: that of its parent."""


class _Server:
    """The server of this process."""

    def __init__(self) -> None:
        self.is_on = False
        self.parent = 0
        """Id of the process that has it."""
        self.link: socket.socket | None = None
        self.at_import: Mapping[str, str] = {}
        self._lock = threading.Lock()

    def fork(self, request: Request, streams: Sequence[int]) -> int | None:
        """Return the id of the process that `request` asks for; None: the server is gone."""
        data = json.dumps(request).encode()
        with self._lock:
            try:
                if self.link is None:
                    self.link = self._begin()
                socket.send_fds(self.link, [len(data).to_bytes(4)], streams)
                self.link.sendall(data)
                return _answer(self.link)
            except ConnectionError:  # a test killed it, as one of the processes that its command started
                self.is_on = False
                return None

    def _begin(self) -> socket.socket:
        """Start a server, which ends with this process."""
        here, there = socket.socketpair()
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [sys.executable, "-c", _MAIN, str(there.fileno()), str(TESTS.parent), "-" * ROOM_FOR_WORDS]
        with there, true_starts():
            server = subprocess.Popen(  # its streams are pipes, in which those that it forks cannot seek either
                command,
                env=environment,
                pass_fds=[there.fileno()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        _answer(here)
        for pipe in (server.stdin, server.stdout, server.stderr):
            assert pipe is not None
            pipe.close()
        atexit.register(_end, server, here)
        self.at_import = read_at_import(environment)
        return here


_SERVER: Final = _Server()
_fork_exec: Final[Any] = vars(subprocess).get("_fork_exec")  # another Python may call it otherwise


def fork_from_now_on() -> None:
    """Have this process start by forks what can be started so; the first of them starts the server."""
    if sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64") and _fork_exec is not None:
        _SERVER.at_import = read_at_import(os.environ)
        _install()


def use_server(link: socket.socket, at_import: Mapping[str, str]) -> None:
    """Have this process, which a server forked, start others through `link`."""
    _SERVER.link, _SERVER.at_import = link, at_import
    _install()


@contextmanager
def true_starts() -> Generator[None]:
    """Start processes truly within the block, and so do they."""
    with _switched(is_on=False):
        yield


@contextmanager
def forked_starts() -> Generator[None]:
    """Start processes by forks within the block, where this machine can."""
    with _switched(is_on=_SERVER.is_on):
        fork_from_now_on()
        yield


@contextmanager
def _switched(*, is_on: bool) -> Generator[None]:
    before, _SERVER.is_on = _SERVER.is_on, is_on
    try:
        yield
    finally:
        _SERVER.is_on = before


def read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are read before the main module runs."""
    return {name: value for name, value in environment.items() if name.startswith(AT_IMPORT) and name not in NOT_AT_IMPORT}


def _install() -> None:
    _SERVER.is_on, _SERVER.parent = True, os.getpid()
    setattr(subprocess, "_fork_exec", _start)  # noqa: B010 - pyright knows no such name


def _start(*given: Any) -> int:  # noqa: ANN401 - as `subprocess` calls it
    """Start a process, in the place of `_posixsubprocess.fork_exec`."""
    is_parent = _SERVER.parent == os.getpid()  # what a server forks is no child of a fork of its parent
    asked = _asked_of_server(given) if _SERVER.is_on and is_parent else None
    pid = None if asked is None else _SERVER.fork(*asked)
    return int(_fork_exec(*given)) if pid is None else pid


def _asked_of_server(given: Sequence[Any]) -> tuple[Request, list[int]] | None:
    """Return what to ask for, and the streams of the process; None: a fork cannot give it."""
    args, programs, closes, kept, cwd, variables, stdin, _, _, stdout, _, stderr, _, ending = given[:14]
    restores, session, group, gid, groups, uid, umask, prepare = given[14:22]
    command = [os.fsdecode(word) for word in args]
    is_plain = closes and restores and kept == (ending,) and (gid, groups, uid, prepare) == (None,) * 4
    if not (is_plain and [os.fsdecode(program) for program in programs] == command[:1] and runs_ours(command)):
        return None
    environment = dict(os.environ) if variables is None else dict(os.fsdecode(one).split("=", 1) for one in variables)
    streams = [own if theirs == -1 else theirs for own, theirs in enumerate((stdin, stdout, stderr))]
    try:
        directory = os.path.abspath(os.getcwd() if cwd is None else os.fsdecode(cwd))
        os.listdir(directory)
        for stream in streams:
            os.fstat(stream)
    except OSError:  # a true start says what is wrong, or does without
        return None
    if read_at_import(environment) != _SERVER.at_import:
        return None
    own_mask = Path("/proc/thread-self/status").read_text().partition("\nUmask:\t")[2].partition("\n")[0]
    ignored = [number for number in signal.valid_signals() - ALWAYS_IGNORED if signal.getsignal(number) == signal.SIG_IGN]
    request = Request(
        command=[sys.executable, *command] if command[0] == SCRIPT else command,
        directory=directory,
        environment=environment,
        umask=int(own_mask, 8) if umask == -1 else umask,
        limits=[resource.getrlimit(limit) for limit in LIMITS],
        ignored=[int(number) for number in ignored],
        blocked=[int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        session=bool(session),
        group=group,
    )
    return request, streams


def runs_ours(command: Sequence[str]) -> bool:
    """Return whether a command is `agentrl`, or runs a module of agentrl or of its tests."""
    match list(command):
        case [program, *_] if program == SCRIPT:
            return True
        case [sys.executable, "-P", "-m", module, *_] | [sys.executable, "-m", module, *_]:
            return module.startswith(PACKAGES)
        case _:
            return False


def _end(server: subprocess.Popen[bytes], link: socket.socket) -> None:
    link.close()
    server.wait()


def _answer(link: socket.socket) -> int:
    line = b""
    while not line.endswith(b"\n"):
        part = link.recv(65_536)
        if not part:
            raise ConnectionResetError("the server that forks processes has ended")
        line += part
    reply = json.loads(line)
    if "error" in reply:
        raise RuntimeError(f"the server that forks processes cannot start:\n{reply['error']}")
    return int(reply["pid"])
