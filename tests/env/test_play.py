"""One workflow plays any chat environment: rewards by turn, metrics, seeds, and faults that are no rewards."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest

from agentrl import run_episode
from agentrl.client import SamplingConfig
from agentrl.engine.evaluate import evaluate_policy
from agentrl.env import ChatStart, ChatStep, EpisodeEnd, environment_seed
from agentrl.errors import ConfigError
from agentrl.rollout.config import RolloutConfig
from agentrl.servers.scripted.script import Script
from agentrl.tokens.renderer import Renderer
from agentrl.trainer.scripted import ScriptedTrainer
from agentrl.types import Message, StopReason, Task
from agentrl.workflow import RolloutWorkflow
from agentrl_workflows.environment import PlayEnvironment
from tests.engine.harness import episodes, make_engine, run
from tests.rollout.harness import SAMPLING, TASK, episode, make_renderer, make_server, says
from tests.support.guessing import Guessing, huge_message

HERE = "tests.env.test_play"
GUESSING = "tests.support.guessing:Guessing"
SEEN: list[int] = []
"""Seeds of the episodes of `Seeded`."""


@pytest.fixture
def renderer(tmp_path: Path) -> Renderer:
    return make_renderer(tmp_path)


def one_after_the_other(answers: Sequence[str]) -> Script:
    left = list(answers)
    return lambda call: left.pop(0)


class Seeded(Guessing):
    async def reset(self, task: Task, *, seed: int) -> ChatStart:
        SEEN.append(seed)
        return await super().reset(task, seed=seed)


class Broken(Guessing):
    """Returns or raises what its argument names."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    async def step(self, message: Message) -> Any:  # noqa: ANN401 - wrong results are what is tested
        if self.what == "hangs":
            await anyio.sleep_forever()
        return _BREAKAGES[self.what]()


def _raise() -> None:
    raise ConnectionError("HTTP 503")


_BREAKAGES: dict[str, Callable[[], object]] = {
    "string": lambda: ChatStep(reward="1", end=EpisodeEnd.TERMINATED),  # pyright: ignore[reportArgumentType]
    "nan": lambda: ChatStep(reward=math.nan, end=EpisodeEnd.TERMINATED),
    "huge": lambda: ChatStep(messages=[huge_message()]),
    "gone": _raise,
}


async def test_the_rewards_of_the_environment_are_rewards_of_the_turns(renderer: Renderer) -> None:
    number = Guessing()
    await number.reset(TASK, seed=environment_seed(TASK))
    wrong = str(number.number + 1)
    trajectory = await episode(
        PlayEnvironment(GUESSING), renderer, script=one_after_the_other([wrong, wrong, str(number.number)])
    )
    assert trajectory.failure is None
    assert [turn.reward for turn in trajectory.turns] == [-0.1, -0.1, 1.0]
    assert trajectory.episode_return == pytest.approx(0.8)
    assert trajectory.metrics == {"environment.steps": 3, "guesses": 3, "environment.terminated": 1}
    assert len(trajectory.leaves()) == 1


async def test_an_episode_that_a_limit_ended_says_so(renderer: Renderer) -> None:
    for workflow in (PlayEnvironment(GUESSING, {"max_guesses": 2}), PlayEnvironment(GUESSING, max_steps=2)):
        trajectory = await episode(workflow, renderer, script=says("0"))
        assert (len(trajectory.turns), trajectory.metrics["environment.terminated"]) == (2, 0)
        assert trajectory.stop_reason is StopReason.COMPLETED


async def test_an_environment_with_tools_gets_the_tool_calls(renderer: Renderer, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call><|im_end|>'
    ids = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(call, add_special_tokens=False).ids
    answers: list[Any] = ["Hm.", ids]
    report = await evaluate_policy(
        PlayEnvironment("tests.support.guessing:Caller"),
        [TASK],
        backend=make_server(renderer, lambda _: answers.pop(0)),
        renderer=renderer,
        rollout=RolloutConfig(),
        sampling=SamplingConfig(max_tokens=200),
    )
    [trajectory] = report.episodes
    assert trajectory.failure is None
    assert trajectory.metrics["looked"] == 1


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("string", "a reward must be a finite number, got str '1'"),
        ("nan", "a reward must be a finite number, got float nan"),
        ("huge", "over the limit of 200000"),
        ("gone", "raised ConnectionError: HTTP 503"),
        ("hangs", "no answer within 0.05 s"),
    ],
)
async def test_a_broken_environment_is_an_environment_fault_and_no_reward(
    renderer: Renderer, what: str, message: str
) -> None:
    workflow = PlayEnvironment(f"{HERE}:Broken", {"what": what}, limits={"step_s": 0.05 if what == "hangs" else 60})
    trajectory = await episode(workflow, renderer)
    assert (trajectory.stop_reason, trajectory.final_reward) == (StopReason.ENVIRONMENT_FAULT, None)
    assert trajectory.failure is not None
    assert message in trajectory.failure.message


async def test_episodes_of_a_task_meet_the_same_world_unless_each_is_to_have_its_own(renderer: Renderer) -> None:
    seeds: list[list[int]] = []
    tasks = [TASK, Task(id="t1", data=TASK.data)]
    for seed, seed_by in ((0, "task"), (1, "task"), (0, "episode")):
        SEEN.clear()
        report = await evaluate_policy(
            PlayEnvironment(f"{HERE}:Seeded", seed=seed, seed_by=seed_by),  # pyright: ignore[reportArgumentType]
            tasks,
            backend=make_server(renderer, says("0")),
            renderer=renderer,
            rollout=RolloutConfig(max_concurrent_episodes=1),
            sampling=SAMPLING,
            episodes=4,
        )
        assert all(trajectory.failure is None for trajectory in report.episodes)
        seeds.append(SEEN.copy())
    same, other, own = seeds
    assert [len(set(same)), len(set(other)), len({*same, *other})] == [2, 2, 4]
    assert len(set(own)) == 4


async def test_an_evaluation_keeps_the_instances_and_closes_them(renderer: Renderer) -> None:
    workflow = PlayEnvironment(GUESSING)
    await evaluate_policy(
        workflow,
        [TASK],
        backend=make_server(renderer, says("0")),
        renderer=renderer,
        rollout=RolloutConfig(max_concurrent_episodes=2),
        sampling=SAMPLING,
        episodes=6,
    )
    assert workflow.pool.num_started <= 2


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_steps must be at least 1"):
        PlayEnvironment(GUESSING, max_steps=0)


class Flaky(Guessing):
    """Pays 1 for `good`, and breaks at every seventh step of all instances together."""

    num_steps = 0
    instances: list[Flaky] = []  # noqa: RUF012 - reset by the test

    def __init__(self) -> None:
        super().__init__()
        Flaky.instances.append(self)

    async def step(self, message: Message) -> ChatStep:
        Flaky.num_steps += 1
        if Flaky.num_steps % 7 == 0:
            raise ConnectionError("HTTP 503")
        return ChatStep(reward=float(message["content"] == "good"), end=EpisodeEnd.TERMINATED)


async def test_a_run_counts_and_repeats_the_episodes_of_a_broken_environment_and_closes_all(
    renderer: Renderer, tmp_path: Path
) -> None:
    Flaky.num_steps, Flaky.instances = 0, []
    workflow = PlayEnvironment(f"{HERE}:Flaky", size=4)
    trainer = ScriptedTrainer()
    engine = make_engine(tmp_path, renderer, workflow=workflow, trainer=trainer, rollout={"episode_retries": 9})
    report = await run(engine)
    assert (report.train_steps, report.groups) == (4, 8)
    recorded = episodes(tmp_path)
    broken = [record for record in recorded if record["stop_reason"] == "environment_fault"]
    assert len(broken) == Flaky.num_steps // 7 > 2
    assert all(record["final_reward"] is None and "HTTP 503" in record["failure"]["message"] for record in broken)
    assert sum(len(batch.samples) for batch in trainer.batches) == 24
    assert workflow.pool.num_faults == len(broken)
    assert [instance.num_closed for instance in Flaky.instances] == [1] * workflow.pool.num_started
    assert workflow.pool.num_started <= 4 + len(broken)


async def test_episodes_inside_an_open_workflow_share_its_environments() -> None:
    workflow = PlayEnvironment(GUESSING)
    async with workflow.opened():
        for _ in range(2):
            await run_episode(workflow, TASK, replies=["50", "25"] * 8)
        assert workflow.pool.num_started == 1
    await run_episode(workflow, TASK, replies=["50", "25"] * 8)
    assert workflow.pool.num_started == 2


def test_a_workflow_class_that_is_frozen_and_made_twice_opens_once() -> None:
    opened: list[str] = []

    class Base(RolloutWorkflow):
        @asynccontextmanager
        async def opened(self) -> AsyncGenerator[None]:
            opened.append("base")
            yield

    @dataclass(frozen=True, slots=True)  # makes the class twice
    class Held(Base):
        @asynccontextmanager
        async def opened(self) -> AsyncGenerator[None]:
            async with Base.opened(self):
                opened.append("own")
                yield

    async def play() -> None:
        workflow = Held()
        async with workflow.opened(), workflow.opened():
            assert opened == ["base", "own"]

    anyio.run(play)
