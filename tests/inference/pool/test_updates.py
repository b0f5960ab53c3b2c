"""Weight updates over a pool, as files and from a trainer's memory: the barrier, verification, failures, cancellation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from agentrl.errors import ServerUnavailable, WeightSyncError
from agentrl.inference.backend import Generation, LogprobTolerance, Probe, UpdateReport
from agentrl.inference.pool.members import State
from agentrl.servers.scripted.server import (
    ControlCall,
    Fault,
    Hold,
    Script,
    ScriptedReply,
    ScriptedServer,
    scripted_logprobs,
)
from agentrl.trainer.scripted import ScriptedChannel
from agentrl.weights.disk import publish
from agentrl.weights.tensors import RawTensor
from agentrl.weights.types import Publication, WeightFeed
from tests.support.scripted import (
    VOCAB,
    all_serving,
    in_virtual_time,
    opaque_servers,
    others_ran,
    outlive,
    pool_of,
    publication,
    request,
    seen,
)


def servers_of(count: int, script: Script | None = None, timeout_s: float = 60) -> list[ScriptedServer]:
    return [
        ScriptedServer(script or (lambda _: [4]), vocab_size=VOCAB, url=f"scripted://{n}", timeout_s=timeout_s)
        for n in range(count)
    ]


class Files:
    """Weights that servers load from a directory."""

    def weights(self, version: int) -> Publication | WeightFeed:
        return publication(version)

    def step(self) -> None:
        """Train on: the weights differ from those that servers got."""


class Memory(Files):
    """Weights that a trainer sends from its memory."""

    def __init__(self) -> None:
        self.channel = ScriptedChannel()

    def weights(self, version: int) -> Publication | WeightFeed:
        return WeightFeed(version=version, channel=self.channel)

    def step(self) -> None:
        self.channel.published_version = None


both_ways = pytest.mark.parametrize("way", [Files, Memory])
each_call = pytest.mark.parametrize(
    ("way", "call"),
    [
        *((Files, call) for call in ("pause", "load_weights", "checksums", "resume")),
        *((Memory, call) for call in ("join_group", "pause", "receive_weights", "checksums", "resume")),
    ],
)


async def test_all_servers_get_the_weights_and_the_probe_agrees() -> None:
    servers = servers_of(3)
    ids = np.array([1, 5, 9, 2], np.int32)
    async with pool_of(*servers) as pool:
        began = anyio.current_time()
        report = await pool.update_weights(publication(1), Probe(token_ids=ids, logprobs=scripted_logprobs(ids, version=1)))
        took_s = anyio.current_time() - began
        assert pool.policy_version == 1
    assert report.updated == ("scripted://0", "scripted://1", "scripted://2")
    assert (report.version, report.evicted, report.probe_difference) == (1, (), 0.0)
    assert 0 <= report.pause_s <= took_s
    assert [server.version for server in servers] == [1, 1, 1]
    assert not any(server.paused for server in servers)


async def test_no_server_continues_before_all_have_the_weights() -> None:
    holds = [Hold(at=2), Hold(at=2)]
    servers = servers_of(2, lambda call: ScriptedReply(output=range(4), holds=(holds[int(call.episode_id)],)))
    generations: list[Generation] = []
    async with pool_of(*servers) as pool:

        async def call(episode: str) -> None:
            generations.append(await pool.generate(request(episode=episode)))

        with anyio.fail_after(300):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(call, "0")
                tasks.start_soon(call, "1")
                for hold in holds:
                    await hold.reached.wait()
                await pool.update_weights(publication(1))
                assert generations == []
                for hold in holds:
                    hold.release.set()
    for generation in generations:
        assert [(span.start, span.end, span.version) for span in generation.spans] == [(0, 2, 0), (2, 4, 1)]


@pytest.mark.parametrize("fault", [Fault.REFUSE, Fault.HANG, Fault.BAD_REQUEST])
@each_call
async def test_a_server_that_fails_an_update_is_left_out_and_comes_back(
    way: type[Files], call: ControlCall, fault: Fault
) -> None:
    servers, source = servers_of(3, timeout_s=0.05), way()
    async with pool_of(*servers) as pool:
        servers[1].control_faults[call] = fault
        with anyio.fail_after(300):
            report = await pool.update_weights(source.weights(1))
            assert report.updated == ("scripted://0", "scripted://2")
            assert report.evicted == ("scripted://1",)
            assert pool.policy_version == 1
            assert not servers[0].paused
            assert not servers[2].paused
            servers[1].control_faults.clear()
            await all_serving(pool)
        assert servers[1].version == 1
        assert not servers[1].paused
        if isinstance(source, Memory):  # it returns through a new group
            assert len(servers[0].groups.joined) == 1
            assert len(servers[1].groups.joined) == (1 if call == "join_group" else 2)
            assert source.channel.sendings[-1].groups == (servers[1].groups.joined[-1].name,)


@each_call
async def test_by_policy_one_failing_server_is_a_weight_sync_error_and_all_continue(
    way: type[Files], call: ControlCall
) -> None:
    servers, source = servers_of(2), way()
    async with pool_of(*servers, on_server_failure="stop") as pool:
        servers[1].control_faults[call] = Fault.REFUSE
        with pytest.raises(WeightSyncError, match=r"not every server holds version 1: scripted://1"):
            await pool.update_weights(source.weights(1))
        assert not any(server.paused for server in servers)
    if isinstance(source, Memory):
        assert all(sending.abandoned is not None for sending in source.channel.sendings)


async def test_when_every_server_fails_the_error_names_each() -> None:
    servers = servers_of(2)
    async with pool_of(*servers) as pool:
        for server in servers:
            server.control_faults["load_weights"] = Fault.BAD_REQUEST
        with pytest.raises(WeightSyncError, match=r"no server holds version 1: scripted://0: .*; scripted://1: "):
            await pool.update_weights(publication(1))
        assert not any(server.paused for server in servers)
        assert pool.policy_version == 0


@pytest.mark.parametrize(("way", "where"), [(Files, "weights): w"), (Memory, "the trainer's memory): steps_applied")])
async def test_other_tensors_than_published_are_found(way: type[Files], where: str) -> None:
    servers = servers_of(2)
    async with pool_of(*servers) as pool:
        servers[0].control_faults["checksums"] = Fault.WRONG_WEIGHTS
        report = await pool.update_weights(way().weights(1))
        assert report.evicted == ("scripted://0",)
        reason = pool.describe().servers[0].reason
    assert f"1 of 1 tensors differ from the published weights ({where}" in reason


class Reporting(ScriptedServer):
    """Reports other names of tensors than it took."""

    tensors: Callable[[Mapping[str, str]], Mapping[str, str]] = dict

    async def checksums(self) -> Mapping[str, str]:
        return self.tensors(await super().checksums())


def none_of(found: Mapping[str, str]) -> Mapping[str, str]:
    del found
    return {}


def one_more(found: Mapping[str, str]) -> Mapping[str, str]:
    return {**found, "extra": "00"}


@pytest.mark.parametrize(("tensors", "differing"), [(none_of, "1 of 1 .*: w"), (one_more, "1 of 2 .*: extra")])
async def test_a_server_that_lacks_a_tensor_or_has_one_more_is_found(
    tensors: Callable[[Mapping[str, str]], Mapping[str, str]], differing: str
) -> None:
    server = Reporting(lambda _: [4], vocab_size=VOCAB, url="scripted://0")
    async with pool_of(server) as pool:
        await pool.update_weights(publication(1))
        server.tensors = tensors
        with pytest.raises(WeightSyncError, match=f"after the update to version 2, {differing}"):
            await pool.update_weights(publication(2))


async def test_the_only_server_that_takes_the_version_and_keeps_its_weights_is_found() -> None:
    [only] = opaque_servers(1)
    async with pool_of(only) as pool:
        await pool.update_weights(publication(1))
        only.stale = True
        with pytest.raises(WeightSyncError, match="scripted://0: took version 2, but its digests are those of version 1"):
            await pool.update_weights(publication(2))


@both_ways
async def test_of_two_servers_only_the_one_that_keeps_its_weights_is_left_out(way: type[Files]) -> None:
    (stale, sound), source = opaque_servers(2), way()
    async with pool_of(stale, sound, health_interval_s=60) as pool:
        await pool.update_weights(source.weights(1))
        stale.stale = True
        report = await pool.update_weights(source.weights(2))
        assert (report.updated, report.evicted) == (("scripted://1",), ("scripted://0",))
        assert "its digests are those of version 1" in pool.describe().servers[0].reason


async def test_a_server_that_caught_up_and_keeps_its_weights_is_found_at_the_next_update() -> None:
    first, second = opaque_servers(2)
    async with pool_of(first, second) as pool:
        await pool.update_weights(publication(1))
        second.die()
        pool.report_dead("scripted://1", "killed")
        await pool.update_weights(publication(2))
        second.revive()
        await all_serving(pool)
        second.stale = True
        report = await pool.update_weights(publication(3))
        assert report.evicted == ("scripted://1",)


async def test_digests_need_not_change_where_the_weights_have_not() -> None:
    [only] = opaque_servers(1)
    async with pool_of(only) as pool:
        for version in (1, 2):
            same = Publication(version=version, path="weights", checksum="", tensor_checksums={"w": "unchanged"})
            report = await pool.update_weights(same)
            assert report.updated == ("scripted://0",)


@pytest.mark.parametrize(("change", "fails"), [(1e-6, False), (0.1, True)])
async def test_digests_need_not_change_where_the_weights_are_equal_as_bfloat16(
    tmp_path: Path, change: float, fails: bool
) -> None:
    [only] = opaque_servers(1)
    async with pool_of(only) as pool:
        for version in (1, 2):
            tensors = {"w": RawTensor.of(np.array([1 + change * version], np.float32))}
            published = publish(tensors, version=version, directory=tmp_path, source=None)
            if version == 2 and fails:
                with pytest.raises(WeightSyncError, match="its digests are those of version 1"):
                    await pool.update_weights(published)
            else:
                await pool.update_weights(published)
            only.stale = True


async def test_a_probe_that_differs_stops_the_update_with_the_figures() -> None:
    servers = servers_of(2)
    ids = np.array([1, 5, 9, 2], np.int32)
    async with pool_of(*servers) as pool:
        servers[1].control_faults["score"] = Fault.WRONG_WEIGHTS
        with pytest.raises(WeightSyncError, match=r"scripted://1: with version 1, .* differ .* by 0\.5 nats at most"):
            await pool.update_weights(publication(1), Probe(token_ids=ids, logprobs=scripted_logprobs(ids, version=1)))
        assert not any(server.paused for server in servers)


async def test_a_probe_judges_the_largest_difference_of_any_token() -> None:
    [server], ids = servers_of(1), np.array([1, 5, 9, 2, 4, 4], np.int32)
    for changed, fails in ((0.15, False), (0.25, True)):
        logprobs = scripted_logprobs(ids, version=1)
        logprobs[2] += changed
        probe = Probe(token_ids=ids, logprobs=logprobs, tolerance=LogprobTolerance(largest=0.2))
        async with pool_of(server) as pool:
            if fails:
                with pytest.raises(WeightSyncError, match=r"by 0\.25 nats at most, over 0\.2:"):
                    await pool.update_weights(publication(1), probe)
            else:
                report = await pool.update_weights(publication(1), probe)
                assert report.probe_difference == pytest.approx(changed)


async def test_servers_whose_digests_only_one_another_can_confirm_do_not_serve_a_version_on_which_they_differ() -> None:
    first, stale = opaque_servers(2)
    stale.stale = True
    async with pool_of(first, stale) as pool:
        with pytest.raises(WeightSyncError, match="1 of 1 tensors differ from scripted://"):
            await pool.update_weights(publication(1))
        assert pool.policy_version == 0
        assert pool.serving == ()


async def test_a_server_that_was_taken_out_serves_again_only_after_a_restart() -> None:
    async with pool_of(*servers_of(2)) as pool:
        pool.take_out("scripted://1", "its log-probs are wrong")
        pool.report_dead("scripted://1", "it gave no answer")
        assert (await pool.update_weights(publication(1))).updated == ("scripted://0",)
        _, wrong = pool.describe().servers
        assert (wrong.state, wrong.reason) == (State.WRONG, "its log-probs are wrong")
        pool.report_dead("scripted://1", "its process ended", starting=True)
        pool.report_started("scripted://1")
        await all_serving(pool)


async def test_updates_asked_for_at_once_run_one_after_the_other() -> None:
    servers = servers_of(2)
    hold = anyio.Event()
    done: list[int] = []
    async with pool_of(*servers, control_timeout_s=60, health_interval_s=60) as pool, anyio.create_task_group() as tasks:

        async def update(version: int) -> None:
            done.append((await pool.update_weights(publication(version))).version)
            hold.set()

        servers[0].control_faults["load_weights"] = Fault.HANG
        tasks.start_soon(update, 1)
        while not pool.describe().updating:
            await anyio.lowlevel.checkpoint()
        tasks.start_soon(update, 2)
        await anyio.wait_all_tasks_blocked()
        assert done == []
        servers[0].die("frozen for good")
        await hold.wait()
    assert done == [1, 2]
    assert [update.version for update in servers[1].updates] == [1, 2]


async def test_weights_never_go_back() -> None:
    async with pool_of(*servers_of(1)) as pool:
        await pool.update_weights(publication(2))
        with pytest.raises(WeightSyncError, match="version 1 is older than the servers' version 2"):
            await pool.update_weights(publication(1))


@each_call
async def test_a_cancelled_update_continues_every_server_and_the_next_one_works(way: type[Files], call: ControlCall) -> None:
    servers, source = servers_of(2), way()
    async with pool_of(*servers, control_timeout_s=60) as pool:
        servers[1].control_faults[call] = Fault.HANG
        with anyio.fail_after(300):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(pool.update_weights, source.weights(1))
                await anyio.wait_all_tasks_blocked()  # all that is left to wait for is the call that hangs
                tasks.cancel_scope.cancel()
            assert tasks.cancel_scope.cancelled_caught
            if isinstance(source, Memory):
                assert all(sending.abandoned is not None for sending in source.channel.sendings)
            assert not servers[0].paused
            servers[1].control_faults.clear()
            assert not servers[1].paused
            assert not pool.describe().updating
            report = await pool.update_weights(source.weights(2))
            assert pool.policy_version == 2
            assert "scripted://0" in report.updated
            await all_serving(pool)
        assert [server.version for server in servers] == [2, 2]


async def test_a_cancelled_update_that_reached_one_server_goes_on_with_the_new_weights() -> None:
    servers = servers_of(2)
    async with pool_of(*servers, control_timeout_s=60) as pool:
        servers[1].control_faults["load_weights"] = Fault.HANG
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pool.update_weights, publication(1))
            await anyio.wait_all_tasks_blocked()  # the first server has the weights; only the second is waited for
            tasks.cancel_scope.cancel()
        assert pool.policy_version == 1
        servers[1].control_faults.clear()
        await all_serving(pool)
        assert servers[1].version == 1
        assert (await pool.generate(request())).spans[0].version == 1


async def test_calls_made_during_an_update_are_sampled_with_the_new_weights() -> None:
    servers = servers_of(2)
    results: list[Generation] = []
    async with pool_of(*servers) as pool:

        async def call(index: int) -> None:
            results.append(await pool.generate(request(episode=str(index))))

        await servers[0].pause("retract")
        await servers[1].pause("retract")
        async with anyio.create_task_group() as tasks:
            for index in range(20):
                tasks.start_soon(call, index)
            tasks.start_soon(pool.update_weights, publication(1))
    assert [generation.spans[0].version for generation in results] == [1] * 20


def test_an_update_with_no_server_left_says_why() -> None:
    async def main() -> None:
        servers = servers_of(1)
        async with pool_of(*servers) as pool:
            servers[0].die("gone")
            with pytest.raises(ServerUnavailable):
                await pool.generate(request())
            with pytest.raises(WeightSyncError, match=r"no server to give version 1: scripted://0 is dead: .*gone"):
                await pool.update_weights(publication(1))

    in_virtual_time(main)


async def test_an_update_waits_for_the_only_server_while_it_is_being_started_again() -> None:
    [only] = servers_of(1)
    reports: list[UpdateReport] = []
    generations: list[Generation] = []
    async with pool_of(only, health_interval_s=60) as pool:
        pool.report_kept("scripted://0")
        only.die("gone")
        pool.report_dead("scripted://0", "signal SIGKILL", starting=True)

        async def update() -> None:
            reports.append(await pool.update_weights(publication(1)))

        async def call() -> None:
            generations.append(await pool.generate(request()))

        with anyio.fail_after(300):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(update)
                tasks.start_soon(call)
                await others_ran()
                assert (reports, generations) == ([], [])
                only.revive()
                pool.report_started("scripted://0")
        assert [report.updated for report in reports] == [("scripted://0",)]
        assert [generation.spans[0].version for generation in generations] == [1]
        assert [update.version for update in only.updates] == [1]


@pytest.mark.parametrize("call", ["pause", "load_weights", "checksums", "resume"])
async def test_an_update_that_loses_the_only_server_is_made_again_when_it_was_started_again(call: ControlCall) -> None:
    [only] = servers_of(1)
    reports: list[UpdateReport] = []
    async with pool_of(only) as pool:
        pool.report_kept("scripted://0")
        only.control_faults[call] = Fault.HANG

        async def update() -> None:
            reports.append(await pool.update_weights(publication(1)))

        with anyio.fail_after(300):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(update)
                await seen(pool, lambda status: status.updating)
                only.die()
                pool.report_dead("scripted://0", "signal SIGKILL", starting=True)
                await seen(pool, lambda status: not status.updating)
                await others_ran()
                assert (reports, pool.describe().servers[0].state) == ([], State.STARTING)
                only.control_faults.clear()
                only.revive()
                pool.report_started("scripted://0")
        assert [report.updated for report in reports] == [("scripted://0",)]
        assert (pool.policy_version, only.version, only.paused) == (1, 1, False)


async def test_a_server_that_ends_while_others_still_load_is_left_out_of_the_update() -> None:
    slow, quick = servers_of(2)
    loading = slow.control_holds["load_weights"] = Hold()
    reports: list[UpdateReport] = []
    async with pool_of(slow, quick) as pool:
        pool.report_kept("scripted://1")

        async def update() -> None:
            reports.append(await pool.update_weights(publication(1)))

        with anyio.fail_after(300):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(update)
                await loading.reached.wait()
                await seen(pool, lambda _: quick.version == 1)
                pool.report_dead("scripted://1", "signal SIGKILL", starting=True)
                quick.revive(version=0)
                pool.report_started("scripted://1")
                loading.release.set()
            assert [(report.updated, report.evicted) for report in reports] == [(("scripted://0",), ("scripted://1",))]
            await all_serving(pool)
        assert (slow.version, quick.version) == (1, 1)


async def test_the_only_server_may_end_after_it_has_loaded() -> None:
    [only] = servers_of(1)
    held = only.control_holds["checksums"] = Hold()
    reports: list[UpdateReport] = []
    async with pool_of(only) as pool:
        pool.report_kept("scripted://0")

        async def update() -> None:
            reports.append(await pool.update_weights(publication(1)))

        with anyio.fail_after(300):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(update)
                await held.reached.wait()
                pool.report_dead("scripted://0", "signal SIGKILL", starting=True)
                only.revive()
                held.release.set()
                await seen(pool, lambda status: not status.updating)
                pool.report_started("scripted://0")
        assert [report.updated for report in reports] == [("scripted://0",)]
        assert [update.version for update in only.updates] == [1, 1]


def test_a_server_that_is_started_again_and_does_not_answer_is_dead() -> None:
    async def main() -> None:
        [only] = servers_of(1)
        async with pool_of(only) as pool:
            pool.report_kept("scripted://0")
            only.die("gone")
            pool.report_dead("scripted://0", "signal SIGKILL", starting=True)
            pool.report_started("scripted://0")
            with pytest.raises(WeightSyncError, match=r"version 1: scripted://0 is dead: .*gone"):
                await pool.update_weights(publication(1))

    in_virtual_time(main)


async def test_an_update_does_not_wait_for_a_server_that_is_not_started_again() -> None:
    [only] = servers_of(1)
    async with pool_of(only) as pool:
        pool.report_kept("scripted://0")
        pool.report_dead("scripted://0", "signal SIGKILL", starting=True)
        only.die("gone")

        async def give_up() -> None:
            await others_ran()
            pool.report_dead("scripted://0", "could not be started again: no memory")

        with anyio.fail_after(300):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(give_up)
                with pytest.raises(WeightSyncError, match=r"version 1: scripted://0 is dead: could not be started again"):
                    await pool.update_weights(publication(1))


async def test_a_server_that_starts_behind_the_others_waits_for_the_next_update() -> None:
    ahead, behind = servers_of(2)
    ahead.revive(version=2)
    async with pool_of(ahead, behind) as pool:
        assert pool.policy_version == 2
        assert "has version 0" in pool.describe().servers[1].reason
        report = await pool.update_weights(publication(3))
    assert set(report.updated) == {"scripted://0", "scripted://1"}


@both_ways
async def test_versions_never_go_back_along_an_episode_whatever_dies(way: type[Files]) -> None:
    servers, source = servers_of(3), way()
    async with pool_of(*servers, request_retries=20) as pool:

        async def update(version: int) -> None:
            source.step()
            await pool.update_weights(source.weights(version))

        await outlive(servers, pool, update)


def test_an_update_that_loses_its_last_server_waits_for_one_that_others_run() -> None:
    async def main() -> None:
        back, lost = servers_of(2)
        async with pool_of(back, lost, health_interval_s=1.0, control_timeout_s=30.0) as pool:
            back.die("restarted by its owner")
            await seen(pool, lambda status: status.servers[0].state is State.DEAD)
            held = lost.control_holds["load_weights"] = Hold()
            reports: list[UpdateReport] = []

            async def update() -> None:
                reports.append(await pool.update_weights(publication(1)))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(update)
                await held.reached.wait()
                lost.die("gone")
                held.release.set()
                await anyio.sleep(10)
                assert not reports
                back.revive()
            assert [report.updated for report in reports] == [("scripted://0",)]

    in_virtual_time(main)


def test_an_update_waits_no_longer_than_a_control_call_for_servers_that_others_run() -> None:
    async def main() -> None:
        [only] = servers_of(1)
        async with pool_of(only, health_interval_s=1.0, control_timeout_s=30.0) as pool:
            only.die("gone")
            began = anyio.current_time()
            with pytest.raises(WeightSyncError, match=r"none answered again within inference.control_timeout_s = 30"):
                await pool.update_weights(publication(1))
            assert 30 <= anyio.current_time() - began <= 40

    in_virtual_time(main)
