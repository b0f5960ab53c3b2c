"""The Python session inside a sandbox: runs pieces of code one after another, with the variables of those before.

Invariant: it reads requests from descriptor 3 and writes one line to descriptor 4 when a request is done, whatever the
code did. The value of a last line that is an expression is printed, as at the prompt.
"""

from __future__ import annotations

import ast
import code
import json
import linecache
import os
import signal
import sys
from contextlib import suppress
from types import CodeType
from typing import BinaryIO


class Interpreter(code.InteractiveInterpreter):
    """Runs pieces of code, and notices which failed."""

    def __init__(self) -> None:
        super().__init__({"__name__": "__main__", "__builtins__": __builtins__})
        self.num_pieces = 0
        self.status = 0

    def run_piece(self, source: str) -> int:
        """Run `source` and return its status: 0, 1 after an exception, or the argument of `sys.exit`."""
        self.num_pieces += 1
        self.status = 0
        name = f"<call {self.num_pieces}>"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)  # for tracebacks
        try:
            parsed = ast.parse(source, name)
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            self.showsyntaxerror(name)
            return 1
        last = parsed.body.pop() if parsed.body and isinstance(parsed.body[-1], ast.Expr) else None
        try:
            if parsed.body:
                self.runcode(compile(parsed, name, "exec"))
            if last is not None and self.status == 0:
                self.runcode(compile(ast.Interactive([last]), name, "single"))
        except SystemExit as stopped:
            return self._exit_status(stopped)
        except (ValueError, MemoryError, RecursionError):
            self.showtraceback()
        return self.status

    def runcode(self, code: CodeType) -> None:
        """Run compiled code under the interrupts of the supervisor."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            super().runcode(code)
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)

    def showtraceback(self) -> None:
        """Print what was raised."""
        self.status = 1
        super().showtraceback()

    def _exit_status(self, stopped: SystemExit) -> int:
        if stopped.code is None or isinstance(stopped.code, int):
            return (stopped.code or 0) & 0xFF
        sys.stderr.write(f"{stopped.code}\n")
        return 1


def serve_pieces(requests: BinaryIO, status: int) -> None:
    """Run the code of each line of `requests` until they end."""
    own = os.getpid()
    interpreter = Interpreter()
    for line in requests:
        found = interpreter.run_piece(json.loads(line)["code"])
        if os.getpid() != own:
            os._exit(0)  # a process that the code forked must not answer as well
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):  # closed, or replaced by the code
                stream.flush()
        os.write(status, b"%d\n" % found)


def main() -> None:
    """Serve the supervisor, out of reach of the code's own use of descriptors 3 and 4."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests, status = os.dup(3), os.dup(4)
    os.close(3)
    os.close(4)
    sys.argv = [""]
    sys.path.insert(0, "")
    with os.fdopen(requests, "rb") as stream:
        serve_pieces(stream, status)


if __name__ == "__main__":
    main()
