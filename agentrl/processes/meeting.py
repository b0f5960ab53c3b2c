"""The driver's side of the meeting with processes that join over TCP: the ranks of a trainer, or one rollout worker.

Invariant: only a process that proves to know the token becomes a member, each rank once. What sends anything else is
refused without harm: at most `MAX_STRANGERS` connections are open before they have proved it, each for `GREET_S`, and where
there are more the oldest makes room, so that silent ones keep no rank out. Every connection closes with the block.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import anyio
from anyio.abc import ByteStream, SocketAttribute, SocketStream

from agentrl.errors import ConfigError, InvariantError, LaunchError
from agentrl.processes import handshake
from agentrl.processes.base import TOKEN_VARIABLE, Child
from agentrl.processes.config import ClusterConfig, listen_address
from agentrl.processes.handshake import Challenge, Hello, Refused, Signed, Welcome
from agentrl.processes.machine import is_loopback
from agentrl.support.concurrency import task_group
from agentrl.support.foreign import one_line

logger = logging.getLogger(__name__)

GREET_S = 10.0
"""Seconds that a connection has to prove that it knows the token."""
MAX_STRANGERS = 64
"""Connections that have not proved it yet, at most, beside one for each rank."""
_STREAM_ENDS = (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError, OSError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attendee:
    """A rank that has joined."""

    rank: int
    machine: str
    """Name that its machine gives itself."""
    pid: int
    stream: SocketStream

    @property
    def where(self) -> str:
        """For messages, such as `node-3, pid 17`."""
        return f"{self.machine}, pid {self.pid}"

    def shut(self) -> None:
        with suppress(OSError):  # it is closed
            self.stream.extra(SocketAttribute.raw_socket).shutdown(socket.SHUT_RDWR)


class _RefusalError(Exception):
    def __init__(self, message: str, *, final: bool) -> None:
        super().__init__(message)
        self.final = final


class Meeting:
    """The ranks of one trainer, or a rollout worker, while they join; `open_meeting` makes one."""

    def __init__(self, address: tuple[str, int], world: int, token: str, members: str) -> None:
        self.address = address
        """Host and port at which ranks join."""
        self._world, self._token, self._names = world, token, members
        self._members: dict[int, tuple[Attendee, Hello]] = {}
        self._complete = anyio.Event()
        self._strangers: dict[anyio.CancelScope, None] = {}
        """Of each connection that has proved nothing yet, the scope of its greeting, the oldest first."""
        self._refused = 0
        self._last_refusal = ""

    async def gather(self, timeout_s: float, children: Sequence[Child] = ()) -> Sequence[Attendee]:
        """Wait for all ranks, tell each where rank 0 hosts the TCPStore, and return them, rank 0 first.

        Raises:
            LaunchError: some have not joined in time, which the message lists, or one of `children` has ended before.
        """
        async with task_group() as watching:
            for child in children:
                watching.start_soon(_raise_at_end, child)
            members = await self._gather(timeout_s)
            watching.cancel_scope.cancel()
            return members
        raise AssertionError("unreachable: only the block above cancels the group")

    async def _gather(self, timeout_s: float) -> Sequence[Attendee]:
        with anyio.move_on_after(timeout_s):
            await self._complete.wait()
            joined = [self._members[rank] for rank in range(self._world)]
            first = joined[0][1]
            welcome = Welcome(first.address, first.store_port)
            for member, hello in joined:
                with suppress(*_STREAM_ENDS):  # the reader of its stream reports the end
                    signed = handshake.sign(welcome, self._token, "driver", hello.nonce)
                    await member.stream.send(handshake.encode_greeting(signed))
            return [member for member, _ in joined]
        raise LaunchError(self._describe_missing(timeout_s))

    def _describe_missing(self, timeout_s: float) -> str:
        missing = [str(rank) for rank in range(self._world) if rank not in self._members]
        there = ", ".join(f"{rank} ({member.where})" for rank, (member, _) in sorted(self._members.items())) or "none"
        refused = f"; {self._refused} refused, the last one: {self._last_refusal}" if self._refused else ""
        host, port = self.address
        return (
            f"{self._names}: {len(missing)} of {self._world} have not joined the driver at {host}:{port} within "
            f"{timeout_s:g} s (cluster.start_timeout_s): missing rank {', '.join(missing)}; joined: {there}{refused}. "
            "Each needs an address of the driver that its machine reaches (--attach, cluster.listen), and the driver's "
            f"{TOKEN_VARIABLE}"
        )

    async def greet(self, stream: SocketStream) -> None:
        """Let what has connected join, or refuse it."""
        peer = _peer(stream)
        kept = False
        try:
            member, hello = await self._identify(stream)
            kept = await self._hold(member, hello)
        except _RefusalError as refusal:
            self._refused += 1
            self._last_refusal = f"{peer}: {refusal}"
            logger.warning("the driver waits for %s and refused a connection: %s", self._names, self._last_refusal)
            with suppress(*_STREAM_ENDS), anyio.move_on_after(GREET_S):
                await stream.send(handshake.encode_greeting(Refused(str(refusal), refusal.final)))
        except _STREAM_ENDS:
            pass  # it has gone
        finally:
            if not kept:
                await anyio.aclose_forcefully(stream)

    async def _identify(self, stream: SocketStream) -> tuple[Attendee, Hello]:
        scope = anyio.CancelScope(deadline=anyio.current_time() + GREET_S)
        if len(self._strangers) >= MAX_STRANGERS + self._world:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.cancel()
        self._strangers[scope] = None
        try:
            with scope:
                handshake.keep_alive(stream.extra(SocketAttribute.raw_socket))
                nonce = handshake.new_nonce()
                await stream.send(handshake.encode_greeting(Challenge(nonce)))
                signed = handshake.decode_greeting(await _read_frame(stream), Signed)
                hello = handshake.verified(signed, Hello, self._token, "rank", nonce)
                if hello is None:
                    raise _RefusalError(f"it does not know the driver's {TOKEN_VARIABLE}", final=True)
                member = Attendee(rank=hello.rank, machine=one_line(hello.machine), pid=hello.pid, stream=stream)
                return member, hello
            made_room = "" if scope in self._strangers else ", and made room for another connection"
            raise _RefusalError(f"it sent no greeting within {GREET_S:g} s{made_room}", final=False)
        except InvariantError as error:
            raise _RefusalError(f"it does not speak the protocol of agentrl ({error})", final=True) from error
        finally:
            self._strangers.pop(scope, None)

    async def _hold(self, member: Attendee, hello: Hello) -> bool:
        """Keep `member` until all are there, and return True; False when it goes before."""
        if hello.world != self._world:
            raise _RefusalError(
                f"it is one of {hello.world} ranks, but trainer.parallel needs {self._world} processes", final=True
            )
        if not 0 <= member.rank < self._world:
            raise _RefusalError(f"it is rank {member.rank} of {self._world}", final=True)
        if member.rank in self._members:
            other, _ = self._members[member.rank]
            raise _RefusalError(f"rank {member.rank} has joined already ({other.where})", final=False)
        self._members[member.rank] = member, hello
        logger.info("%s: rank %d has joined (%s)", self._names, member.rank, member.where)
        if len(self._members) == self._world:
            self._complete.set()
        gone = False
        async with task_group() as waiting:

            async def watch() -> None:
                nonlocal gone
                with suppress(*_STREAM_ENDS):  # it has nothing to say before the welcome
                    await member.stream.receive(1)
                gone = True
                waiting.cancel_scope.cancel()

            waiting.start_soon(watch)
            await self._complete.wait()
            waiting.cancel_scope.cancel()
        if not self._complete.is_set():
            del self._members[member.rank]
        return not gone or self._complete.is_set()

    async def close(self) -> None:
        """Close the connections of all members."""
        for member, _ in self._members.values():
            await anyio.aclose_forcefully(member.stream)


async def _raise_at_end(child: Child) -> None:
    end = await child.ended()
    raise LaunchError(
        f"{child.spec.name} ({child.where}) ended before it joined: {end.reason}; the end of its log:\n{end.log_tail}"
    )


def check_reachable(config: ClusterConfig, hosts: Mapping[str, str]) -> None:
    """Check that processes which join reach the driver, by their addresses in `hosts`.

    Raises:
        ConfigError: one is on another machine, where the driver's loopback address leads to that machine itself.
    """
    listen, _ = listen_address(config)
    far = next((name for name, host in hosts.items() if not is_loopback(host)), None)
    if far is not None and is_loopback(listen):
        raise ConfigError(
            f"cluster.listen: {far} at {hosts[far]} cannot reach the driver at {listen}; set it to an address of this "
            "machine in the cluster's network"
        )


@asynccontextmanager
async def open_meeting(
    listen: tuple[str, int], world: int, token: str, members: str = "trainer ranks"
) -> AsyncGenerator[Meeting]:
    """Yield a meeting of `world` ranks that listens while the block runs; port 0 is any free one.

    Raises:
        ConfigError: `cluster.listen` is not an address of this machine, or its port is taken.
    """
    host, port = listen
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = await anyio.create_tcp_listener(local_host=host, local_port=port, family=family)
    except OSError as error:
        raise ConfigError(
            f"cluster.listen: cannot listen on {host}:{port}: {error.strerror or error}; name an address of this machine "
            "and a free port"
        ) from error
    bound: int = listener.extra(SocketAttribute.local_port)
    meeting = Meeting((host, bound), world, token, members)
    async with listener, task_group() as tasks:
        tasks.start_soon(listener.serve, meeting.greet, tasks)
        try:
            yield meeting
        finally:
            tasks.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await meeting.close()


async def _read_frame(stream: ByteStream) -> bytes:
    header = await _take_from(stream, handshake.HEADER_BYTES)
    return await _take_from(stream, handshake.length_of(header))


async def _take_from(stream: ByteStream, count: int) -> bytes:
    data = b""
    while len(data) < count:
        data += await stream.receive(count - len(data))
    return data


def _peer(stream: SocketStream) -> str:
    try:
        return str(stream.extra(SocketAttribute.remote_address)[0])
    except (anyio.TypedAttributeLookupError, *_STREAM_ENDS):
        return "a closed connection"
