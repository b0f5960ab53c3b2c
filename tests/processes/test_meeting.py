"""Ranks meet the driver over TCP: only those with the token, each once, and nothing that strangers send does harm."""

from __future__ import annotations

import logging
import socket
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial

import anyio
import anyio.to_thread
import pytest
from anyio.abc import SocketAttribute, SocketStream
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import ConfigError, InvariantError, LaunchError
from agentrl.processes import handshake
from agentrl.processes.handshake import Challenge, Hello, Refused, Signed, Welcome
from agentrl.processes.joining import RankNumbers, Seat, join_driver, numbers_in
from agentrl.processes.machine import interface_of
from agentrl.processes.meeting import MAX_STRANGERS, Meeting, open_meeting

TOKEN = "a secret of some length"


@asynccontextmanager
async def meeting_of(world: int) -> AsyncGenerator[Meeting]:
    async with open_meeting(("127.0.0.1", 0), world, TOKEN) as meeting:
        yield meeting


async def joining(meeting: Meeting, rank: int, world: int, *, token: str = TOKEN, timeout_s: float = 60) -> Seat:
    return await anyio.to_thread.run_sync(
        partial(join_driver, meeting.address, token, RankNumbers(rank, world, 0), timeout_s), abandon_on_cancel=True
    )


async def joining_and_leaving(meeting: Meeting, rank: int, world: int) -> None:
    close([await joining(meeting, rank, world)])


def close(seats: Sequence[Seat]) -> None:
    for seat in seats:
        seat.connection.close()
        if seat.listener is not None:
            seat.listener.close()


@pytest.mark.starts
async def test_all_ranks_join_and_learn_where_rank_0_hosts_the_store() -> None:
    seats: dict[int, Seat] = {}
    complete = anyio.Event()

    async def join(meeting: Meeting, rank: int) -> None:
        seats[rank] = await joining(meeting, rank, 3)
        if len(seats) == 3:
            complete.set()

    async with meeting_of(3) as meeting, anyio.create_task_group() as tasks:
        for rank in (2, 0, 1):
            tasks.start_soon(join, meeting, rank)
        members = await meeting.gather(60)
        assert [member.rank for member in members] == [0, 1, 2]
        await complete.wait()
        [store] = {(seat.store_host, seat.store_port) for seat in seats.values()}
        listener = seats[0].listener
        assert listener is not None
        assert listener.getsockname()[:2] == store
        await members[1].stream.send(b"frame")
        assert seats[1].connection.recv(5) == b"frame"
    assert seats[2].connection.recv(1) == b""  # the connections close with the block
    close(list(seats.values()))


@pytest.mark.starts
async def test_ranks_that_are_missing_are_listed(caplog: pytest.LogCaptureFixture) -> None:
    message = (
        r"trainer ranks: 1 of 2 have not joined the driver at 127\.0\.0\.1:\d+ within 1 s \(cluster\.start_timeout_s\): "
        r"missing rank 0; joined: 1 \(here, pid 1\)\. Each needs an address of the driver"
    )
    async with meeting_of(2) as meeting:
        with caplog.at_level(logging.INFO, "agentrl.processes.meeting"):
            connection = await greeting(meeting, rank=1)
            await joined(caplog, rank=1)
        with pytest.raises(LaunchError, match=message):
            await meeting.gather(1)
        connection.close()


@pytest.mark.starts
@pytest.mark.parametrize(
    ("rank", "world", "token", "message"),
    [
        (1, 2, "another secret, as long", r"does not know the driver's AGENTRL_CLUSTER_TOKEN"),
        (1, 4, TOKEN, r"one of 4 ranks, but trainer\.parallel needs 2 processes"),
        (5, 2, TOKEN, r"it is rank 5 of 2"),
    ],
)
async def test_a_rank_that_cannot_belong_is_refused_for_good(rank: int, world: int, token: str, message: str) -> None:
    async with meeting_of(2) as meeting:
        with pytest.raises(LaunchError, match=message):
            await joining(meeting, rank, world, token=token)
        with pytest.raises(LaunchError, match=f"(?s)missing rank 0, 1; joined: none; 1 refused, the last one: .*{message}"):
            await meeting.gather(0.01)


@pytest.mark.starts
async def test_a_second_process_with_the_rank_of_another_is_refused_until_that_one_has_gone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with meeting_of(2) as meeting:
        with caplog.at_level(logging.INFO, "agentrl.processes.meeting"):
            first = await greeting(meeting, rank=1)
            await joined(caplog, rank=1)
        second = await greeting(meeting, rank=1)
        refused = handshake.decode_greeting(await reply(second), Refused)
        assert refused.message == "rank 1 has joined already (here, pid 1)"
        assert not refused.final
        first.close()  # its rank is free again
        third: Seat | None = None

        async def join() -> None:
            nonlocal third
            third = await joining(meeting, 1, 2)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(join)
            tasks.start_soon(joining_and_leaving, meeting, 0, 2)
            assert len(await meeting.gather(60)) == 2
        assert third is not None
        close([third])
        second.close()


@pytest.mark.starts
async def test_a_rank_that_is_late_is_refused_but_may_try_again() -> None:
    async with meeting_of(1) as meeting, anyio.create_task_group() as tasks:
        tasks.start_soon(joining_and_leaving, meeting, 0, 1)
        await meeting.gather(60)
        late = await greeting(meeting, rank=0, world=1)
        assert "has joined already" in handshake.decode_greeting(await reply(late), Refused).message
        late.close()


HOSTILE = (
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\xff\xff\xff\xff" + b"x" * 100,
    b"\x05\x00\x00\x00hello",
    handshake.encode_greeting(Refused("a message of another type", True)),
    handshake.encode_greeting(Signed(b"x" * 3000, b"y" * 32)),
)


@pytest.mark.starts
@pytest.mark.parametrize("data", HOSTILE)
async def test_what_a_stranger_sends_is_refused_without_harm(data: bytes) -> None:
    async with meeting_of(1) as meeting:
        await anyio.to_thread.run_sync(meddle, meeting, data)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(joining_and_leaving, meeting, 0, 1)
            assert len(await meeting.gather(60)) == 1


def meddle(meeting: Meeting, data: bytes) -> None:
    with socket.create_connection(meeting.address, timeout=300) as connection:
        handshake.decode_greeting(_frame(connection), Challenge)
        connection.sendall(data)
        refused = handshake.decode_greeting(_frame(connection), Refused)
        assert "protocol of agentrl" in refused.message or "AGENTRL_CLUSTER_TOKEN" in refused.message
        with suppress(ConnectionResetError):  # it did not read all that was sent
            assert connection.recv(1) == b""


@pytest.mark.starts
async def test_a_silent_stranger_delays_no_rank() -> None:
    async with meeting_of(1) as meeting:
        with socket.create_connection(meeting.address), socket.create_connection(meeting.address):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(joining_and_leaving, meeting, 0, 1)
                assert len(await meeting.gather(60)) == 1


@pytest.mark.starts
async def test_more_silent_strangers_than_the_driver_keeps_delay_no_rank() -> None:
    async with meeting_of(1) as meeting:
        strangers = [socket.create_connection(meeting.address, timeout=300) for _ in range(MAX_STRANGERS + 20)]
        for stranger in strangers:
            await anyio.to_thread.run_sync(_frame, stranger)  # the driver has greeted it
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(joining_and_leaving, meeting, 0, 1)
            assert len(await meeting.gather(60)) == 1
        oldest = handshake.decode_greeting(await reply(strangers[0]), Refused)
        assert (oldest.message.endswith("made room for another connection"), oldest.final) == (True, False)
        for stranger in strangers:
            stranger.close()


@pytest.mark.starts
async def test_a_rank_gives_up_on_what_is_no_driver() -> None:
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:

        async def serve(stream: SocketStream) -> None:
            async with stream:
                await stream.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        tasks.start_soon(listener.serve, serve)
        address = "127.0.0.1", listener.extra(SocketAttribute.local_port)
        with pytest.raises(LaunchError, match=r"what listens there is no driver of agentrl"):
            await anyio.to_thread.run_sync(join_driver, address, TOKEN, RankNumbers(0, 1, 0), 60.0)
        tasks.cancel_scope.cancel()


@pytest.mark.starts
async def test_a_rank_does_not_follow_a_driver_that_does_not_know_the_token() -> None:
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:

        async def serve(stream: SocketStream) -> None:
            async with stream:
                await stream.send(handshake.encode_greeting(Challenge(handshake.new_nonce())))
                await stream.receive()
                forged = handshake.sign(Welcome("10.0.0.66", 1), "guessed by somebody", "driver", handshake.new_nonce())
                await stream.send(handshake.encode_greeting(forged))

        tasks.start_soon(listener.serve, serve)
        address = "127.0.0.1", listener.extra(SocketAttribute.local_port)
        with pytest.raises(LaunchError, match=r"does not know this process's AGENTRL_CLUSTER_TOKEN"):
            await anyio.to_thread.run_sync(join_driver, address, TOKEN, RankNumbers(0, 1, 0), 60.0)
        tasks.cancel_scope.cancel()


@pytest.mark.starts
async def test_an_address_of_another_machine_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.listen: cannot listen on 192\.0\.2\.1:0"):
        async with open_meeting(("192.0.2.1", 0), 1, TOKEN):
            raise AssertionError("unreachable: nothing listens there")


@pytest.mark.starts
@given(st.binary(max_size=200))
def test_no_bytes_but_those_of_the_type_decode(data: bytes) -> None:
    try:
        message = handshake.decode_greeting(data, Signed)
    except InvariantError:
        return
    assert handshake.verified(message, Hello, TOKEN, "rank", bytes(handshake.NONCE_BYTES)) is None


@pytest.mark.parametrize("token", [None, "", "short"])
def test_a_token_that_is_missing_or_short_is_a_config_error(token: str | None) -> None:
    with pytest.raises(ConfigError, match=r"THE_VARIABLE .*openssl rand -hex 32"):
        handshake.checked_token(token, "THE_VARIABLE")


def test_the_interface_of_loopback_is_found() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, (3, 8, 1)),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "16", "SLURM_LOCALID": "5"}, (5, 16, 5)),
        ({"JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "2"}, (1, 2, 0)),
        ({"LWS_WORKER_INDEX": "0", "LWS_GROUP_SIZE": "2"}, (0, 2, 0)),
        ({"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "4"}, (1, 4, 0)),
    ],
)
def test_every_scheduler_says_which_rank_a_process_is(environment: dict[str, str], expected: tuple[int, int, int]) -> None:
    assert numbers_in(environment) == RankNumbers(*expected)


def test_numbers_that_are_missing_or_impossible_are_config_errors() -> None:
    with pytest.raises(ConfigError, match=r"which rank is this\?.*SLURM_PROCID and SLURM_NTASKS \(Slurm\)"):
        numbers_in({"JOB_COMPLETION_INDEX": "0"})
    with pytest.raises(ConfigError, match=r"torchrun gave RANK=2 and WORLD_SIZE=2: expected a rank below"):
        numbers_in({"RANK": "2", "WORLD_SIZE": "2"})


async def greeting(meeting: Meeting, *, rank: int, world: int = 2) -> socket.socket:
    """Connect and greet as a rank by hand, and return the connection."""

    def greet() -> socket.socket:
        connection = socket.create_connection(meeting.address, timeout=300)
        challenge = handshake.decode_greeting(_frame(connection), Challenge)
        nonce = handshake.new_nonce()
        hello = Hello(nonce=nonce, rank=rank, world=world, machine="here", pid=1, address="127.0.0.1", store_port=0)
        connection.sendall(handshake.encode_greeting(handshake.sign(hello, TOKEN, "rank", challenge.nonce)))
        return connection

    return await anyio.to_thread.run_sync(greet)


async def joined(caplog: pytest.LogCaptureFixture, *, rank: int) -> None:
    """Wait until the driver has taken a greeting; only its log shows that."""
    with anyio.fail_after(300):
        while f"rank {rank} has joined" not in caplog.text:  # noqa: ASYNC110 - a log is observed
            await anyio.sleep(0.005)


async def reply(connection: socket.socket) -> bytes:
    return await anyio.to_thread.run_sync(_frame, connection)


def _frame(connection: socket.socket) -> bytes:
    header = connection.recv(handshake.HEADER_BYTES, socket.MSG_WAITALL)
    return connection.recv(handshake.length_of(header), socket.MSG_WAITALL)
