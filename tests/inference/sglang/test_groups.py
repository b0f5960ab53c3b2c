"""The messages to a server that takes weights from the trainer's memory."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
import pytest

from agentrl.errors import ConfigError, InvariantError, ServerTimeout, ServerUnavailable, WeightSyncError
from agentrl.inference.sglang.server import GroupCalls
from agentrl.inference.sglang.transport import Control, Transport
from agentrl.inference.sglang.wire import ServerInfo
from agentrl.servers.scripted.server import Fault, ScriptedServer
from agentrl.servers.scripted.socket_server import ScriptedHTTP, serve_scripted
from agentrl.weights.types import GroupAddress, Manifest, TensorSpec, scripted_checksums
from tests.support.impatient import Impatient
from tests.support.scripted import VOCAB, in_virtual_time, request

ADDRESS = GroupAddress("group", "127.0.0.1", 4321, 3, "gloo")
MANIFEST = Manifest(
    7,
    (
        (TensorSpec("a", "float32", (2, 3)), TensorSpec("b", "float32", ())),
        (TensorSpec("c", "bfloat16", (4,)),),
    ),
    {},
)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass(frozen=True)
class Rig:
    """A client, and the server that hears it."""

    client: Impatient
    http: ScriptedHTTP
    script: ScriptedServer


@asynccontextmanager
async def rig() -> AsyncGenerator[Rig]:
    script = ScriptedServer(lambda _: [4], vocab_size=VOCAB)
    async with serve_scripted(script, sglang_version="0.5.23") as http:
        client = Impatient(http.url, vocab_size=VOCAB)
        async with client:
            yield Rig(client, http, script)


async def taken(r: Rig, mode: str = "retract") -> None:
    await r.client.groups.join(ADDRESS)
    await r.client.pause("retract" if mode == "retract" else "in_place")
    await r.client.groups.receive(MANIFEST, "group")
    await r.client.resume()


def order(http: ScriptedHTTP) -> list[str]:
    return [path for path, _ in http.seen if "info" not in path and "loads" not in path]


async def test_buckets_go_in_one_piece_inside_a_session() -> None:
    async with rig() as r:
        assert r.client.groups.request().flat
        await taken(r)
        assert order(r.http) == [
            "/init_weights_update_group",
            "/pause_generation",
            "/begin_weight_update",
            "/update_weights_from_distributed",
            "/update_weights_from_distributed",
            "/end_weight_update",
            "/continue_generation",
        ]
        assert r.http.bodies("/init_weights_update_group") == [
            {
                "master_address": "127.0.0.1",
                "master_port": 4321,
                "rank_offset": 1,
                "world_size": 3,
                "group_name": "group",
                "backend": "gloo",
            }
        ]
        first, last = r.http.bodies("/update_weights_from_distributed")
        assert first == {
            "names": ["a", "b"],
            "dtypes": ["float32", "float32"],
            "shapes": [[2, 3], []],
            "group_name": "group",
            "flush_cache": False,
            "abort_all_requests": False,
            "load_format": "flattened_bucket",
        }
        assert (last["names"], last["weight_version"], last["flush_cache"]) == (["c"], "7", True)
        assert (r.client.version, await r.client.check()) == (7, 7)
        assert await r.client.checksums() == scripted_checksums(7, MANIFEST.buckets)


@pytest.mark.parametrize("info", [ServerInfo(version="0.5.23", dp_size=2), ServerInfo(version="0.5.23", pp_size=2)])
async def test_other_parallelism_than_of_tensors_is_a_config_error(info: ServerInfo) -> None:
    async def nothing(version: int, unique: str, *, flush: bool) -> None:
        raise AssertionError

    calls = GroupCalls(Control(Transport("http://a"), timeout_s=1), lambda: info, flush=lambda: True, has=nothing)
    with pytest.raises(ConfigError, match="tensor parallelism only"):
        calls.request()


async def test_every_group_has_a_name_of_its_own_and_the_servers_ranks() -> None:
    async with rig() as r:
        requests = [r.client.groups.request() for _ in range(3)]
    assert len({request.name for request in requests}) == 3
    assert {(request.ranks, request.nccl) for request in requests} == {(1, False)}


async def test_in_place_nothing_is_flushed_and_the_salt_is_the_version_and_the_group() -> None:
    async with rig() as r:
        await taken(r, "in_place")
        assert [body["flush_cache"] for body in r.http.bodies("/update_weights_from_distributed")] == [False, False]
        await r.client.generate(request())
        assert r.http.bodies("/generate")[-1]["cache_salt"] == "v7-group"


async def test_weights_are_not_taken_without_a_pause() -> None:
    async with rig() as r:
        await r.client.groups.join(ADDRESS)
        with pytest.raises(InvariantError, match=r"call pause\(\) before"):
            await r.client.groups.receive(MANIFEST, "group")
        assert not r.http.bodies("/begin_weight_update")


async def test_a_session_that_an_earlier_update_left_open_is_closed_first() -> None:
    async with rig() as r:
        await r.client.groups.join(ADDRESS)
        await r.client.pause("retract")
        with pytest.raises(WeightSyncError, match=r"did not take bucket 1 of 2 of version 7: .*group other is not there"):
            await r.client.groups.receive(MANIFEST, "other")
        await r.client.groups.receive(MANIFEST, "group")
        assert order(r.http)[-6:] == [
            "/begin_weight_update",
            "/end_weight_update",
            "/begin_weight_update",
            "/update_weights_from_distributed",
            "/update_weights_from_distributed",
            "/end_weight_update",
        ]


async def test_leaving_a_group_the_server_does_not_know_is_no_error() -> None:
    async with rig() as r:
        await r.client.groups.join(ADDRESS)
        await r.client.groups.leave("group")
        await r.client.groups.leave("group")
        assert [body["group_name"] for body in r.http.bodies("/destroy_weights_update_group")] == ["group", "group"]


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Fault.BAD_REQUEST, WeightSyncError),
        (Fault.SERVER_ERROR, ServerUnavailable),
        (Fault.REFUSE, ServerUnavailable),
        (Fault.HANG, ServerTimeout),
    ],
)
async def test_what_a_server_may_do_instead_is_a_named_error(fault: Fault, error: type[Exception]) -> None:
    patience_s = 0.3 if fault is Fault.HANG else 60
    async with rig() as r:
        r.script.control_faults["join_group"] = fault
        with (
            r.client.waiting_only(patience_s),
            pytest.raises(error, match=r"join the trainer's group at 127\.0\.0\.1:4321|init_weights_update_group"),
        ):
            await r.client.groups.join(ADDRESS)
        r.script.control_faults.clear()
        await r.client.groups.join(ADDRESS)
        await r.client.pause("retract")
        r.script.control_faults["receive_weights"] = fault
        expected = pytest.raises(error, match=r"take bucket 1 of 2|update_weights_from_distributed|take all weights")
        with r.client.waiting_only(patience_s), expected:
            await r.client.groups.receive(MANIFEST, "group")


def test_a_server_that_is_slow_with_every_bucket_is_given_up_as_a_whole() -> None:
    """Each bucket comes within the deadline, all of them do not: the other servers stand still meanwhile."""

    class Slow:
        url = "http://slow"

        async def call(self, method: str, path: str, body: bytes | None) -> bytes:
            if path == "/update_weights_from_distributed":
                await anyio.sleep(6)
            return b'{"success": true}'

    async def nothing(version: int, unique: str, *, flush: bool) -> None:
        raise AssertionError

    calls = GroupCalls(
        Control(Slow(), timeout_s=30),  # pyright: ignore[reportArgumentType] - of a transport, only this is asked
        lambda: ServerInfo(version="0.5.23"),
        flush=lambda: True,
        has=nothing,
    )
    buckets = tuple((TensorSpec(f"t{number}", "float32", (1,)),) for number in range(20))

    async def main() -> None:
        with pytest.raises(ServerTimeout, match=r"http://slow: agentrl waited for the server to take all weights"):
            await calls.receive(Manifest(1, buckets, {}), "group")

    in_virtual_time(main)
