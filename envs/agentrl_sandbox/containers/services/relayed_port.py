"""The way from an environment of a service to one port of this machine: a relay there, whose frames are carried here.

Invariant: a connection goes to that port and to no other, whatever the environment writes. An agent that ends its relay
reaches nothing any more; that is its own doing and no fault.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from typing import Final, NamedTuple, Protocol, TypeAlias

import anyio
from anyio.abc import SocketStream, TaskGroup
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from agentrl.errors import EnvironmentFault
from agentrl.support.concurrency import task_group
from agentrl_sandbox.box import BOX_START_S
from agentrl_sandbox.inside import files_inside
from agentrl_sandbox.passage import MAX_CARRIED, Port

_HEAD: Final = struct.Struct(">IBI")
_READY, _OPEN, _DATA, _END, _CLOSED = range(5)
"""Kinds of frames, those of `envs/agentrl_sandbox/inside/relay.py`."""
_MAX_FRAME: Final = 65_536
_WAITING: Final = 64
"""Frames of a connection that wait for its receiver."""


class BytePipe(Protocol):
    """Standard input and output of a process in an environment."""

    async def send(self, data: bytes) -> None:
        """Write to its standard input; one that has ended is a BrokenPipeError."""
        ...

    async def receive(self) -> bytes:
        """Return the next bytes of its standard output, or none at the end."""
        ...


RunPython: TypeAlias = Callable[[str, tuple[str, ...]], AbstractAsyncContextManager[BytePipe]]
"""Runs a Python program, given as its text, with arguments, in an environment; it ends with the block."""


@asynccontextmanager
async def relayed_port(run_python: RunPython, port: Port) -> AsyncGenerator[None]:
    """Let programs of an environment reach `port` of this machine's loopback inside the block.

    Raises:
        EnvironmentFault: the relay does not start.
    """
    inner, outer = (port, port) if isinstance(port, int) else port
    program = files_inside("relay")["relay.py"].decode()
    async with AsyncExitStack() as stack:
        try:
            pipe = await stack.enter_async_context(run_python(program, (str(inner),)))
        except OSError as error:
            raise EnvironmentFault(f"containers: the relay of port {inner} does not start: {error}") from error
        tasks = await stack.enter_async_context(task_group())
        carrier = _RelayCarrier(pipe, outer)
        with anyio.move_on_after(BOX_START_S):
            await carrier.begin()
        if not carrier.is_ready:
            raise EnvironmentFault(f"containers: the relay of port {inner} does not start in an environment")
        tasks.start_soon(carrier.carry)
        yield
        tasks.cancel_scope.cancel()


class _Carried(NamedTuple):
    """A connection."""

    to_send: MemoryObjectSendStream[bytes]
    scope: anyio.CancelScope


class _RelayCarrier:
    """Carries the connections of one relay."""

    def __init__(self, pipe: BytePipe, port: int) -> None:
        self.is_ready = False
        self._pipe, self._port, self._came = pipe, port, bytearray()
        self._sending = anyio.Lock()
        self._connections: dict[int, _Carried] = {}

    async def begin(self) -> None:
        """Wait for the first word of the relay."""
        frame = await self._frame()
        self.is_ready = frame is not None and frame[1] == _READY

    async def carry(self) -> None:
        """Carry until the relay ends, or writes what no relay does."""
        async with task_group() as tasks:
            with suppress(OSError):
                while (frame := await self._frame()) is not None:
                    number, kind, data = frame
                    connection = self._connections.get(number)
                    if kind == _OPEN:
                        await self._open(number, tasks)
                    elif connection is not None and kind == _CLOSED:
                        connection.scope.cancel()
                    elif connection is not None:
                        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                            await (connection.to_send.send(data) if kind == _DATA else connection.to_send.aclose())
            tasks.cancel_scope.cancel()

    async def _open(self, number: int, tasks: TaskGroup) -> None:
        if number in self._connections or len(self._connections) >= MAX_CARRIED:
            await self._send(number, _CLOSED)
            return
        to_send, sent = anyio.create_memory_object_stream[bytes](_WAITING)
        self._connections[number] = _Carried(to_send, anyio.CancelScope())
        tasks.start_soon(self._connection, number, sent)

    async def _connection(self, number: int, sent: MemoryObjectReceiveStream[bytes]) -> None:
        connection = self._connections[number]
        try:
            with connection.scope:
                async with sent, await anyio.connect_tcp("127.0.0.1", self._port) as stream, task_group() as tasks:
                    tasks.start_soon(self._answers, number, stream)
                    async for data in sent:
                        await stream.send(data)
                    await stream.send_eof()
        except (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
            with suppress(OSError):
                await self._send(number, _CLOSED)
        finally:
            connection.to_send.close()
            del self._connections[number]

    async def _answers(self, number: int, stream: SocketStream) -> None:
        with suppress(anyio.EndOfStream):
            while True:
                await self._send(number, _DATA, await stream.receive(_MAX_FRAME))
        await self._send(number, _END)

    async def _send(self, number: int, kind: int, data: bytes = b"") -> None:
        async with self._sending:
            await self._pipe.send(_HEAD.pack(number, kind, len(data)) + data)

    async def _frame(self) -> tuple[int, int, bytes] | None:
        """Return the next frame; None at the end, and for one that no relay writes."""
        while True:
            if len(self._came) >= _HEAD.size:
                number, kind, length = _HEAD.unpack_from(self._came)
                if length > _MAX_FRAME:
                    return None
                if len(self._came) >= (end := _HEAD.size + length):
                    data = bytes(self._came[_HEAD.size : end])
                    del self._came[:end]
                    return number, kind, data
            if not (piece := await self._pipe.receive()):
                return None
            self._came += piece
