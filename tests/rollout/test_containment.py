"""What a workflow raises or cancels ends its own episode and nothing else."""

from __future__ import annotations

import asyncio
import gc
from functools import partial
from pathlib import Path

import anyio
import pytest

from agentrl.client import Client
from agentrl.engine.evaluate import evaluate_with
from agentrl.episode.codec import encode_line, trajectory_record
from agentrl.episode.summary import EndedEpisode
from agentrl.errors import RunStopped
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.episode import run_policy_episode
from agentrl.rollout.group import DroppedGroup, run_group, run_recorded
from agentrl.tokens.renderer import Renderer
from agentrl.types import Group, StopReason, Task, Trajectory
from tests.engine.harness import lines, make_engine, run
from tests.rollout.harness import PATIENCE_S, SAMPLING, TASK, Judge, ask, episode, make_server, says, workflow_of


class Panic(BaseException):
    """No `Exception`, like the panic of a Rust library and the failure of a test framework."""


def fail_by_panic(task: Task, client: Client) -> float:
    raise Panic("byte index 5 is out of bounds")


async def panic_in_a_group(task: Task, client: Client) -> float:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask, client, "hello")
        raise Panic("inside a task group")
    return 1.0


def cancel_itself(task: Task, client: Client) -> float:
    current = asyncio.current_task()
    assert current is not None
    current.cancel()
    return 1.0


async def cancel_itself_and_wait(task: Task, client: Client) -> float:
    cancel_itself(task, client)
    await anyio.sleep_forever()
    return 1.0


async def cancel_the_episodes(task: Task, client: Client) -> float:
    await ask(client, "hello")  # by then the others have started
    for other in asyncio.all_tasks():
        if other.get_name().startswith(("agentrl.rollout.", "agentrl.engine.evaluate.")):
            other.cancel()
    return 1.0


CANCELLING = [cancel_itself, cancel_itself_and_wait, cancel_the_episodes]


@pytest.mark.parametrize("wrong", [fail_by_panic, panic_in_a_group])
async def test_an_exception_that_is_no_exception_class_ends_its_episode_only(renderer: Renderer, wrong: object) -> None:
    trajectory = await episode(workflow_of(wrong), renderer)  # pyright: ignore[reportArgumentType] - sync or async
    assert trajectory.stop_reason is StopReason.WORKFLOW_ERROR
    assert trajectory.failure is not None
    assert "raised Panic" in trajectory.failure.message


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("wrong", CANCELLING)
async def test_a_workflow_that_cancels_tasks_fails_its_member_and_the_group_has_an_outcome(
    renderer: Renderer, anyio_backend: str, wrong: object
) -> None:
    runner = partial(
        run_policy_episode,
        workflow_of(wrong),  # pyright: ignore[reportArgumentType] - sync or async
        backend=make_server(renderer, says("good")),
        renderer=renderer,
        rollout=RolloutConfig(),
        sampling=SAMPLING,
    )
    with anyio.fail_after(PATIENCE_S):
        dropped = await run_group(
            TASK,
            index=0,
            group_size=3,
            admitted_version=0,
            run=runner,
            rollout=RolloutConfig(),
            slots=anyio.Semaphore(3),
        )
    assert isinstance(dropped, DroppedGroup)
    assert dropped.reason == "episode_failed:workflow_error"
    assert all("cancel" in failure.message for failure in dropped.failures)


async def cancel_itself_after_a_turn(task: Task, client: Client) -> float:
    await ask(client, "hello")
    return cancel_itself(task, client)


async def wait_after_a_turn_and_a_cancellation(task: Task, client: Client) -> float:
    await ask(client, "hello")
    return await cancel_itself_and_wait(task, client)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("wrong", [cancel_itself_after_a_turn, wait_after_a_turn_and_a_cancellation])
async def test_an_episode_that_was_cancelled_keeps_its_turns(renderer: Renderer, anyio_backend: str, wrong: object) -> None:
    runner = partial(
        run_policy_episode,
        workflow_of(wrong),  # pyright: ignore[reportArgumentType] - sync or async
        backend=make_server(renderer, says("good")),
        renderer=renderer,
        rollout=RolloutConfig(),
        sampling=SAMPLING,
    )
    for number in range(2):
        trajectory = await run_recorded(runner, TASK, episode_id=str(number))
        assert trajectory.failure is not None
        assert "cancelled the asyncio task of this episode" in trajectory.failure.message
        assert [turn.stop_reason for turn in trajectory.turns] == [StopReason.STOP]
        assert trajectory.final_reward is None


@pytest.mark.filterwarnings("ignore:.*was never awaited", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_group_whose_members_were_cancelled_before_they_ran_is_dropped(
    renderer: Renderer, anyio_backend: str
) -> None:
    async def cancel_members(task: Task, *, episode_id: str) -> Trajectory:
        for other in asyncio.all_tasks():
            if "_Members.run" in other.get_name():
                other.cancel()
        await anyio.sleep_forever()
        raise AssertionError

    with anyio.fail_after(PATIENCE_S):
        dropped = await run_group(
            TASK,
            index=0,
            group_size=3,
            admitted_version=0,
            run=cancel_members,
            rollout=RolloutConfig(),
            slots=anyio.Semaphore(3),
        )
    assert isinstance(dropped, DroppedGroup)
    assert dropped.reason == "episode_failed:workflow_error"
    gc.collect()  # the coroutines that never ran warn here and not in another test


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_member_that_cancelled_itself_once_succeeds_at_its_next_attempt(
    renderer: Renderer, anyio_backend: str
) -> None:
    attempts: list[str] = []

    async def once(task: Task, client: Client) -> float:
        attempts.append(client.episode.id)
        return cancel_itself(task, client) if len(attempts) == 1 else float(await ask(client, "hello") == "good")

    runner = partial(
        run_policy_episode,
        workflow_of(once),
        backend=make_server(renderer, says("good")),
        renderer=renderer,
        rollout=RolloutConfig(),
        sampling=SAMPLING,
    )
    rollout = RolloutConfig(episode_retries=1)
    with anyio.fail_after(PATIENCE_S):
        group = await run_group(
            TASK, index=0, group_size=1, admitted_version=0, run=runner, rollout=rollout, slots=anyio.Semaphore(1)
        )
    assert isinstance(group, Group)
    assert attempts == ["0.0.0", "0.0.1"]


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("wrong", CANCELLING)
async def test_an_evaluation_counts_episodes_that_cancel_tasks_as_failed(
    renderer: Renderer, anyio_backend: str, wrong: object
) -> None:
    cancels, judge = workflow_of(wrong), Judge()  # pyright: ignore[reportArgumentType] - sync or async
    server = make_server(renderer, says("good"))

    async def one(task: Task, *, episode_id: str) -> object:
        workflow = cancels if task.id == "0" else judge
        return await run_policy_episode(
            workflow,
            task,
            backend=server,
            renderer=renderer,
            rollout=RolloutConfig(),
            sampling=SAMPLING,
            episode_id=episode_id,
        )

    tasks = [Task(id=str(number), data=TASK.data) for number in range(20)]
    with anyio.fail_after(PATIENCE_S):
        report = await evaluate_with(one, tasks, max_concurrent=1)  # pyright: ignore[reportArgumentType]
    assert len(report.episodes) == 20
    assert report.failures.keys() == {"workflow_error"}


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_workflow_that_cancels_its_task_does_not_end_the_run(
    renderer: Renderer, tmp_path: Path, anyio_backend: str
) -> None:
    async def sometimes(task: Task, client: Client) -> float:
        if task.id == "t3" and client.episode.id.endswith(".0"):
            return cancel_itself(task, client)
        return float(await ask(client, task["question"]) == task["answer"])

    report = await run(make_engine(tmp_path / "run", renderer, workflow=workflow_of(sometimes)))
    assert report.train_steps == 4
    assert report.failed_episodes == {"workflow_error": 3}
    assert lines(tmp_path / "run" / "metrics.jsonl", "end")


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_cancelling_the_tasks_of_the_engine_ends_the_run_with_a_named_error(
    renderer: Renderer, tmp_path: Path, anyio_backend: str
) -> None:
    async def cancel_engine(task: Task, client: Client) -> float:
        for other in asyncio.all_tasks():
            if other.get_name().startswith("agentrl.engine.engine."):
                other.cancel()
        return 1.0

    with pytest.raises(RunStopped, match=r"cancelled with `asyncio\.Task\.cancel`"):
        await run(make_engine(tmp_path / "run", renderer, workflow=workflow_of(cancel_engine)))


async def test_the_record_of_a_failure_keeps_no_more_of_a_huge_text_than_its_beginning_and_end(renderer: Renderer) -> None:
    def run(task: Task, client: Client) -> float:
        raise ValueError("begin" + "x" * 5_000_000 + "end")

    trajectory = await episode(workflow_of(run), renderer)
    failure = trajectory.failure
    assert failure is not None
    assert len(failure.message) + len(failure.traceback) < 40_000
    assert "raised ValueError: beginxxx" in failure.message
    assert "characters left out" in failure.message
    assert failure.message.endswith("xxxend")
    assert "xxxend" in failure.traceback


async def test_the_record_of_a_failure_has_no_control_characters(renderer: Renderer, tmp_path: Path) -> None:
    def run(task: Task, client: Client) -> float:
        raise ValueError("\x1b[2J\x07 two\nlines \u202e \ud800")

    trajectory = await episode(workflow_of(run), renderer)
    assert trajectory.failure is not None
    assert r"\x1b[2J\x07 two" in trajectory.failure.message
    assert trajectory.failure.message.endswith("\nlines \\u202e \\ud800")
    ended = EndedEpisode(trajectory, purpose="training", group=0, step=1, policy_version=1, run_begin_s=0.0)
    encode_line(trajectory_record(ended))
