"""The requests of the driver to a rank, read by a thread.

Invariant: the thread ends this process when the driver goes, also inside a collective. It ends without a word to the other
ranks, whose links end too.
"""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Literal, NamedTuple

from agentrl.processes.frames import ByteSource, read_frames
from agentrl.processes.parent import read_in_thread
from agentrl.trainer.worker import protocol

Ending = Literal["at once", "when idle", "when dismissed", "after the request"]
"""Meaning of the stream's end. `at once`: this process ends, always. `when idle`: between two requests it is the end of
input, and within one the death of the driver. `when dismissed`: the death of the driver, unless it dismissed this rank.
`after the request`: the end of input, and the request under way is finished."""


class NumberedCall(NamedTuple):
    """A request and its number."""

    number: int
    request: protocol.WorkerRequest


class Inbox:
    """The requests that have come; each `SendingRequest` is answered aside, also while this rank works on another one."""

    def __init__(self, source: ByteSource, *, ends: Ending) -> None:
        self._ends = ends
        self._calls: SimpleQueue[NumberedCall | BaseException | None] = SimpleQueue()
        self._aside: Callable[[NumberedCall], None] | None = None
        self._lock = threading.Lock()
        self._busy = self._broken = self._dismissed = False
        self._thread = read_in_thread(read_frames(source), self._take, self._end)

    def next(self) -> NumberedCall | None:
        """Wait for the next request; None: the driver has closed the stream, or dismissed this rank."""
        call = self._calls.get()
        if isinstance(call, BaseException):
            raise call
        return call

    def answer_aside(self, action: Callable[[NumberedCall], None]) -> None:
        """From now on, answer each `SendingRequest` by `action`, in a thread of its own."""
        self._aside = action

    @contextmanager
    def working(self) -> Generator[None]:
        with self._lock:
            self._busy = True
            self._end_with_driver()
        try:
            yield
        finally:
            with self._lock:
                self._busy = False

    def wait(self) -> None:
        self._thread.join()

    def _take(self, body: bytes) -> None:
        if not body:
            if self._ends == "at once":
                os._exit(0)
            self._dismissed = True
            self._calls.put(None)
            return
        call = NumberedCall(*protocol.decode_request(body))
        if self._aside is not None and isinstance(call.request, protocol.SendingRequest):
            threading.Thread(target=self._run_aside, args=(self._aside, call), name="agentrl sending", daemon=True).start()
        else:
            self._calls.put(call)

    def _end(self, problem: BaseException | None) -> None:
        if problem is not None:
            self._calls.put(problem)  # the thread that gets it can end the process
            return
        if self._dismissed:
            os._exit(0)
        with self._lock:
            self._broken = True
            self._end_with_driver()
        self._calls.put(None)

    def _end_with_driver(self) -> None:
        waits = self._ends == "after the request" or (self._ends == "when idle" and not self._busy)
        if self._broken and not waits:
            os._exit(1)

    def _run_aside(self, action: Callable[[NumberedCall], None], call: NumberedCall) -> None:
        try:
            action(call)
        except BaseException:  # noqa: BLE001 - as in the main thread, what is no error of agentrl ends the process
            traceback.print_exc()
            os._exit(1)
