"""The framed link to a child process, started here or joined over TCP: its messages, its signs of life or silence, its end.

Invariant: one task reads a link, and reads it always, so that the end of the child is noticed although no caller waits for a
reply. A child is lost only while a request is under way, after `lost_s` in which it has neither given a sign nor, as far as
this machine can see, done anything. Child 0 need give signs only during a request, the others always. Silence is counted in
waits, so that a parent which was stopped itself takes no child for dead.
"""

from __future__ import annotations

import logging
import socket
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol, Self

import anyio
from anyio.abc import ByteStream, SocketAttribute
from anyio.streams.stapled import StapledByteStream

from agentrl.processes import machine
from agentrl.processes.base import Child, LocalChild
from agentrl.processes.frames import EMPTY_FRAME, MAX_BODY_BYTES, READ_BYTES, FrameBuffer, framed
from agentrl.processes.meeting import Attendee
from agentrl.support.concurrency import task_group

logger = logging.getLogger(__name__)

STREAM_ENDS = (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError, OSError)
"""The errors of a link whose child has ended, or which this side has closed."""
TICK_S = 1.0
"""Seconds of one wait for a sign of life, at most."""
SILENT_S = 10.0
"""Seconds without a sign of life after which a child that should give one is reported."""
_LAST_WORDS_S = 0.5
"""Seconds in which the last words of a child, and how its process ended, arrive one after the other."""
_END_S = 10.0
"""Seconds that a process has to end after its stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEnd:
    """The end of a child."""

    reason: str
    """For messages, with the end of its log where this process can read it."""
    was_killed: bool
    """Whether it was killed or its machine is gone; otherwise it ended itself."""
    is_lost: bool = False
    """Whether it still runs, perhaps, but gave no sign of life for too long."""


class LifeSigns:
    """The frames of one child, heartbeats included, as signs of its life."""

    def __init__(self) -> None:
        self._count = 0

    @property
    def have_begun(self) -> bool:
        return self._count > 0

    def note(self) -> None:
        """Take note of a sign. It wakes no task, since a busy child gives thousands a second."""
        self._count += 1

    async def come_within(self, seconds: float) -> bool:
        """Wait for `seconds`; return whether a sign came meanwhile."""
        before = self._count
        await anyio.sleep(seconds)
        return self._count > before


class Link:
    """The frames to and from one child."""

    def __init__(self, stream: ByteStream, *, where: str, pid: int, child: Child | None = None) -> None:
        """Speak over `stream`; `child` is the process at its other end, where a launcher of this program started it."""
        self.where = where
        """For messages, such as `pid 123`."""
        self.pid = pid
        self.child = child
        self.signs = LifeSigns()
        self._stream = stream
        self._socket: socket.socket | None = stream.extra(SocketAttribute.raw_socket, None)
        """None: the standard streams of a process of this machine."""
        # A bound from the first byte: a length that a broken child wrote must not make this process reserve that much.
        self._buffer = FrameBuffer(MAX_BODY_BYTES)
        self._bodies: deque[bytes] = deque()
        self._closed = anyio.Event()

    @classmethod
    def piped(cls, child: LocalChild) -> Self:
        return cls(StapledByteStream(child.stdin, child.stdout), where=child.where, pid=child.pid, child=child)

    @classmethod
    def joined(cls, member: Attendee, child: Child | None) -> Self:
        where = f"{member.where}, {child.where}" if child is not None else member.where
        return cls(member.stream, where=where, pid=member.pid, child=child)

    @property
    def host(self) -> str | None:
        """Address at which others reach the child's machine; None where this process does not know it."""
        return self.child.host if self.child is not None else None

    @property
    def shares_clock(self) -> bool:
        """Whether `time.perf_counter` of the child is that of this process, as on one machine."""
        return self._socket is None

    def limit(self, max_bytes: int) -> None:
        """Refuse longer bodies from now on."""
        self._buffer.max_bytes = max_bytes

    async def send(self, *bodies: bytes) -> None:
        """Write `bodies`; raises one of `STREAM_ENDS` where the child has ended.

        Cancellation: a part may be written, and the link is of no use any more.
        """
        await self._stream.send(b"".join(map(framed, bodies)))

    async def receive(self) -> bytes:
        """Return the next body that is no heartbeat; raises one of `STREAM_ENDS`, or InvariantError for what is no frame."""
        while True:
            while self._bodies:
                if body := self._bodies.popleft():
                    return body
            try:
                data = await self._stream.receive(READ_BYTES)
            except STREAM_ENDS:
                self._closed.set()
                raise
            self.signs.note()
            self._bodies += self._buffer.cut(data)

    async def ended(self) -> LinkEnd:
        """Wait until the process has ended, or the connection of one that joined, and return how; several tasks may wait."""
        end = None
        async with task_group() as waiting:

            async def closed() -> None:
                await self._closed.wait()
                with anyio.move_on_after(_LAST_WORDS_S):
                    await anyio.sleep_forever()  # its last words are read meanwhile, or its process ends, and say more
                waiting.cancel_scope.cancel()

            if self._socket is not None:
                waiting.start_soon(closed)
            if self.child is not None:
                end = await self.child.ended()
                waiting.cancel_scope.cancel()
        if end is not None and self.child is not None:
            log = f"; the end of {self.child.spec.log_path}:\n{end.log_tail}"
            return LinkEnd(reason=end.reason + log, was_killed=end.was_killed)
        where = self.child.spec.log_path if self.child is not None else "where its scheduler keeps it"
        reason = f"its connection closed: it was killed or its machine is gone; its log is {where}"
        return LinkEnd(reason=reason, was_killed=True)

    async def obituary(self) -> str:
        """Return how a child ended that has closed its stream, for a message with the end of its log."""
        if self.child is None:
            return (await self.ended()).reason
        how = "its output is closed, but it still runs"
        with anyio.move_on_after(_END_S):
            how = (await self.child.ended()).reason
        return f"{self.where}, {how}{await self.log_end()}"

    async def log_end(self) -> str:
        """Return the end of its log for a message, behind a separator; empty where this process has no log of it."""
        if self.child is None:
            return ""
        return f"; the end of {self.child.spec.log_path}:\n{await self.child.log_tail()}"

    def pulse(self) -> int | None:
        """Return a number that grows while the child works; None: it is stopped, or its process cannot be seen from here."""
        return machine.pulse(self.pid) if self._socket is None else None

    async def dismiss(self) -> None:
        """Let the child end by itself once it is idle."""
        if self._socket is None:
            await self.hang_up()
        else:
            with suppress(*STREAM_ENDS):
                await self._stream.send(EMPTY_FRAME)

    async def hang_up(self) -> None:
        """Send no more, which the child notices at once."""
        if self._socket is not None:
            self.shut()
        elif isinstance(self.child, LocalChild):
            with suppress(*STREAM_ENDS):
                await self.child.stdin.aclose()

    def shut(self) -> None:
        """Close the connection of a child that joined at once, for both sides."""
        if self._socket is not None:
            with suppress(OSError):  # it is closed
                self._socket.shutdown(socket.SHUT_RDWR)

    def kill(self) -> None:
        """End the child at once; does nothing where it has ended."""
        self.shut()
        if self.child is not None:
            self.child.kill()

    async def shut_with_process(self) -> None:
        """Shut the connection when the process ends: a machine that is gone cannot close it any more."""
        if self.child is not None:
            await self.child.ended()
            with anyio.move_on_after(_LAST_WORDS_S):
                await self._closed.wait()
            self.shut()


class Followed(Protocol):
    """A child whose signs of life are followed, such as a `Link`."""

    where: str
    """For messages, such as `pid 123`."""
    signs: LifeSigns

    def pulse(self) -> int | None:
        """Return a number that grows while the child works; None: it is stopped, or the driver cannot see its process."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _RequestUnderWay:
    what: str
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SilenceWords:
    """The words of the messages about silent children."""

    names: Sequence[str]
    """Name of each child, such as `rank 0`."""
    owner: str = ""
    """Before the name in a warning, such as `the trainer`."""
    request_field: str = ""
    """Run-file field of the seconds that a request may take."""
    silence_field: str = ""
    """Run-file field of the seconds after which a silent child is lost; empty where they are fixed."""


class Silences:
    """The silent ones among children that work together."""

    def __init__(
        self,
        children: Sequence[Followed],
        words: SilenceWords,
        *,
        silent_s: float,
        lost_s: float | None,
        on_lost: Callable[[int, str], None],
    ) -> None:
        self._children, self._words, self._on_lost = children, words, on_lost
        self._warn_s = silent_s if lost_s is None else min(silent_s, lost_s)
        self._lost_s = lost_s
        self._since: dict[int, float] = {}
        """Time of the last sign of each silent child."""
        self._requests: list[_RequestUnderWay] = []
        self._work_began = anyio.Event()

    def name(self, number: int) -> str:
        """Return the name of a child for messages."""
        return f"{self._words.names[number]} ({self._children[number].where})"

    @contextmanager
    def working(self, what: str, timeout_s: float) -> Generator[None]:
        """Mark the block as a request to the children, for which they have `timeout_s` seconds."""
        request = _RequestUnderWay(what=what, timeout_s=timeout_s)
        self._requests.append(request)
        self._work_began.set()
        try:
            yield
        finally:
            self._requests.remove(request)
            if not self._requests:
                self._work_began = anyio.Event()

    async def follow(self, number: int) -> None:
        """Report each silence of a child, until it is lost."""
        is_lost = False
        while not is_lost:
            if number == 0:
                await self._work_began.wait()
            is_lost = await self._wait_for_sign(number)

    def describe(self, *, but: int) -> str:
        """Return the silent children except `but`, in words; empty where none is."""
        now = anyio.current_time()
        silent = [
            f"{self.name(number)} had given no sign of life for {now - since:.0f} s"
            for number, since in self._since.items()
            if number != but
        ]
        return f"{', '.join(silent)}: it was stopped or hung" if silent else ""

    async def _wait_for_sign(self, number: int) -> bool:
        """Wait for the next sign of a child, and log when it is late; return whether the child is lost."""
        child, tick = self._children[number], min(TICK_S, self._warn_s)
        silent = idle = 0.0
        pulse = child.pulse()
        while not await child.signs.come_within(tick):
            if number == 0 and not self._requests:
                self._since.pop(0, None)
                return False
            before, pulse = pulse, child.pulse()
            is_working = pulse is not None and pulse != before
            idle = idle + tick if self._requests and not is_working else 0.0
            silent = 0.0 if is_working and not child.signs.have_begun else silent + tick  # its start may take long
            if silent >= self._warn_s and number not in self._since:
                self._since[number] = anyio.current_time() - silent
                self._warn(number)
            if self._lost_s is not None and idle >= self._lost_s:
                self._lose(number)
                return True
        if self._since.pop(number, None) is not None:
            logger.warning("%s gives signs of life again", self._subject(number))
        return False

    def _subject(self, number: int) -> str:
        return f"{self._words.owner} {self.name(number)}".strip()

    def _warn(self, number: int) -> None:
        rest = ""
        if self._requests:
            request, words = self._requests[0], self._words
            limit = f"{request.timeout_s:g} s in all{_in_brackets(words.request_field)}"
            if self._lost_s is not None and self._lost_s < request.timeout_s:
                limit = f"{self._lost_s:g} s{_in_brackets(words.silence_field)}"
            rest = f" while {request.what}: it is stopped or hangs; the run waits for it, at most {limit}"
        silent = f"{self._subject(number)} has given no sign of life for {self._warn_s:g} s"
        logger.warning("%s%s", silent, rest or ": it is stopped or hangs")

    def _lose(self, number: int) -> None:
        since = self._since.setdefault(number, anyio.current_time() - (self._lost_s or 0))
        silent = f"had given no sign of life for {anyio.current_time() - since:.0f} s"
        field = _in_brackets(self._words.silence_field)
        self._on_lost(number, f"{silent}: it was stopped or hung, so it was killed{field}")


def _in_brackets(field: str) -> str:
    return f" ({field})" if field else ""
