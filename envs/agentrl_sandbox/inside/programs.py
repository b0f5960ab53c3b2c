"""The first process of a warm start's sandbox: lets a warm interpreter fork for each program, and watches the program.

Invariant: a reply is sent when every process and thread of the program has ended. Pipes, job and report of a program are
new ones: it shares no open file with another.
"""

from __future__ import annotations

import base64
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))
from capture import Capture, Reply, answer_host, reply_at_end, wait_for_end  # noqa: E402 - its folder was just made one of modules

PROGRAM_START_S = 20.0
PROGRAM_KILL_S = 5.0
"""Seconds that the kernel has to end a program's processes; the host ends the sandbox a little later."""
SIGNALLED = 128


class Programs:
    """Answers the host."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.output: int = options["output"]
        seccomp = base64.b64encode((FOLDER / "seccomp").read_bytes()).decode()
        given = json.dumps({**{name: options[name] for name in ("limits", "sizes", "num_files")}, "seccomp": seccomp})
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

        def prepare() -> None:
            os.dup2(theirs.fileno(), 3)

        self.parent = subprocess.Popen(
            [sys.executable, "-B", str(FOLDER / "forks.py"), given],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, "PYTHONHASHSEED": "0"},
            preexec_fn=prepare,
            pass_fds=(3,),
            start_new_session=True,
        )
        theirs.close()
        if not self._receive(self.control, PROGRAM_START_S):
            sys.exit(f"the warm interpreter does not start: {self._last_words()}")

    def answer(self, request: dict[str, Any]) -> Reply:
        """Do one request; one that is not `fork` would run with rights that no program may have."""
        if request["do"] != "fork":
            return {"error": [0, f"expected the request fork, got {request['do']!r}", ""]}
        try:
            return self.fork(**{name: value for name, value in request.items() if name != "do"})
        except OSError as error:
            return _fault(f"{error}; {self._last_words()}")

    def fork(
        self, argv: list[str], files: dict[str, str], stdin: str, environment: dict[str, str], timeout_s: float
    ) -> Reply:
        """Run a program in a fork of the warm interpreter."""
        job = os.memfd_create("job")
        with os.fdopen(os.dup(job), "wb") as file:
            file.write(json.dumps({"argv": argv, "files": files, "environment": environment}).encode())
        os.lseek(job, 0, os.SEEK_SET)
        pipes = [os.pipe() for _ in range(3)]
        feeding, outputs = pipes[0][1], (pipes[1][0], pipes[2][0])
        report, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        given = [job, pipes[0][0], pipes[1][1], pipes[2][1], theirs.detach()]
        first = -1
        try:
            try:
                socket.send_fds(self.control, [b"f"], given)
            finally:
                for descriptor in given:
                    os.close(descriptor)
            said, first = self._receive_started(report)
            if first < 0:
                os.close(feeding)
                return _fault(said)
            capture = Capture(outputs, self.output)
            ended = wait_for_end(report.fileno(), feeding, base64.b64decode(stdin), capture, timeout_s)
            if ended != "exited":
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(first, signal.SIGKILL)
            said = self._receive_end(report)
            capture.drain()
        finally:
            report.close()
            for descriptor in (*outputs, first):
                if descriptor >= 0:
                    os.close(descriptor)
        kind, _, rest = said.partition(" ")
        if kind != "ended":
            return _fault(rest or "its end was not reported")
        code = int(rest)
        return reply_at_end(ended, SIGNALLED - code if code > SIGNALLED else code, capture)

    def _receive_started(self, report: socket.socket) -> tuple[str, int]:
        """Return what the fork says first, and the descriptor of the program's first process, -1 without one."""
        if not select.select([report, self.control], [], [], PROGRAM_START_S)[0]:
            return "the warm interpreter does not answer", -1
        if not select.select([report], [], [], 0)[0]:
            return f"the warm interpreter has ended: {self._last_words()}", -1
        data, descriptors, _, _ = socket.recv_fds(report, 8192, 1)
        return data.decode(errors="replace"), descriptors[0] if descriptors else -1

    def _receive_end(self, report: socket.socket) -> str:
        """Return the first report of a fault, or else that of the end; none within `PROGRAM_KILL_S` ends the sandbox."""
        deadline = time.monotonic() + PROGRAM_KILL_S
        fault = ""
        while data := self._receive(report, max(0.0, deadline - time.monotonic())):
            said = data.decode(errors="replace")
            if said.startswith("ended"):
                return fault or said
            fault = fault or said
        sys.exit("the processes of a program do not end")

    def _receive(self, source: socket.socket, patience_s: float) -> bytes:
        return source.recv(8192) if select.select([source], [], [], patience_s)[0] else b""

    def _last_words(self) -> str:
        stderr = self.parent.stderr
        assert stderr is not None
        os.set_blocking(stderr.fileno(), False)
        with suppress(OSError):
            return os.read(stderr.fileno(), 4096).decode(errors="replace").strip() or "it said nothing"
        return "it said nothing"


def _fault(said: str) -> Reply:
    return {"error": [0, said, ""]}


if __name__ == "__main__":
    answer_host(lambda: Programs(json.loads(sys.argv[1])).answer)
