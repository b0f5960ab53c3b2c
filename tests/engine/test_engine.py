"""A run as a whole: what is trained, recorded and reported."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import anyio
import pytest

from agentrl.client import Client
from agentrl.engine.parts import RunState
from agentrl.errors import ConfigError, NothingLearned, TrainError, WeightSyncError
from agentrl.servers.scripted.server import Fault, ScriptedCall, ScriptedReply, ScriptedServer
from agentrl.tokens.renderer import Renderer
from agentrl.trainer.base import StepReport, TrainBatch
from agentrl.trainer.scripted import ScriptedTrainer
from agentrl.types import Task
from agentrl.workflow import RolloutWorkflow
from tests.engine.harness import TASKS, balance, coin, episodes, lines, make_engine, run
from tests.rollout.harness import PATIENCE_S, ask, make_server, says


async def test_a_run_trains_publishes_and_reports_every_step(tmp_path: Path, renderer: Renderer) -> None:
    trainer, server = ScriptedTrainer(), make_server(renderer, coin)
    report = await run(make_engine(tmp_path, renderer, trainer=trainer, inference=server, steps=4))
    assert (report.train_steps, report.policy_version, report.groups) == (4, 5, 8)
    assert [publication.version for publication in server.updates] == [1, 2, 3, 4, 5]
    assert [batch.policy_version for batch in trainer.batches] == [1, 2, 3, 4]
    assert report.max_trained_staleness <= report.max_staleness == 2
    assert report.checkpoint == str(tmp_path / "checkpoints" / "step-000004")
    assert balance(report) == 0
    steps = lines(tmp_path / "metrics.jsonl", "step")
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert all(line["episodes"] == 6 and 0 <= line["success_rate"] <= 1 for line in steps)
    [end] = lines(tmp_path / "metrics.jsonl", "end")
    assert (end["error"], end["train_steps"]) == (None, 4)


async def test_every_episode_of_a_run_is_on_disk_and_every_group_is_trained_once(tmp_path: Path, renderer: Renderer) -> None:
    trainer = ScriptedTrainer()
    await run(make_engine(tmp_path, renderer, trainer=trainer, steps=5))
    recorded = episodes(tmp_path)
    assert Counter(record["group"] for record in recorded) == dict.fromkeys(range(10), 3)
    assert len({record["episode_id"] for record in recorded}) == 30
    trained = sum(len(batch.samples) for batch in trainer.batches)
    assert trained == 30
    assert all(record["turns"][0]["spans"][-1][1] == len(record["turns"][0]["output_ids"]) for record in recorded)


class SynchronousPolicy:
    """A server whose answers show their version, and that notices calls made while the trainer works."""

    def __init__(self) -> None:
        self.tasks_by_version: dict[int, Counter[str]] = {}
        self.training = False
        self.calls_while_training = 0

    def script(self, call: ScriptedCall) -> ScriptedReply:
        self.calls_while_training += self.training
        group = call.episode_id.split(".")[0]
        self.tasks_by_version.setdefault(call.version, Counter())[group] += 1
        return ScriptedReply(output=coin(call))


async def test_a_bound_of_zero_is_synchronous_training(tmp_path: Path, renderer: Renderer) -> None:
    policy = SynchronousPolicy()

    class Watching(ScriptedTrainer):
        async def step(self, batch: TrainBatch) -> StepReport:
            policy.training = True
            report = await super().step(batch)
            await anyio.wait_all_tasks_blocked()
            policy.training = False
            return report

    trainer = Watching()
    engine = make_engine(
        tmp_path,
        renderer,
        trainer=trainer,
        inference=make_server(renderer, policy.script),
        steps=4,
        algorithm={"max_staleness": 0},
    )
    report = await run(engine)
    assert policy.calls_while_training == 0
    assert report.max_trained_staleness == 0
    # Batch n is exactly groups 2n and 2n+1, all sampled by version n+1: what a plain loop of rollout and training does.
    assert policy.tasks_by_version == {n + 1: Counter({str(2 * n): 3, str(2 * n + 1): 3}) for n in range(4)}
    for version, batch in enumerate(trainer.batches, start=1):
        assert {int(v) for item in batch.samples for v in item.sample.token_versions if v >= 0} == {version}


async def test_rollouts_go_on_while_the_trainer_trains_and_saves(tmp_path: Path, renderer: Renderer) -> None:
    hold = anyio.Event()
    trainer = ScriptedTrainer(hold_steps={0: hold})
    server = make_server(renderer, coin)
    engine = make_engine(tmp_path, renderer, trainer=trainer, inference=server, algorithm={"max_staleness": 2})
    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.run)
            await trainer.started.wait()
            await anyio.wait_all_tasks_blocked()
            # At version 0 six groups may be open or in training, of three episodes each.
            assert len(server.calls) == 18
            hold.set()
    assert engine.report().train_steps == 4


async def test_a_batch_without_variance_is_skipped_and_the_run_goes_on(tmp_path: Path, renderer: Renderer) -> None:
    trainer = ScriptedTrainer()
    engine = make_engine(tmp_path, renderer, trainer=trainer, inference=make_server(renderer, says("good")), steps=3)
    report = await run(engine)
    assert (report.train_steps, report.policy_version, report.zero_variance_groups) == (3, 4, 6)
    assert report.skipped_steps == {"zero_variance": 3}
    assert [batch.samples for batch in trainer.batches] == [(), (), ()], "the schedule moves on and nothing is trained"
    assert report.trained_tokens == 0
    assert balance(report) == 0
    assert lines(tmp_path / "metrics.jsonl", "step")[0]["skipped"] == "zero_variance"


async def test_a_run_that_trains_nothing_ends_with_the_reason_and_its_last_weights(
    tmp_path: Path, renderer: Renderer, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(
        tmp_path, renderer, inference=make_server(renderer, says("bad")), steps=9, engine={"stop_after_skipped": 3}
    )
    with pytest.raises(NothingLearned, match=r"the last 3 steps trained nothing .*2 of 2 groups have equal returns; every"):
        await run(engine)
    assert engine.report().checkpoint == str(tmp_path / "checkpoints" / "step-000003")
    assert [record.levelname for record in caplog.records if "step 1 trained nothing" in record.message] == ["WARNING"]
    assert lines(tmp_path / "metrics.jsonl", "step")[-1]["signal_share"] == 0


async def test_skipped_steps_apart_do_not_end_a_run(tmp_path: Path, renderer: Renderer) -> None:
    trainer = ScriptedTrainer(skip_steps={0, 2, 4})
    report = await run(make_engine(tmp_path, renderer, trainer=trainer, steps=6, engine={"stop_after_skipped": 2}))
    assert (report.train_steps, report.skipped_steps) == (6, {"scripted": 3})


async def test_a_step_the_trainer_skips_is_counted(tmp_path: Path, renderer: Renderer) -> None:
    report = await run(make_engine(tmp_path, renderer, trainer=ScriptedTrainer(skip_steps={1})))
    assert report.skipped_steps == {"scripted": 1}
    assert balance(report) == 0


async def test_evaluation_runs_beside_training_and_names_the_versions_it_saw(tmp_path: Path, renderer: Renderer) -> None:
    held_out = [Task(id=f"h{i}", data={"question": "Say good.", "answer": "good"}) for i in range(4)]
    engine = make_engine(tmp_path, renderer, steps=6, eval_tasks=held_out, engine={"eval_every": 2, "eval_episodes": 5})
    report = await run(engine)
    events = lines(tmp_path / "metrics.jsonl", "evaluation")
    skipped = lines(tmp_path / "metrics.jsonl", "evaluation_skipped")
    assert len(events) + len(skipped) == 3
    assert len(report.evaluations) == len(events) >= 1
    for event in events:
        assert event["episodes"] == 5
        assert event["step"] + 1 <= event["min_version"] <= event["max_version"] <= 7
    recorded = [r for r in episodes(tmp_path) if r["purpose"] == "evaluation"]
    assert {r["task_id"] for r in recorded} == {"h0", "h1", "h2", "h3"}
    assert report.evaluation_tokens > 0
    assert balance(report) == 0


async def test_checkpoints_are_saved_when_due_and_only_the_newest_stay(tmp_path: Path, renderer: Renderer) -> None:
    trainer = ScriptedTrainer()
    engine = make_engine(tmp_path, renderer, trainer=trainer, steps=7, engine={"checkpoint_every": 2, "keep_checkpoints": 2})
    await run(engine)
    assert [Path(path).name for path in trainer.saved] == ["step-000002", "step-000004", "step-000006", "step-000007"]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-000006", "step-000007"]
    assert len(list((tmp_path / "weights").iterdir())) == 2


async def test_a_failing_trainer_ends_the_run_with_its_error(tmp_path: Path, renderer: Renderer) -> None:
    engine = make_engine(tmp_path, renderer, trainer=ScriptedTrainer(fail_steps={2}))
    with pytest.raises(TrainError, match="step 2"):
        await run(engine)
    assert engine.report().train_steps == 2
    [end] = lines(tmp_path / "metrics.jsonl", "end")
    assert end["error"].startswith("TrainError: step 2")


async def test_servers_whose_probe_differs_end_the_run(tmp_path: Path, renderer: Renderer) -> None:
    server = make_server(renderer, coin)
    server.control_faults["score"] = Fault.WRONG_WEIGHTS
    with pytest.raises(WeightSyncError, match="probe"):
        await run(make_engine(tmp_path, renderer, inference=server, engine={"probe_tolerance": 1e-3}))


async def test_a_run_without_tasks_or_with_equal_ids_does_not_start(tmp_path: Path, renderer: Renderer) -> None:
    with pytest.raises(ConfigError, match="no tasks"):
        make_engine(tmp_path, renderer, tasks=[])
    with pytest.raises(ConfigError, match="2 tasks have the id 't0'"):
        make_engine(tmp_path, renderer, tasks=[*TASKS, TASKS[0]])


class Recording(RolloutWorkflow):
    """Records metrics and rewards a turn."""

    async def run(self, task: Task, client: Client) -> float:
        completion = await client.chat.completions.create(messages=[{"role": "user", "content": "hello"}])
        client.reward(completion, -0.25)
        client.record(busy=1.0, success=0.0)
        return float(await ask(client, "again") == "good")


async def test_metrics_of_the_workflow_and_rewards_of_turns_reach_the_step(tmp_path: Path, renderer: Renderer) -> None:
    await run(make_engine(tmp_path, renderer, workflow=Recording(), steps=1))
    [step] = lines(tmp_path / "metrics.jsonl", "step")
    assert (step["workflow.busy"], step["success_rate"], step["turns_mean"]) == (1.0, 0.0, 2.0)
    [first, *_] = episodes(tmp_path)
    assert first["turns"][0]["reward"] == -0.25


async def test_a_resumed_run_goes_on_with_the_steps_versions_and_tasks_that_are_left(
    tmp_path: Path, renderer: Renderer
) -> None:
    whole = make_server(renderer, coin)
    await run(make_engine(tmp_path / "whole", renderer, inference=whole, algorithm={"max_staleness": 0}))

    first, trainer = make_server(renderer, coin), ScriptedTrainer()
    engine = make_engine(
        tmp_path / "run", renderer, trainer=trainer, inference=first, steps=2, algorithm={"max_staleness": 0}
    )
    await run(engine)
    state = RunState.from_note(trainer.notes[-1], where="here")
    assert (state.step, state.policy_version, state.groups_admitted, state.groups_open) == (2, 3, 4, ())

    second = make_server(renderer, coin)
    resumed = make_engine(tmp_path / "run", renderer, inference=second, algorithm={"max_staleness": 0}, resume=state)
    report = await run(resumed)
    assert (report.train_steps, report.resumed_from_step, report.policy_version) == (4, 2, 5)
    steps = lines(tmp_path / "run" / "metrics.jsonl", "step")
    assert [(line["step"], line["policy_version"]) for line in steps] == [(1, 1), (2, 2), (3, 3), (4, 4)]
    assert [line["step"] for line in lines(tmp_path / "run" / "metrics.jsonl", "resumed")] == [2]

    def trained(server: ScriptedServer) -> list[str]:
        return sorted(call.episode_id for call in server.calls)

    assert trained(whole) == sorted(trained(first) + trained(second)), "each episode once, and the same as without a stop"


async def test_groups_that_were_open_at_the_checkpoint_are_opened_again_under_their_numbers(
    tmp_path: Path, renderer: Renderer
) -> None:
    server = make_server(renderer, coin)
    state = RunState(step=3, policy_version=3, groups_admitted=9, groups_open=(5, 7))
    await run(make_engine(tmp_path, renderer, inference=server, resume=state, algorithm={"max_staleness": 0}))
    assert {line["group"] for line in episodes(tmp_path)} == {5, 7}


async def test_servers_ahead_of_the_checkpoint_get_a_version_they_never_had(tmp_path: Path, renderer: Renderer) -> None:
    server = make_server(renderer, coin)
    await run(make_engine(tmp_path / "first", renderer, inference=server, steps=3))
    assert server.policy_version == 4
    state = RunState(step=1, policy_version=2, groups_admitted=2, groups_open=())
    report = await run(make_engine(tmp_path / "again", renderer, inference=server, steps=2, resume=state))
    assert report.policy_version == 6


def test_a_checkpoint_with_nothing_left_to_do_cannot_be_resumed(tmp_path: Path, renderer: Renderer) -> None:
    state = RunState(step=4, policy_version=4, groups_admitted=8, groups_open=())
    with pytest.raises(ConfigError, match=r"engine\.steps: 4, but the checkpoint has done 4 steps"):
        make_engine(tmp_path, renderer, resume=state)
