"""The joining side of a meeting: the rank that a scheduler gave, and a connection to a driver that knows the token too."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from agentrl.errors import ConfigError, InvariantError, LaunchError
from agentrl.processes import handshake
from agentrl.processes.base import TOKEN_VARIABLE
from agentrl.processes.config import LISTEN_PORT
from agentrl.processes.handshake import Challenge, Hello, Refused, Signed, Welcome, checked_token
from agentrl.support.foreign import one_line

logger = logging.getLogger(__name__)

RETRY_S = 0.5
"""Seconds between two attempts to reach the driver."""


class RankNumbers(NamedTuple):
    """The rank of a trainer process, as its scheduler gives it."""

    rank: int
    world: int
    local: int
    """Its number on its machine."""


_SOURCES = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    ("a Kubernetes indexed job", "JOB_COMPLETION_INDEX", "WORLD_SIZE", None),
    ("LeaderWorkerSet", "LWS_WORKER_INDEX", "LWS_GROUP_SIZE", None),
    ("SkyPilot", "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", None),
)
"""Each with its variables of the rank, the number of ranks, and the number on the machine; the first that is set counts."""


def numbers_in(environment: Mapping[str, str]) -> RankNumbers:
    """Return the numbers that torchrun, Slurm, Kubernetes, LeaderWorkerSet or SkyPilot set, the first of these.

    Raises:
        ConfigError: none is set, or one is no number.

    Example:
        >>> numbers_in({"SLURM_PROCID": "9", "SLURM_NTASKS": "16", "SLURM_LOCALID": "1"})
        RankNumbers(rank=9, world=16, local=1)
    """
    for source, rank, world, local in _SOURCES:
        if rank in environment and world in environment:
            values = [environment[rank], environment[world], environment.get(local, "0") if local else "0"]
            if not all(value.isdecimal() for value in values) or int(values[0]) >= int(values[1]):
                raise ConfigError(
                    f"{source} gave {rank}={values[0]} and {world}={values[1]}: expected a rank below the number of ranks"
                )
            return RankNumbers(*map(int, values))
    raise ConfigError(f"which rank is this? No pair of environment variables says it; expected one of: {_pairs()}")


def world_in(environment: Mapping[str, str]) -> tuple[str, int]:
    """Return the scheduler of the ranks of a trainer, and their number, by the variables that `numbers_in` reads.

    Example:
        >>> world_in({"SLURM_NTASKS": "16"})
        ('Slurm', 16)
    """
    for source, _, world, _ in _SOURCES:
        if world in environment:
            if not environment[world].isdecimal() or int(environment[world]) < 1:
                raise ConfigError(f"{source} gave {world}={environment[world]}: expected the number of trainer ranks")
            return source, int(environment[world])
    raise ConfigError(
        "trainer.parallel.dp: auto under cluster.launcher: attach counts the ranks by WORLD_SIZE, and the driver has none "
        f"of the variables that say it ({_pairs()}); set WORLD_SIZE, or give dp a number"
    )


def _pairs() -> str:
    return "; ".join(f"{rank} and {world} ({source})" for source, rank, world, _ in _SOURCES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """The place at the meeting of a process that joined."""

    connection: socket.socket
    address: str
    """The address of this process on it."""
    store_host: str
    """Host of the TCPStore of rank 0."""
    store_port: int
    listener: socket.socket | None
    """On trainer rank 0, the socket on which the TCPStore listens."""


class _TryAgain(Exception):
    pass


def join_at(
    address: str, environment: MutableMapping[str, str], numbers: RankNumbers, timeout_s: float, *, hosts_store: bool = True
) -> Seat:
    """Join the driver at `HOST:PORT` with the token of the environment, which is removed; raises as `join_driver`."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"--attach {address!r}: expected HOST:PORT of the driver, such as 10.0.0.1:{LISTEN_PORT}")
    token = checked_token(environment.pop(TOKEN_VARIABLE, None), TOKEN_VARIABLE)
    return join_driver((host.strip("[]"), int(port)), token, numbers, timeout_s, hosts_store=hosts_store)


def join_driver(
    driver: tuple[str, int], token: str, numbers: RankNumbers, timeout_s: float, *, hosts_store: bool = True
) -> Seat:
    """Connect to the driver until it welcomes this process; `hosts_store`: rank 0 hosts the TCPStore of a trainer.

    Raises:
        LaunchError: it refuses this process for good, or has not welcomed it within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    reported = ""
    while True:
        try:
            return _try_to_join(driver, token, numbers, deadline, hosts_store=hosts_store)
        except (_TryAgain, OSError) as error:
            reason = str(error)
        if time.monotonic() + RETRY_S > deadline:
            host, port = driver
            raise LaunchError(
                f"the driver at {host}:{port} has not welcomed this process, rank {numbers.rank} of {numbers.world}, within "
                f"{timeout_s:g} s; the last attempt: {reason}. Start the run with a cluster.listen that this machine "
                "reaches, and for ranks of a scheduler with cluster.launcher: attach"
            )
        if reason != reported:
            logger.warning("rank %d waits for the driver at %s:%d: %s", numbers.rank, *driver, reason)
            reported = reason
        time.sleep(RETRY_S)


def _try_to_join(driver: tuple[str, int], token: str, numbers: RankNumbers, deadline: float, *, hosts_store: bool) -> Seat:
    connection = socket.create_connection(driver, timeout=min(10.0, max(0.1, deadline - time.monotonic())))
    listener: socket.socket | None = None
    try:
        handshake.keep_alive(connection)
        address = str(connection.getsockname()[0])
        if hosts_store and numbers.rank == 0:
            listener = socket.create_server((address, 0), family=connection.family)
        challenge = _message(_frame(connection), Challenge)
        hello = Hello(
            nonce=handshake.new_nonce(),
            rank=numbers.rank,
            world=numbers.world,
            machine=socket.gethostname()[:200],
            pid=os.getpid(),
            address=address,
            store_port=int(listener.getsockname()[1]) if listener else 0,
        )
        connection.sendall(handshake.encode_greeting(handshake.sign(hello, token, "rank", challenge.nonce)))
        connection.settimeout(max(0.1, deadline - time.monotonic()))  # the others may take their time
        welcome = _welcomed(_frame(connection), token, hello.nonce)
        connection.settimeout(None)
        return Seat(
            connection=connection,
            address=address,
            store_host=welcome.store_host,
            store_port=welcome.store_port,
            listener=listener,
        )
    except BaseException:
        connection.close()
        if listener is not None:
            listener.close()
        raise


def _welcomed(body: bytes, token: str, nonce: bytes) -> Welcome:
    with suppress(InvariantError):
        _raise_refusal(handshake.decode_greeting(body, Refused))
    welcome = handshake.verified(_message(body, Signed), Welcome, token, "driver", nonce)
    if welcome is None:
        raise LaunchError(f"what answers as the driver does not know this process's {TOKEN_VARIABLE}")
    return welcome


def _raise_refusal(refused: Refused) -> NoReturn:
    message = f"the driver refused this process: {one_line(refused.message)}"
    raise LaunchError(message) if refused.final else _TryAgain(message)


def _message(body: bytes, expected: type[handshake.Handshake]) -> handshake.Handshake:
    try:
        return handshake.decode_greeting(body, expected)
    except InvariantError as error:
        raise LaunchError(f"what listens there is no driver of agentrl: {error}") from error


def _frame(connection: socket.socket) -> bytes:
    try:
        return _take(connection, handshake.length_of(_take(connection, handshake.HEADER_BYTES)))
    except InvariantError as error:
        raise LaunchError(f"what listens there is no driver of agentrl: {error}") from error


def _take(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        received = connection.recv(count - len(data))
        if not received:
            raise _TryAgain("the driver closed the connection before it had all ranks")
        data += received
    return data
