"""Programs whose output is read while they run: one is started, then asked for what it wrote since, until its end.

Invariant: a program ends at its deadline, whether or not a request comes. Output over its budget is counted and forgotten,
and the program continues.
"""

from __future__ import annotations

import base64
import errno
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from capture import CHUNK, Reply, open_end

MAX_STREAMS = 16


class Streams:
    """The programs of one supervisor."""

    def __init__(self) -> None:
        self.running: dict[int, Stream] = {}
        self.count = 0

    def start(
        self, argv: list[str], environment: dict[str, str], timeout_s: float, budget: int, prepare: Callable[[], None]
    ) -> Reply:
        """Start a program and return its number."""
        if len(self.running) >= MAX_STREAMS:
            raise OSError(errno.EAGAIN, f"{MAX_STREAMS} programs are running already")
        self.count += 1
        try:
            self.running[self.count] = Stream(argv, environment, timeout_s, budget, prepare)
        except (OSError, subprocess.SubprocessError) as error:
            said = base64.b64encode(f"cannot start {argv[0]}: {error}\n".encode()).decode()
            return {"ended": "exited", "exit_status": 127, "content": said}
        return {"stream": self.count}

    def poll(self, stream: int, wait_s: float) -> Reply:
        """Return what a program wrote since, and how it ended, if it has."""
        found = self.running.get(stream)
        if found is None:
            raise OSError(errno.ESRCH, "there is no such program")
        reply = found.poll(wait_s)
        if "ended" in reply:
            del self.running[stream]
        return reply

    def stop(self, stream: int) -> Reply:
        """End a program; one that has ended already is no error."""
        found = self.running.pop(stream, None)
        if found is not None:
            found.close()
        return {}

    def pids(self) -> set[int]:
        """Return the processes that are not collected as orphans."""
        return {stream.process.pid for stream in self.running.values()}


class Stream:
    """One program, whose two outputs are one."""

    def __init__(
        self, argv: list[str], environment: dict[str, str], timeout_s: float, budget: int, prepare: Callable[[], None]
    ) -> None:
        self.pipe, writing = os.pipe()
        try:
            self.process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=writing,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                preexec_fn=prepare,
                start_new_session=True,
            )
        except BaseException:
            os.close(self.pipe)
            raise
        finally:
            os.close(writing)
        os.set_blocking(self.pipe, False)
        self.dead = open_end(self.process.pid)
        self.watched = {self.pipe, self.dead}
        self.budget, self.cut, self.is_late = budget, 0, False
        self.timer = threading.Timer(timeout_s, self.expire)
        self.timer.daemon = True
        self.timer.start()

    def expire(self) -> None:
        """End the program at its deadline; its process is not collected before, so the number is its own."""
        if not select.select([self.dead], [], [], 0)[0]:
            self.is_late = True
            self.kill()

    def kill(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def poll(self, wait_s: float) -> Reply:
        """Wait for output or the end, at most `wait_s`."""
        until = time.monotonic() + wait_s
        while True:
            ready, _, _ = select.select(self.watched, [], [], max(0.0, until - time.monotonic()))
            if self.dead in ready:
                return self.end()
            if self.pipe in ready and (kept := self.within_budget(self.read())):
                return {"content": base64.b64encode(kept).decode()}
            if time.monotonic() >= until:
                return {"content": ""}

    def read(self) -> bytes:
        try:
            data = os.read(self.pipe, CHUNK)
        except BlockingIOError:
            return b""
        if not data:
            self.watched.discard(self.pipe)
        return data

    def within_budget(self, data: bytes) -> bytes:
        kept = data[: self.budget]
        self.budget -= len(kept)
        self.cut += len(data) - len(kept)
        return kept

    def end(self) -> Reply:
        """Return the last output and the reason of the end; what the program left in its group ends with it."""
        self.kill()
        last = bytearray()
        for _ in range(32):  # a job in the background may write for ever
            data = self.read()
            if not data:
                break
            last += self.within_budget(data)
        code = self.close()
        reply: Reply = {"ended": "timeout" if self.is_late else "exited", "cut": self.cut}
        reply["content"] = base64.b64encode(last).decode()
        if not self.is_late:
            reply |= {"exit_status": code} if code >= 0 else {"ended": "killed", "signal": -code}
        return reply

    def close(self) -> int:
        """End it, and return its exit status, or the negative number of the signal."""
        self.timer.cancel()
        self.kill()
        code = self.process.wait()
        os.close(self.pipe)
        os.close(self.dead)
        return code
