"""Episodes in workers: the same trajectories as in this process, and what happens when one is cancelled or breaks.

The workers run in threads here, over socket pairs; tests/rollout/remote/test_processes.py has those of processes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import anyio
import numpy as np
import pytest

from agentrl.errors import ConfigError, InvariantError, ServerUnavailable, WorkflowError
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.episode import LocalRunner, PolicyRunner
from agentrl.rollout.remote.runner import RemoteRunner
from agentrl.servers.scripted.server import Fault, ScriptedCall, ScriptedReply
from agentrl.support.concurrency import task_group
from agentrl.tokens.renderer import Renderer
from agentrl.types import StopReason, Task, Trajectory, Turn
from tests.rollout.harness import PATIENCE_S, SAMPLING, make_server, says
from tests.support.remote import Ranked, StuckBackend, TwoTurns, remote_runner, threads


def make_runner(workflow: str, model: Path, *, workers: int = 1, rollout: RolloutConfig | None = None) -> RemoteRunner:
    return remote_runner(workflow, model, model / "logs", workers=workers, rollout=rollout, nodes=threads)


def seeded(call: ScriptedCall) -> ScriptedReply:
    """Answer by the seed and the episode of the call, so that another seed gives another trajectory."""
    return ScriptedReply(output="good" if call.turn else f"{call.episode_id} {call.sampling.seed}"[:6])


def task_of(act: str, **fields: object) -> Task:
    return Task(id=act, data={"act": act, **fields})


def ignore(turn: Turn) -> None:
    """Take a turn."""


def untimed(trajectory: Trajectory) -> dict[str, object]:
    """Return a trajectory without its times, as values that compare."""
    turns = [
        {
            **{name: getattr(turn, name) for name in Turn.__slots__ if not name.endswith("_s")},
            "context_ids": turn.context_ids.tolist(),
            "output_ids": turn.output_ids.tolist(),
            "output_logprobs": turn.output_logprobs.tolist(),
        }
        for turn in trajectory.turns
    ]
    return {**{name: getattr(trajectory, name) for name in Trajectory.__slots__ if not name.endswith("_s")}, "turns": turns}


async def test_an_episode_in_a_worker_is_that_of_this_process(model: Path, renderer: Renderer) -> None:
    rollout = RolloutConfig(episode_timeout_s=PATIENCE_S)
    tasks = [
        Task(id=f"t{number}", data={"question": f"Say good, {number}.", "answer": "good", "stream": number % 2 == 1})
        for number in range(6)
    ]
    local = LocalRunner(TwoTurns(), renderer=renderer, rollout=rollout, seed=7)
    remote = make_runner("TwoTurns", model, workers=2, rollout=rollout)
    assert await play_all(remote, tasks, renderer) == await play_all(local, tasks, renderer)


async def play_all(runner: PolicyRunner, tasks: Sequence[Task], renderer: Renderer) -> list[dict[str, object]]:
    """Play one episode of each task at once, and return their trajectories without times."""
    played: dict[str, Trajectory] = {}

    async def play(number: int, task: Task) -> None:
        turns: list[Turn] = []
        played[task.id] = await runner.play(task, episode_id=f"0.{number}.0", sampling=SAMPLING, on_turn=turns.append)
        assert [turn.output_ids.tolist() for turn in turns] == [turn.output_ids.tolist() for turn in played[task.id].turns]

    async with runner.opened(make_server(renderer, seeded)), task_group() as episodes:
        for number, task in enumerate(tasks):
            episodes.start_soon(play, number, task)
    assert all(played[task.id].failure is None and len(played[task.id].turns) == 2 for task in tasks)
    return [untimed(played[task.id]) for task in tasks]


async def test_times_of_a_worker_are_on_the_clock_of_the_driver(model: Path, renderer: Renderer) -> None:
    opening = time.perf_counter()
    async with (runner := make_runner("Acts", model)).opened(make_server(renderer, says("good"))):
        before = time.perf_counter()
        trajectory = await runner.play(task_of("none"), episode_id="0.0.0", sampling=SAMPLING, on_turn=ignore)
    [turn] = trajectory.turns
    times = [before, trajectory.started_s, turn.started_s, turn.ended_s, trajectory.ended_s, time.perf_counter()]
    off_s = before - opening  # at most: the clock of a worker on another node is off by the time of its first message
    assert all(early <= late + off_s for early, late in pairwise(map(float, filter(None, times))))


async def test_a_workflow_that_raises_is_a_failed_episode_with_its_place(model: Path, renderer: Renderer) -> None:
    async with (runner := make_runner("Acts", model)).opened(make_server(renderer, says("good"))):
        trajectory = await runner.play(task_of("raise"), episode_id="0.0.0", sampling=SAMPLING, on_turn=ignore)
    assert trajectory.stop_reason is StopReason.WORKFLOW_ERROR
    assert trajectory.failure is not None
    assert "ValueError: no such thing" in trajectory.failure.message
    assert "remote.py" in trajectory.failure.traceback
    assert len(trajectory.turns) == 1


async def test_an_error_that_ends_a_run_is_raised_by_the_runner(model: Path, renderer: Renderer) -> None:
    async with (runner := make_runner("Acts", model)).opened(make_server(renderer, says("good"))):
        with pytest.raises(InvariantError, match="rollout worker 0: the record is wrong"):
            await runner.play(task_of("break"), episode_id="0.0.0", sampling=SAMPLING, on_turn=ignore)


async def test_a_model_call_that_fails_fails_the_episode_as_here(model: Path, renderer: Renderer) -> None:
    def refuse(call: ScriptedCall) -> ScriptedReply:
        return ScriptedReply(fault=Fault.REFUSE)

    async with (runner := make_runner("Acts", model)).opened(make_server(renderer, refuse)):
        trajectory = await runner.play(task_of("none"), episode_id="0.0.0", sampling=SAMPLING, on_turn=ignore)
    assert trajectory.stop_reason is StopReason.SERVER_ERROR
    assert trajectory.failure is not None
    assert trajectory.failure.kind == ServerUnavailable.__name__
    assert trajectory.final_reward is None


async def test_a_stream_that_a_workflow_leaves_is_a_turn_of_what_it_gave(model: Path, renderer: Renderer) -> None:
    turns: list[Turn] = []
    async with (runner := make_runner("Acts", model)).opened(make_server(renderer, says("good enough"))):
        trajectory = await runner.play(task_of("leave"), episode_id="0.0.0", sampling=SAMPLING, on_turn=turns.append)
    whole, left = trajectory.turns
    assert trajectory.failure is None
    assert (whole.stop_reason, left.stop_reason) == (StopReason.LENGTH, StopReason.ABORT)
    assert left.output_ids.tolist() == whole.output_ids[: len(left.output_ids)].tolist()
    assert [turn.stop_reason for turn in turns] == [StopReason.LENGTH, StopReason.ABORT]


async def test_a_cancelled_episode_aborts_its_model_call(model: Path, renderer: Renderer) -> None:
    backend = StuckBackend(make_server(renderer, says("good")))
    with anyio.fail_after(PATIENCE_S):
        async with (runner := make_runner("Acts", model)).opened(backend):
            async with task_group() as episodes:
                play = partial(runner.play, task_of("none"), episode_id="0.0.0", sampling=SAMPLING, on_turn=ignore)
                episodes.start_soon(play)
                await backend.called.wait()
                episodes.cancel_scope.cancel()
            await backend.aborted.wait()


async def test_an_episode_over_its_deadline_is_a_failure(model: Path, renderer: Renderer) -> None:
    rollout = RolloutConfig(episode_timeout_s=0.2)
    async with (runner := make_runner("Acts", model, rollout=rollout)).opened(make_server(renderer, says("good"))):
        trajectory = await runner.play(task_of("wait"), episode_id="0.0.0", sampling=SAMPLING, on_turn=ignore)
    assert trajectory.stop_reason is StopReason.DEADLINE


async def test_a_group_is_scored_in_a_worker_that_holds_the_workflow_open(model: Path, renderer: Renderer) -> None:
    task = Task(id="t", data={"question": "Say good."})
    async with (runner := make_runner("Ranked", model)).opened(make_server(renderer, says("good"))):
        episodes = tuple(
            [await runner.play(task, episode_id=f"0.{number}.0", sampling=SAMPLING, on_turn=ignore) for number in range(3)]
        )
        scored = await runner.score(task, episodes)
    assert [episode.final_reward for episode in scored] == [0.0, 1.0, 2.0]
    assert scored == tuple(replace(episode, final_reward=float(place)) for place, episode in enumerate(episodes))


async def test_scoring_that_fails_fails_all_episodes_of_the_group(model: Path, renderer: Renderer) -> None:
    local = LocalRunner(Ranked(), renderer=renderer, rollout=RolloutConfig())
    task = Task(id="t", data={"question": "Say good."})
    async with local.opened(make_server(renderer, says("good"))):
        episode = await local.play(task, episode_id="0.0.0", sampling=SAMPLING, on_turn=ignore)
    [failed] = await local.score(task, (episode,))
    assert failed.failure is not None
    assert "not opened" in failed.failure.message


async def test_a_value_that_cannot_be_sent_fails_its_episode(model: Path, renderer: Renderer) -> None:
    async with (runner := make_runner("Acts", model)).opened(make_server(renderer, says("good"))):
        trajectory = await runner.play(task_of("unsendable"), episode_id="0.0.0", sampling=SAMPLING, on_turn=ignore)
    assert trajectory.stop_reason is StopReason.WORKFLOW_ERROR
    assert trajectory.failure is not None
    assert "to the driver raised UnicodeEncodeError" in trajectory.failure.message


async def test_a_task_that_would_change_on_its_way_is_refused(model: Path, renderer: Renderer) -> None:
    async with (runner := make_runner("Acts", model)).opened(make_server(renderer, says("good"))):
        for value in ((1, 2), {1, 2}, np.float32(1.0), object(), "\ud800", 2**70):
            with pytest.raises(ConfigError, match="task none: its fields cannot be sent to a rollout worker unchanged"):
                await runner.play(task_of("none", value=value), episode_id="e", sampling=SAMPLING, on_turn=ignore)


async def test_a_workflow_that_cannot_be_loaded_is_named_before_any_episode(model: Path, renderer: Renderer) -> None:
    with pytest.raises(ConfigError, match=r"rollout worker \d: workflow: module tests.support.remote has no 'Missing'"):
        async with make_runner("Missing", model, workers=2).opened(make_server(renderer, says("good"))):
            pytest.fail("no worker can be ready")


async def test_a_workflow_that_cannot_be_opened_is_refused_with_its_error(model: Path, renderer: Renderer) -> None:
    message = r"rollout worker \d: Unopened\.opened raised ValueError: the pool of environments is down"
    with pytest.raises(WorkflowError, match=message):
        async with make_runner("Unopened", model, workers=2).opened(make_server(renderer, says("good"))):
            pytest.fail("no worker can be ready")


async def test_a_working_directory_that_a_node_lacks_is_refused(model: Path, renderer: Renderer, tmp_path: Path) -> None:
    runner = remote_runner("Acts", model, tmp_path, workers=1, nodes=threads, directory=tmp_path / "missing")
    with pytest.raises(ConfigError, match=r"rollout worker 0: cannot work in .*missing on .*: No such file or directory"):
        async with runner.opened(make_server(renderer, says("good"))):
            pytest.fail("no worker can be ready")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text": "x" * 4000}, "episode e cannot be sent to rollout worker 0: StartEpisode has 4"),
        ({"request_words": 300}, "ModelCall has "),
        ({"metrics": 400}, "EpisodeEnded has "),
    ],
)
async def test_a_message_over_the_limit_fails_its_episode_and_no_other(
    model: Path, renderer: Renderer, tmp_path: Path, fields: dict[str, object], message: str
) -> None:
    runner = remote_runner("Verbose", model, tmp_path, workers=1, nodes=threads, max_message_bytes=4000)
    async with runner.opened(make_server(renderer, says("good"))):
        play = partial(runner.play, episode_id="e", sampling=SAMPLING, on_turn=ignore)
        trajectory = await play(Task(id="t", data=fields))
        assert trajectory.failure is not None
        assert (trajectory.stop_reason, trajectory.failure.kind) == (StopReason.WORKFLOW_ERROR, "WorkflowError")
        assert message in trajectory.failure.message
        assert "may have at most 4000" in trajectory.failure.message
        assert (await play(Task(id="t", data={}))).failure is None


async def test_an_answer_over_the_limit_fails_its_call(model: Path, renderer: Renderer, tmp_path: Path) -> None:
    runner = remote_runner("Acts", model, tmp_path, workers=1, nodes=threads, max_message_bytes=4000)
    async with runner.opened(make_server(renderer, says("good " * 1000))):
        sampling = SAMPLING.model_copy(update={"max_tokens": 4000})
        trajectory = await runner.play(task_of("none"), episode_id="e", sampling=sampling, on_turn=ignore)
    assert trajectory.failure is not None
    assert "CallAnswered has " in trajectory.failure.message


async def test_a_group_over_the_limit_fails_together(model: Path, renderer: Renderer, tmp_path: Path) -> None:
    runner = remote_runner("Verbose", model, tmp_path, workers=1, nodes=threads, max_message_bytes=4000)
    task = Task(id="t", data={"metrics": 60})
    async with runner.opened(make_server(renderer, says("good"))):
        episode = await runner.play(task, episode_id="e", sampling=SAMPLING, on_turn=ignore)
        assert episode.failure is None
        scored = await runner.score(task, (episode,) * 8)
    assert [each.final_reward for each in scored] == [None] * 8
    assert all(each.failure is not None and "ScoreGroup has " in each.failure.message for each in scored)
