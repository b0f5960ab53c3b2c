"""Trainer ranks that join the driver over TCP: those that a launcher starts on other nodes, and those of a scheduler.

Invariant: no connection outlives the block, and a rank ends at once when its connection closes. A rank that a launcher
started is stopped as well; one of a scheduler is the scheduler's, which starts it again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import ByteStream, ObjectSendStream
from anyio.streams.buffered import BufferedByteReceiveStream

from agentrl.cluster.base import TOKEN_VARIABLE, Child, Exit, Launcher
from agentrl.cluster.config import ClusterConfig, listen_address
from agentrl.cluster.handshake import checked_token, new_token
from agentrl.cluster.meeting import Attendee, Meeting, check_reachable, open_meeting
from agentrl.concurrency import task_group
from agentrl.trainer.worker.processes import STREAM_ENDS, RankEnd
from agentrl.trainer.worker.protocol import HEARTBEAT
from agentrl.trainer.worker.starting import rank_spec

logger = logging.getLogger(__name__)

_LAST_WORDS_S = 0.5
"""Seconds after the end of a connection in which the last words of the rank, or how its process ended, may arrive."""
_CHUNKS = 16
"""Pieces of a reply that are received before the trainer reads them."""


class MemberStream(ByteStream):
    """A connection that is always read, so that its end is noticed although no caller waits for a reply."""

    def __init__(self, member: Attendee) -> None:
        self._member, self._socket = member, member.stream
        self._arriving: ObjectSendStream[bytes]
        self._arriving, arrived = anyio.create_memory_object_stream[bytes](_CHUNKS)
        self._source = arrived
        self._arrived = BufferedByteReceiveStream(arrived)
        self.closed = anyio.Event()
        """Set once the other side has closed."""

    def discard(self) -> None:
        """Drop what has arrived; no task may receive any more."""
        self._source.close()

    async def pump(self) -> None:
        """Receive until the other side closes."""
        async with self._arriving:
            with suppress(*STREAM_ENDS):
                while True:
                    await self._arriving.send(await self._socket.receive())
        self.closed.set()

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """Return the next bytes; raise EndOfStream at the end."""
        return await self._arrived.receive(max_bytes)

    async def send(self, item: bytes) -> None:
        """Send all of `item`."""
        await self._socket.send(item)

    async def send_eof(self) -> None:
        """Send no more."""
        await self._socket.send_eof()

    async def aclose(self) -> None:
        """Close the connection."""
        await self._arrived.aclose()
        await self._socket.aclose()

    def shut(self) -> None:
        """Close the connection at once, for both sides."""
        self._member.shut()

    @property
    def extra_attributes(self) -> Mapping[Any, Callable[[], Any]]:
        """Those of the connection."""
        return self._socket.extra_attributes


class JoinedRank:
    """A rank that has joined; a `WorkerRank`."""

    def __init__(self, member: Attendee, child: Child | None) -> None:
        """Speak to `member`; `child` is its process where a launcher of this driver started it."""
        self.where = f"{member.where}, {child.where}" if child is not None else member.where
        self.pid = member.pid
        self.host = child.host if child is not None else None
        self.stream = MemberStream(member)
        self._child = child

    async def ended(self) -> RankEnd:
        """Wait until its connection closes, or its process ends."""
        end: Exit | None = None
        async with task_group() as waiting:

            async def closed() -> None:
                await self.stream.closed.wait()
                with anyio.move_on_after(_LAST_WORDS_S):
                    await anyio.sleep_forever()  # its last words are read meanwhile, or its process ends, and say more
                waiting.cancel_scope.cancel()

            waiting.start_soon(closed)
            if self._child is not None:
                end = await self._child.ended()
                waiting.cancel_scope.cancel()
        if end is not None:
            return RankEnd(reason=f"{end.reason}; the end of its log:\n{end.log_tail}", is_cause=end.was_killed)
        where = self._child.spec.log_path if self._child is not None else "where its scheduler keeps it"
        return RankEnd(
            reason=f"its connection closed: it was killed or its machine is gone; its log is {where}", is_cause=True
        )

    async def log_end(self) -> str:
        """Return the end of its log, where a launcher of this driver has it."""
        return f"; the end of its log:\n{await self._child.log_tail()}" if self._child is not None else ""

    def pulse(self) -> int | None:
        """Return None: its process may be on another machine."""
        return None

    async def dismiss(self) -> None:
        """Tell it to end by itself."""
        with suppress(*STREAM_ENDS):
            await self.stream.send(HEARTBEAT)

    def kill(self) -> None:
        """Close its connection, which ends it, and kill its process where this driver can."""
        self.stream.shut()
        if self._child is not None:
            self._child.kill()


@asynccontextmanager
async def attached_ranks(world: int, config: ClusterConfig) -> AsyncGenerator[Sequence[JoinedRank]]:
    """Wait for `world` ranks that a scheduler starts, and yield them.

    Raises:
        ConfigError: the token or the address is missing or wrong.
        LaunchError: some ranks have not joined within `cluster.start_timeout_s`; the message lists them.

    Cancellation: every connection closes, which ends the ranks.
    """
    token = checked_token(os.environ.get(TOKEN_VARIABLE), TOKEN_VARIABLE)
    async with open_meeting(listen_address(config), world, token) as meeting:
        host, port = meeting.address
        logger.warning(
            "waiting for %d trainer rank(s) to join at %s:%d: Slurm, Kubernetes or torchrun starts them, also again after a "
            "failure (cluster.launcher: attach)",
            world,
            host,
            port,
        )
        async with _followed(meeting, (), config.start_timeout_s) as ranks:
            yield ranks


@asynccontextmanager
async def launched_ranks(
    world: int, config: ClusterConfig, launcher: Launcher, log_path: Path, environment: Mapping[str, str], *, device: str
) -> AsyncGenerator[Sequence[JoinedRank]]:
    """Start `world` ranks through `launcher`, and yield them once they have joined.

    Each reserves a GPU, unless `device` is `cpu`, or `auto` and the launcher has none.

    Raises:
        ConfigError: `cluster.listen` is wrong, or the cluster can never place the ranks.
        LaunchError: a rank could not be started, ended before it joined, or has not joined within
            `cluster.start_timeout_s`.

    Cancellation: the ranks end.
    """
    gpus = 0 if device == "cpu" or (device == "auto" and not await launcher.reserves_gpus()) else 1
    token = new_token()
    async with open_meeting(listen_address(config), world, token) as meeting:
        host, port = meeting.address
        specs = [
            rank_spec(
                rank,
                log_path,
                ["--attach", f"[{host}]:{port}" if ":" in host else f"{host}:{port}"],
                {**environment, "RANK": str(rank), "WORLD_SIZE": str(world), TOKEN_VARIABLE: token},
                gpus=gpus,
            )
            for rank in range(world)
        ]
        children = await launcher.start(specs)
        try:
            check_reachable(config, {child.spec.name: child.host for child in children})
            async with _followed(meeting, children, config.start_timeout_s) as ranks:
                yield ranks
        finally:
            with anyio.CancelScope(shield=True):
                async with task_group() as stopping:
                    for child in children:
                        child.kill()
                        stopping.start_soon(child.stop)


@asynccontextmanager
async def _followed(meeting: Meeting, children: Sequence[Child], timeout_s: float) -> AsyncGenerator[Sequence[JoinedRank]]:
    members = await meeting.gather(timeout_s, children)
    ranks = [JoinedRank(member, child) for member, child in zip_longest(members, children)]
    try:
        async with task_group() as pumping:
            for rank in ranks:
                pumping.start_soon(rank.stream.pump)
            try:
                yield ranks
            finally:
                for rank in ranks:
                    rank.stream.shut()
                pumping.cancel_scope.cancel()
    finally:
        for rank in ranks:
            rank.stream.discard()
