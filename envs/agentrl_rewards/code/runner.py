"""The program that calls a submission's function in the sandbox, and sends what the call returned.

Invariant: it knows the arguments and never what is expected. Its first line is sent before any code of the submission runs.
A submission that forges its lines has only sent another value.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any, Final, cast

SOLUTION: Final = "solution"
"""The submission's module, a file of the working directory."""
READY_WIDTH: Final = 70_000
"""Bytes of the first line, more than a pipe holds, so that no submission can take it back out of the pipe."""
_CLASS: Final = "Solution"
_MAX_MESSAGE: Final = 400
_VALUE_DEPTH: Final = 1_000
"""Recursion limit while the value is written: a level of the writer takes more stack than one of a submission."""


class Channel:
    """Sends lines by the standard output that the process started with; what a submission prints goes to standard error."""

    def __init__(self, nonce: str) -> None:
        self._nonce, self._pid = nonce, os.getpid()
        self._descriptor = os.dup(1)
        self._write, self._exit, self._getpid = os.write, os._exit, os.getpid
        self._printed = sys.stdout
        os.dup2(2, 1)

    def send(self, kind: str, text: str = "") -> None:
        data = memoryview(f"{kind} {self._nonce} {text}\n".encode("ascii"))
        while data:
            data = data[self._write(self._descriptor, data) :]

    def end(self, kind: str, text: str) -> None:
        """Send the last line and end the process; threads and exit handlers of a submission cannot keep it."""
        if self._getpid() == self._pid:  # a child that the submission forked may return, too
            self.send(kind, text)
            try:  # noqa: SIM105 - contextlib would be one more import
                self._printed.flush()
            except (OSError, ValueError):  # the submission closed it
                pass
        self._exit(0)


def _resolve(entry: str) -> Any:  # noqa: ANN401 - whatever the submission defines
    """Return the function; where the submission has no class `Solution`, `Solution.f` is its function `f`."""
    found: Any = sys.modules[SOLUTION]
    if not hasattr(found, _CLASS):
        entry = entry.removeprefix(f"{_CLASS}.")
    for name in entry.split("."):
        found = getattr(found() if isinstance(found, type) else found, name)
    return found


def _told(error: BaseException) -> str:
    """Return the kind, text and line of an error; a hostile one may do anything when it is asked for its text."""
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename.endswith(f"{SOLUTION}.py"):
            line = trace.tb_lineno
        trace = trace.tb_next
    try:
        text = str(error)[:_MAX_MESSAGE]
    except BaseException:  # noqa: BLE001 - the submission's own code
        text = ""
    return json.dumps([type(error).__name__, text, line])


def _call_again(entry: str, arguments: Any, keywords: Any) -> None:  # noqa: ANN401 - whatever the tests pass
    """Repeat an earlier call of the same test, for its effect on the submission; its end is known."""
    try:  # noqa: SIM105 - contextlib would be one more import
        _resolve(entry)(*arguments, **keywords)
    except BaseException:  # noqa: BLE001 - the test went on after it
        pass


def run_call() -> None:
    """Read the job from standard input, call the submission, and send the value that it returned."""
    from agentrl_rewards.code.usual_names import supply_usual_names
    from agentrl_rewards.code.values import decode_value, encode_arguments, encode_value

    job = cast("dict[str, Any]", json.loads(sys.stdin.buffer.read()))
    arguments = cast("list[Any]", decode_value(job["arguments"]))
    keywords = cast("dict[str, Any]", decode_value(job["keywords"]))
    earlier = [(entry, decode_value(given), decode_value(named)) for entry, given, named in job.get("earlier", [])]
    encode = encode_arguments if job.get("in_order") else encode_value
    sys.path[0] = os.getcwd()
    channel = Channel(job["nonce"])
    channel.send("ready", " " * READY_WIDTH)
    supply_usual_names(f"{SOLUTION}.py")
    set_limit = sys.setrecursionlimit
    try:
        importlib.import_module(SOLUTION)
        for call in earlier:
            _call_again(*call)
        try:
            function = _resolve(job["entry"])
        except AttributeError as error:
            channel.end("missing", _told(error))
            return
    except BaseException as error:  # noqa: BLE001 - the submission's own code
        channel.end("error", _told(error))
        return
    try:
        value = function(*arguments, **keywords)
        set_limit(_VALUE_DEPTH)
        try:
            text = encode(value)
        except TypeError as error:
            channel.end("unsupported", _told(error))
            return
    except BaseException as error:  # noqa: BLE001 - the submission's own code
        channel.end("raised", _told(error))
        return
    channel.end("value", text)


if __name__ == "__main__":
    run_call()
