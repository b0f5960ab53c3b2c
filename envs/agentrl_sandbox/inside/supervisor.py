"""The first process of a session's sandbox: keeps a Python and a shell, runs commands, reads and writes files.

Invariant: one request, one reply, both JSON with their length before them; whatever the programs do, the reply comes by its
deadline. What a program may use is limited by the kernel, which this process asks to.
"""

from __future__ import annotations

import base64
import errno
import fcntl
import json
import os
import resource
import select
import signal
import stat
import subprocess
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from capture import Capture, Reply, answer_host, open_end, reply_at_end, wait_for_end, write_some
from streams import Streams

if TYPE_CHECKING:
    from collections.abc import Iterator

    from changes import Changes

OWN_LIMITS = ("SIGPENDING", "MSGQUEUE")
"""Limits that gVisor refuses to set: what they bound is memory of its own, outside the machine's kernel."""
PIECE_BYTES = 1 << 20
"""Of an archive, that this process holds at a time: its memory counts as the programs' own."""
SHELL_INTERRUPT_S = 1.0
"""Seconds that the Python and the shell have to answer an interrupt, before they are killed."""
SHELL = r"""
trap : INT
while IFS= read -r -d '' _request <&3; do
  eval "$_request" </dev/null 3<&- 4>&-
  printf '%d\n' $? >&4
done
"""


class Bounds:
    """The limits of the processes that this one starts."""

    def __init__(self, given: dict[str, int]) -> None:
        self.given = given

    def and_cpu(self, seconds: int) -> Bounds:
        """Return these limits with one of CPU time."""
        return Bounds({**self.given, "CPU": seconds})

    def apply(self) -> None:
        """Set them, and let the kernel end this process before its supervisor; runs in the new process."""
        for name, value in self.given.items():
            try:
                resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
            except (OSError, ValueError):
                if name not in OWN_LIMITS:
                    raise
        with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")

    def allow_cpu(self, pid: int, seconds: int) -> None:
        """Give a resident process `seconds` of CPU more than it has used."""
        with suppress(OSError, IndexError, ValueError):
            with open(f"/proc/{pid}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
            used = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            resource.prlimit(pid, resource.RLIMIT_CPU, (int(used) + seconds + 1, resource.RLIM_INFINITY))


class Resident:
    """A resident Python or shell."""

    def __init__(self, command: list[str], bounds: Bounds, limit: int) -> None:
        inner_control, self.control = _high_pipe()
        self.status, inner_status = _high_pipe()

        def prepare() -> None:
            os.dup2(inner_control, 3)
            os.dup2(inner_status, 4)
            bounds.apply()

        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                pass_fds=(3, 4),
                preexec_fn=prepare,
                start_new_session=True,
            )
        finally:
            os.close(inner_control)
            os.close(inner_status)
        for descriptor in (self.control, self.status):
            os.set_blocking(descriptor, False)
        self.dead = open_end(self.process.pid)
        self.limit = limit

    def call(self, request: bytes, timeout_s: float) -> Reply:
        """Let it do `request`, and return the reply."""
        outputs = [stream.fileno() for stream in (self.process.stdout, self.process.stderr) if stream is not None]
        forgotten = Capture(outputs, self.limit)
        forgotten.drain()  # of jobs in the background, since the last call
        with suppress(BlockingIOError):
            os.read(self.status, 65_536)  # what code wrote there on its own
        capture = Capture(outputs, self.limit)
        watched = {self.status, self.dead, *capture.pipes}
        deadline, ended, pending, is_interrupted = time.monotonic() + timeout_s, "exited", request, False
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            ready, writable, _ = select.select(watched, [self.control] if pending else [], [], left_s)
            if writable:
                pending = write_some(self.control, pending)
            if self.status in ready and (words := os.read(self.status, 4096).split()) and words[-1].isdigit():
                return self._reply(ended, capture, int(words[-1]) & 0xFF)
            if self.dead in ready:
                return self._reply(ended, capture, None)
            for descriptor in ready:
                if descriptor not in capture.pipes or not capture.read(descriptor):
                    watched.discard(descriptor)
            if ended == "exited" and capture.is_over:
                ended, deadline = "output", 0.0
            if time.monotonic() >= deadline:
                ended = "timeout" if ended == "exited" else ended
                deadline = time.monotonic() + SHELL_INTERRUPT_S
                _signal_all(self.process, signal.SIGKILL if is_interrupted else signal.SIGINT)
                is_interrupted = True

    def _reply(self, ended: str, capture: Capture, status: int | None) -> Reply:
        """Return the reply of a call that ended with `status`, or with the process's own end if that is None."""
        capture.drain()
        code = self.close() if status is None else status
        return {**reply_at_end(ended, code, capture), "state_lost": status is None}

    def close(self) -> int:
        """End it with its group, and return its exit status, or the negative number of the signal."""
        _signal_all(self.process, signal.SIGKILL)
        code = self.process.wait()
        for descriptor in (self.control, self.status, self.dead):
            os.close(descriptor)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        return code


class Supervisor:
    """Answers the host."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.bounds = Bounds(options["limits"])
        self.output: int = options["output"]
        self.cpu_s: int = options["cpu_s"]
        self.residents: dict[str, Resident] = {}
        self.streams = Streams()
        self.changes: Changes | None = None
        self.packed: Iterator[bytes] | None = None
        self.coming: int | None = None
        folder = os.path.dirname(os.path.abspath(__file__))
        self.commands = {
            "python": [sys.executable, "-u", "-B", os.path.join(folder, "interpreter.py")],
            "shell": ["bash", "--norc", "--noprofile", "-c", SHELL],
        }

    def answer(self, request: dict[str, Any]) -> Reply:
        """Do one request."""
        do = request["do"]
        try:
            if do in self.commands:
                return self.converse(do, request)
            return getattr(self, f"do_{do}")(**{name: value for name, value in request.items() if name != "do"})
        except OSError as error:
            return {"error": [error.errno or 0, error.strerror or str(error), str(error.filename or "")]}
        finally:
            self.reap()

    def converse(self, name: str, request: dict[str, Any]) -> Reply:
        """Let the resident Python or shell do something; start it where there is none."""
        text = request["text"]
        data = json.dumps({"code": text}).encode() + b"\n" if name == "python" else text.encode() + b"\0"
        is_lost = name in self.residents and self.residents[name].process.poll() is not None
        if is_lost:
            self.residents.pop(name).close()
        if name not in self.residents:
            try:
                self.residents[name] = Resident(self.commands[name], self.bounds, self.output)
            except (OSError, subprocess.SubprocessError) as error:
                said = base64.b64encode(f"cannot start {name}: {error}\n".encode()).decode()
                return {"ended": "killed", "stdout": "", "stderr": said, "state_lost": True}
        resident = self.residents[name]
        self.bounds.allow_cpu(resident.process.pid, self.cpu_s)
        reply = resident.call(data, request["timeout_s"])
        if reply["state_lost"]:
            del self.residents[name]
        return {**reply, "state_lost": reply["state_lost"] or is_lost}

    def do_run(self, argv: list[str], stdin: str, environment: dict[str, str], timeout_s: float) -> Reply:
        """Run a command to its end, and end the rest of its process group."""
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env={**os.environ, **environment},
                preexec_fn=self.bounds.and_cpu(self.cpu_s).apply,
                start_new_session=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            said = base64.b64encode(f"cannot start {argv[0]}: {error}\n".encode()).decode()
            return {"ended": "exited", "exit_status": 127, "stdout": "", "stderr": said}
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        capture = Capture((process.stdout.fileno(), process.stderr.fileno()), self.output)
        process_end, stdin_end = open_end(process.pid), os.dup(process.stdin.fileno())
        process.stdin.close()
        try:
            ended = wait_for_end(process_end, stdin_end, base64.b64decode(stdin), capture, timeout_s)
        finally:
            os.close(process_end)
        _signal_all(process, signal.SIGKILL)
        code = process.wait()
        capture.drain()
        return reply_at_end(ended, code, capture)

    def do_start(self, argv: list[str], environment: dict[str, str], timeout_s: float, budget: int) -> Reply:
        """Start a command whose output is asked for while it runs."""
        return self.streams.start(argv, environment, timeout_s, budget, self.bounds.and_cpu(self.cpu_s).apply)

    def do_poll(self, stream: int, wait_s: float) -> Reply:
        """Return what a started command wrote since, waiting for the first of it."""
        return self.streams.poll(stream, wait_s)

    def do_stop(self, stream: int) -> Reply:
        """End a started command."""
        return self.streams.stop(stream)

    def do_mark(self) -> Reply:
        """Remember the whole file system as it is now."""
        self.changes = _changes()
        self.changes.mark()
        return {}

    def do_pack(self, budget: int) -> Reply:
        """Return the next piece of what changed since, as the archive of a layer; nothing at its end.

        The first call ends every other process, as the end of the sandbox would.
        """
        if self.packed is None:
            if os.getpid() == 1:
                with suppress(ProcessLookupError):
                    os.kill(-1, signal.SIGKILL)
            self.packed = iter(()) if self.changes is None else self.changes.pack(budget)
        data = bytearray()
        for piece in self.packed:
            data += piece
            if len(data) >= PIECE_BYTES:
                break
        return {"content": base64.b64encode(data).decode()}

    def do_unpack(self, content: str, is_last: bool, strict: bool) -> Reply:
        """Take a piece of the archive of a layer; with the last one, apply it to the file system."""
        changes = _changes()
        if self.coming is None:
            self.coming = os.open("/.agentrl", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            os.unlink("/.agentrl")
        with os.fdopen(os.dup(self.coming), "r+b") as archive:
            archive.write(base64.b64decode(content))
            if is_last:
                os.close(self.coming)
                self.coming = None
                archive.seek(0)
                changes.unpack(archive, strict=strict)
        return {}

    def do_write(self, files: dict[str, str]) -> Reply:
        """Write files, with the folders above them."""
        for name, data in files.items():
            folder, last = _open_folder(name, make=True)
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
                with os.fdopen(os.open(last, flags, 0o644, dir_fd=folder), "wb") as file:
                    file.write(base64.b64decode(data))
            finally:
                os.close(folder)
        return {}

    def do_read(self, path: str, limit: int) -> Reply:
        """Return a regular file's contents."""
        folder, last = _open_folder(path)
        try:
            return {"content": base64.b64encode(_read_regular(last, folder, limit)).decode()}
        finally:
            os.close(folder)

    def do_delete(self, paths: list[str]) -> Reply:
        """Delete files, and the folders that this leaves empty."""
        for path in paths:
            folder, last = _open_folder(path)
            try:
                os.unlink(last, dir_fd=folder)
            finally:
                os.close(folder)
            while path := os.path.dirname(path):
                with suppress(OSError):
                    os.rmdir(path)
        return {}

    def do_snapshot(self, known: dict[str, str], limit: int) -> Reply:
        """Return the digest of every regular file, the contents of those not known, and what was left out."""
        import hashlib  # takes a while, and most sessions have no snapshot

        digests: dict[str, str] = {}
        contents: dict[str, str] = {}
        left_out: dict[str, str] = {}
        for path, _, names, folder in os.fwalk("."):
            for name in names:
                place = os.path.normpath(os.path.join(path, name))
                try:
                    place.encode()
                    data = _read_regular(name, folder, limit)
                except UnicodeEncodeError:
                    left_out[ascii(place)] = "its name is not text"
                    continue
                except OSError as error:
                    left_out[place] = error.strerror or str(error)
                    continue
                digests[place] = hashlib.sha256(data).hexdigest()
                if known.get(place) != digests[place]:
                    contents[place] = base64.b64encode(data).decode()
                    limit -= len(data)
        return {"digests": digests, "contents": contents, "left_out": left_out}

    def reap(self) -> None:
        """Collect orphans, which the kernel hands to the first process."""
        own = {resident.process.pid for resident in self.residents.values()} | self.streams.pids()
        with suppress(ChildProcessError):
            while (found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if found.si_pid in own:
                    break  # its next call finds out
                os.waitpid(found.si_pid, 0)


def _changes() -> Changes:
    from changes import Changes  # a session over layers of its own never needs it

    return Changes()


def _high_pipe() -> tuple[int, int]:
    reading, writing = os.pipe()
    high = fcntl.fcntl(reading, fcntl.F_DUPFD_CLOEXEC, 10), fcntl.fcntl(writing, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(reading)
    os.close(writing)
    return high


def _signal_all(process: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _open_folder(path: str, *, make: bool = False) -> tuple[int, str]:
    """Return the descriptor of the folder above `path`, reached without following a link, and the last name."""
    *folders, last = (part for part in path.split("/") if part not in ("", "."))
    descriptor = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
    for name in folders:
        try:
            if make:
                with suppress(FileExistsError):
                    os.mkdir(name, dir_fd=descriptor)
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=descriptor)
        finally:
            os.close(descriptor)
        descriptor = inner
    return descriptor, last


def _read_regular(name: str, folder: int, limit: int) -> bytes:
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", name)
        data = file.read(limit + 1) if found.st_size <= limit else b"x" * 0
        if found.st_size > limit or len(data) > limit:
            raise OSError(errno.EFBIG, f"it is larger than {limit} bytes", name)
        return data


if __name__ == "__main__":
    answer_host(lambda: Supervisor(json.loads(sys.argv[1])).answer)
