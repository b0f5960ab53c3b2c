"""Weights from a trainer's memory over a pool: groups, failing and returning servers, cancellation, under both loops."""

from __future__ import annotations

import anyio
import numpy as np
import pytest

from agentrl.errors import ConfigError, ServerUnavailable
from agentrl.inference.backend import Probe
from agentrl.servers.scripted.server import ControlCall, Fault, Hold, ScriptedServer, scripted_logprobs
from agentrl.trainer.scripted import ScriptedChannel
from agentrl.weights.types import GroupRequest, WeightFeed
from tests.support.scripted import VOCAB, all_serving, pool_of, request, seen


def servers_of(count: int, timeout_s: float = 60) -> list[ScriptedServer]:
    return [
        ScriptedServer(lambda _: [4], vocab_size=VOCAB, url=f"scripted://{n}", timeout_s=timeout_s) for n in range(count)
    ]


def feed(version: int, channel: ScriptedChannel) -> WeightFeed:
    return WeightFeed(version=version, channel=channel)


async def test_every_server_gets_a_group_of_its_own_once_and_every_version_through_it() -> None:
    servers, channel = servers_of(3), ScriptedChannel()
    ids = np.array([1, 5, 9, 2], np.int32)
    async with pool_of(*servers) as pool:
        for version in (1, 2, 3):
            probe = Probe(token_ids=ids, logprobs=scripted_logprobs(ids, version=version))
            report = await pool.update_weights(feed(version, channel), probe)
            assert (report.version, report.updated) == (version, tuple(server.url for server in servers))
            assert report.num_bytes == 4
    for server in servers:
        assert len(server.groups.joined) == 1
        assert [manifest.version for manifest in server.groups.received] == [1, 2, 3]
    names = [server.groups.joined[0].name for server in servers]
    assert len(set(names)) == 3
    assert [(set(sending.started), sending.abandoned) for sending in channel.sendings] == [(set(names), ())] * 3


@pytest.mark.parametrize("call", ["pause", "receive_weights"])
async def test_a_server_that_failed_before_the_end_is_abandoned_and_the_others_are_not(call: ControlCall) -> None:
    servers, channel = servers_of(2), ScriptedChannel()
    async with pool_of(*servers, health_interval_s=60) as pool:
        await pool.update_weights(feed(1, channel))
        servers[1].control_faults[call] = Fault.BAD_REQUEST
        await pool.update_weights(feed(2, channel))
        lost = servers[1].groups.joined[0].name
        assert channel.sendings[1].abandoned == (lost,)
        assert (lost in channel.sendings[1].started) == (call == "receive_weights")


async def test_a_group_that_failed_at_the_trainers_end_only_is_a_failed_server() -> None:
    servers, channel = servers_of(2), ScriptedChannel()
    async with pool_of(*servers, health_interval_s=60) as pool:
        await pool.update_weights(feed(1, channel))
        channel.failures = {servers[0].groups.joined[0].name: "cut short"}
        report = await pool.update_weights(feed(2, channel))
        assert report.evicted == ("scripted://0",)
        assert "cut short" in pool.describe().servers[0].reason


async def test_a_restarted_server_gets_the_weights_again_as_long_as_the_trainer_has_them() -> None:
    servers, channel = servers_of(1), ScriptedChannel()
    async with pool_of(*servers) as pool:
        await pool.update_weights(feed(1, channel))
        servers[0].die()
        with pytest.raises(ServerUnavailable):
            await pool.generate(request())
        servers[0].revive(version=0)
        pool.report_started("scripted://0")
        with anyio.fail_after(300):
            await all_serving(pool)
        assert servers[0].version == 1
        assert [len(channel.sendings), len(servers[0].groups.joined)] == [2, 2]
        assert servers[0].groups.left == [servers[0].groups.joined[0].name]
        assert (await pool.generate(request())).spans[0].version == 1


@pytest.mark.parametrize("slow", ["join_group", "receive_weights"])
async def test_two_servers_that_return_together_do_not_close_the_groups_of_one_another(slow: ControlCall) -> None:
    servers, channel = servers_of(3), ScriptedChannel()
    async with pool_of(*servers, control_timeout_s=60) as pool:
        await pool.update_weights(feed(1, channel))
        held = servers[1].control_holds[slow] = Hold()
        for server in servers[1:]:
            server.die()
            pool.report_dead(server.url, "killed")
            server.revive(version=0)
        with anyio.fail_after(300):
            pool.report_started("scripted://1")
            await held.reached.wait()
            pool.report_started("scripted://2")
            await seen(pool, lambda status: status.servers[2].state == "serving")
            held.release.set()
            await all_serving(pool)
        assert [len(server.groups.joined) for server in servers] == [1, 2, 2]
        assert channel.groups == {server.groups.joined[-1].name for server in servers}


async def test_a_server_whose_join_was_cancelled_joins_with_the_next_update() -> None:
    servers, channel = servers_of(2), ScriptedChannel()
    async with pool_of(*servers, control_timeout_s=60) as pool:
        await pool.update_weights(feed(1, channel))
        joining = servers[1].control_holds["join_group"] = Hold()
        servers[1].die()
        pool.report_dead("scripted://1", "killed")
        servers[1].revive(version=0)
        pool.report_started("scripted://1")
        with anyio.fail_after(300):
            await joining.reached.wait()
            servers[1].control_holds.clear()
            report = await pool.update_weights(feed(2, channel))  # cancels the join
        assert report.updated == ("scripted://0", "scripted://1")
        assert [server.version for server in servers] == [2, 2]
        assert channel.groups == {server.groups.joined[-1].name for server in servers}


@pytest.mark.parametrize("busy", [True, False])
async def test_a_server_that_returns_while_the_trainer_has_other_weights_waits_for_the_next_update(busy: bool) -> None:
    servers, channel = servers_of(2), ScriptedChannel()
    async with pool_of(*servers) as pool:
        await pool.update_weights(feed(1, channel))
        channel.stepping, channel.published_version = busy, None
        servers[1].die()
        pool.report_dead("scripted://1", "killed")
        servers[1].revive(version=0)
        pool.report_started("scripted://1")
        with anyio.fail_after(300):
            await seen(pool, lambda status: status.servers[1].state == "waiting")
            assert "server gets weights" in pool.describe().servers[1].reason
            for index in range(10):
                await pool.generate(request(episode=str(index)))
            assert servers[1].calls == []
            channel.stepping = False
            await pool.update_weights(feed(2, channel))
            await all_serving(pool)
        assert [server.version for server in servers] == [2, 2]


async def test_a_server_with_parts_of_two_versions_does_not_serve_before_it_has_all_of_one() -> None:
    servers, channel = servers_of(2), ScriptedChannel()
    async with pool_of(*servers, control_timeout_s=60) as pool:
        await pool.update_weights(feed(1, channel))
        servers[1].control_faults["receive_weights"] = Fault.HANG
        with anyio.fail_after(300):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(pool.update_weights, feed(2, channel))
                await anyio.wait_all_tasks_blocked()  # the first server has the weights; only the second is waited for
                tasks.cancel_scope.cancel()
            channel.published_version = None  # the trainer went on
            # The first server proved that it has all of version 2; the second was cut off, and may have any part of it.
            assert [server.state for server in pool.describe().servers] == ["serving", "behind"]
            assert pool.policy_version == 2
            await seen(pool, lambda status: status.servers[1].state == "waiting")
            servers[1].control_faults.clear()
            await pool.update_weights(feed(3, channel))
            await all_serving(pool)
        assert [server.version for server in servers] == [3, 3]


async def test_a_server_that_cannot_take_weights_this_way_ends_the_run_with_the_field() -> None:
    servers, channel = servers_of(1), ScriptedChannel()

    def refuse() -> GroupRequest:
        raise ConfigError("sync.method: too old")

    servers[0].groups.request = refuse
    async with pool_of(*servers) as pool:
        with pytest.raises(ConfigError, match=r"sync\.method"):
            await pool.update_weights(feed(1, channel))
        assert not servers[0].paused
