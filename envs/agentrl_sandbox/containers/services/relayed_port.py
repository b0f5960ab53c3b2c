"""The way from an environment of a service to one port of this machine: a relay there, whose frames are carried here.

Invariant: a connection goes to that port and to no other, whatever the environment writes. An agent that ends its relay
reaches nothing any more; that is its own doing and no fault.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Final

import anyio
from anyio.abc import TaskGroup

from agentrl.errors import EnvironmentFault
from agentrl.support.concurrency import task_group
from agentrl_sandbox.box import BOX_START_S
from agentrl_sandbox.docker import docker_variables
from agentrl_sandbox.inside import files_inside
from agentrl_sandbox.passage import MAX_CARRIED, Port, Way, carry_bytes, way_to
from agentrl_sandbox.pipes import PipedProcess, process_pipe

_HEAD: Final = struct.Struct(">IBI")
_READY, _OPEN, _DATA, _END, _CLOSED = range(5)
"""Kinds of frames, those of `envs/agentrl_sandbox/inside/relay.py`."""
_MAX_FRAME: Final = 65_536
_WAITING: Final = 64
"""Frames of a connection that wait for its receiver."""


@asynccontextmanager
async def relayed_port(python: Sequence[str], port: Port) -> AsyncGenerator[None]:
    """Let programs of an environment reach `port` of this machine's loopback inside the block.

    Args:
        python: the words of a command that runs a Python in the environment.
        port: of the environment, and where it leads.

    Raises:
        EnvironmentFault: the relay does not start.
    """
    way = way_to(port)
    program = files_inside("relay")["relay.py"].decode()
    async with AsyncExitStack() as stack:
        try:
            command = [*python, "-c", program, str(way.port)]
            relay = await stack.enter_async_context(process_pipe(command, environment=docker_variables()))
        except OSError as error:
            raise EnvironmentFault(f"containers: the relay of port {way.port} does not start: {error}") from error
        tasks = await stack.enter_async_context(task_group())
        carrier = _RelayCarrier(relay, way)
        with anyio.move_on_after(BOX_START_S):
            await carrier.begin()
        if not carrier.is_ready:
            raise EnvironmentFault(f"containers: the relay of port {way.port} does not start in an environment")
        tasks.start_soon(carrier.carry)
        yield
        tasks.cancel_scope.cancel()


class _RelayedBytes:
    """The bytes of one connection, an `agentrl_sandbox.passage.ByteWay`."""

    def __init__(self, carrier: _RelayCarrier, number: int) -> None:
        self._carrier, self._number = carrier, number
        self.scope = anyio.CancelScope()
        self.coming, self.came = anyio.create_memory_object_stream[bytes](_WAITING)
        self.receive = self.came.receive

    async def send(self, data: bytes) -> None:
        """Send at most `_MAX_FRAME` bytes."""
        await self._carrier.send(self._number, _DATA, data)

    async def send_eof(self) -> None:
        """Say that this side sends no more."""
        await self._carrier.send(self._number, _END)


class _RelayCarrier:
    """Carries the connections of one relay."""

    def __init__(self, relay: PipedProcess, way: Way) -> None:
        self.is_ready = False
        self._relay, self._way = relay, way
        self._sending = anyio.Lock()
        self._connections: dict[int, _RelayedBytes] = {}

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
                            await (connection.coming.send(data) if kind == _DATA else connection.coming.aclose())
            tasks.cancel_scope.cancel()

    async def _open(self, number: int, tasks: TaskGroup) -> None:
        if number in self._connections or len(self._connections) >= MAX_CARRIED:
            await self.send(number, _CLOSED)
            return
        self._connections[number] = _RelayedBytes(self, number)
        tasks.start_soon(self._connection, number)

    async def _connection(self, number: int) -> None:
        relayed = self._connections[number]
        is_whole = False
        try:
            with relayed.scope, suppress(OSError):
                async with self._way.connect() as outer:
                    is_whole = await carry_bytes(relayed, outer)
            if not is_whole and not relayed.scope.cancel_called:
                with suppress(OSError):
                    await self.send(number, _CLOSED)
        finally:
            relayed.coming.close()
            relayed.came.close()  # ends a wait for room in it
            del self._connections[number]

    async def send(self, number: int, kind: int, data: bytes = b"") -> None:
        """Send one frame; a relay that has ended is an OSError."""
        async with self._sending:
            await self._relay.stdin.send(_HEAD.pack(number, kind, len(data)) + data)

    async def _frame(self) -> tuple[int, int, bytes] | None:
        """Return the next frame; None at the end, and for one that no relay writes."""
        output = self._relay.stdout
        if len(head := await output.receive_exactly(_HEAD.size)) < _HEAD.size:
            return None
        number, kind, length = _HEAD.unpack(head)
        if length > _MAX_FRAME or len(data := await output.receive_exactly(length)) < length:
            return None
        return number, kind, data
