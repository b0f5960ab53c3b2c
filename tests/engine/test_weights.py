"""How the loop hands weights over: through files, or from the trainer's memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import anyio
import pytest

from agentrl.errors import WeightSyncError
from agentrl.inference.config import InferenceConfig
from agentrl.inference.pool.members import State
from agentrl.inference.pool.pool import ServerPool
from agentrl.servers.scripted.script import Fault, Script, ScriptedCall
from agentrl.servers.scripted.server import ScriptedServer
from agentrl.tokens.renderer import Renderer
from agentrl.trainer.base import StepReport, TrainBatch
from agentrl.trainer.scripted import ScriptedTrainer
from tests.engine.harness import coin, episodes, lines, make_engine, run
from tests.support.scripted import seen


def pool_of(*servers: ScriptedServer, **changes: object) -> ServerPool:
    return ServerPool(servers, InferenceConfig.model_validate({"health_interval_s": 0.2, **changes}))


def two_servers(renderer: Renderer, script: Script = coin) -> list[ScriptedServer]:
    [eos] = renderer.eos_ids
    return [
        ScriptedServer(
            script, vocab_size=renderer.vocab_size, encode=renderer.encode_content, eos_id=eos, url=f"scripted://{n}"
        )
        for n in range(2)
    ]


async def test_from_memory_every_version_reaches_every_server_and_no_files_are_written_for_them(
    tmp_path: Path, renderer: Renderer
) -> None:
    trainer, servers = ScriptedTrainer(), two_servers(renderer)
    async with pool_of(*servers) as pool:
        report = await run(make_engine(tmp_path, renderer, trainer=trainer, inference=pool, steps=3, send_dtype="bfloat16"))
    assert (report.train_steps, report.policy_version) == (3, 4)
    for server in servers:
        assert [manifest.version for manifest in server.groups.received] == [1, 2, 3, 4]
        assert server.updates == []
    assert trainer.publications == []
    assert not (tmp_path / "weights").exists()
    assert report.checkpoint == str(tmp_path / "checkpoints" / "step-000003")


@pytest.mark.parametrize("send_dtype", [None, "float32"])
async def test_what_an_update_cost_is_in_the_metrics(tmp_path: Path, renderer: Renderer, send_dtype: str | None) -> None:
    engine = make_engine(tmp_path, renderer, trainer=ScriptedTrainer(), steps=2, send_dtype=send_dtype)
    await run(engine)
    for line in lines(tmp_path / "metrics.jsonl", "step"):
        assert line["publish_s"] > 0
        assert line["update_s"] >= line["pause_s"] >= 0
        assert line["update_bytes"] >= 4
        assert 0 < line["sync_share"] < 1


def restart(pool: ServerPool, server: ScriptedServer) -> None:
    """Do what the launcher of a server does when its process is killed."""
    pool.report_kept(server.url)
    server.die()
    pool.report_dead(server.url, "signal SIGKILL", starting=True)
    server.revive()
    pool.report_started(server.url)


class SecondStep(ScriptedTrainer):
    """A trainer that says when its second step begins."""

    def __init__(self, *, hold_steps: Mapping[int, anyio.Event]) -> None:
        super().__init__(hold_steps=hold_steps)
        self.begun = anyio.Event()

    async def step(self, batch: TrainBatch) -> StepReport:
        if len(self.batches) == 1:
            self.begun.set()
        return await super().step(batch)


@pytest.mark.parametrize(("number", "lost"), [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("send_dtype", [None, "float32"])
async def test_a_run_outlives_the_loss_of_servers_during_a_step(
    tmp_path: Path, renderer: Renderer, send_dtype: str | None, number: int, lost: int
) -> None:
    trained = anyio.Event()
    trainer, servers = SecondStep(hold_steps={1: trained}), two_servers(renderer)[:number]
    victims = servers[:lost]
    async with pool_of(*servers) as pool:
        engine = make_engine(tmp_path, renderer, trainer=trainer, inference=pool, steps=4, send_dtype=send_dtype)

        async def lose() -> None:
            await trainer.begun.wait()
            for victim in victims:
                restart(pool, victim)
            settled = (State.SERVING,) if send_dtype is None else (State.SERVING, State.WAITING)
            await seen(pool, lambda status: all(server.state in settled for server in status.servers))
            trained.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lose)
            await run(engine)
    report = engine.report()
    assert (report.train_steps, report.failed_episodes, report.dropped_groups) == (4, {}, {})
    assert len({server.version for server in servers}) == 1


async def test_a_server_restarted_with_its_launch_weights_never_passes_for_the_first_version(
    tmp_path: Path, renderer: Renderer
) -> None:
    def script(call: ScriptedCall) -> str:
        if call.index == 2:
            servers[0].revive(version=0)  # a new process, with the weights it was started with
        return coin(call)

    servers = two_servers(renderer, script)
    async with pool_of(*servers, health_interval_s=60) as pool:
        await run(make_engine(tmp_path, renderer, inference=pool, steps=1))
    turns = [turn for line in episodes(tmp_path) for turn in line["turns"]]
    assert {version for turn in turns for _, _, version in turn["spans"]} == {1}
    assert [publication.version for publication in servers[0].updates] == [1, 1, 2]


async def test_a_step_whose_weights_reach_no_server_is_recorded_and_saved(tmp_path: Path, renderer: Renderer) -> None:
    [server, _] = two_servers(renderer)

    class Breaking(ScriptedTrainer):
        async def step(self, batch: TrainBatch) -> StepReport:
            if len(self.batches) == 1:
                server.control_faults["receive_weights"] = Fault.BAD_REQUEST
            return await super().step(batch)

    async with pool_of(server, on_server_failure="stop") as pool:
        with pytest.raises(WeightSyncError):
            await run(make_engine(tmp_path, renderer, trainer=Breaking(), inference=pool, steps=5, send_dtype="float32"))
    steps = lines(tmp_path / "metrics.jsonl", "step")
    assert [("update_s" in line, line["step"]) for line in steps] == [(True, 1), (False, 2)]
    assert (tmp_path / "checkpoints" / "step-000002").is_dir()
