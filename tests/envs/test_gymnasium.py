"""Gymnasium's own environments are played as chats: spaces in words, drawings as text, answers as actions."""

from __future__ import annotations

import threading
from enum import IntEnum
from typing import Any

import numpy
import pytest

from agentrl.env import ChatStep, EnvironmentLimits, EnvironmentPool, EpisodeEnd, load_environment
from agentrl.env.chat import ChatEpisode
from agentrl.errors import ConfigError, EnvironmentFault
from agentrl.types import Task

gymnasium = pytest.importorskip("gymnasium", reason="the extra agentrl[gym]")

from agentrl_envs.gymnasium import GymEnvironment, action_names, describe_space, read_action  # noqa: E402

TASK = Task(id="t", data={})
SPACES = gymnasium.spaces


def text_of(messages: Any) -> str:  # noqa: ANN401 - messages of the wire
    return messages[0]["content"]


async def act(episode: ChatEpisode, action: object) -> ChatStep:
    return await episode.step({"role": "assistant", "content": f"I think so. <action>{action}</action>"})


def test_names_are_those_of_actions_in_the_space() -> None:
    class Moves(IntEnum):
        left = 0
        right = 1
        done = 2

    class Few(gymnasium.Env):
        action_space = SPACES.Discrete(2)
        actions = Moves

    class Meanings(gymnasium.Env):
        action_space = SPACES.Discrete(2, start=1)

        def get_action_meanings(self) -> list[str]:
            return ["NOOP", "UP", "DOWN"]

    assert action_names(Few()) == {"left": 0, "right": 1}
    assert action_names(Meanings()) == {"up": 1, "down": 2}


async def test_frozen_lake_is_crossed_by_its_drawing() -> None:
    pool = EnvironmentPool(lambda: GymEnvironment("FrozenLake-v1", make_args={"is_slippery": False}), name="lake")
    async with pool.episode(TASK, seed=0) as episode:
        start = text_of(episode.start.messages)
        assert "Cross a frozen lake" in start
        assert "an action is a whole number from 0 to 3" in start
        assert start.endswith("[S]FFF\nFHFH\nFFFH\nHFFG")
        steps = [await act(episode, action) for action in (1, 1, 2, 2, 1, 2)]
    assert text_of(steps[0].messages).endswith("SFFF\n[F]HFH\nFFFH\nHFFG")
    assert [step.reward for step in steps] == [0, 0, 0, 0, 0, 1]
    assert [step.end for step in steps] == [None] * 5 + [EpisodeEnd.TERMINATED]


async def test_taxi_shows_passenger_and_destination_without_colors() -> None:
    async with EnvironmentPool(lambda: GymEnvironment("Taxi-v4"), name="taxi").episode(TASK, seed=1) as episode:
        drawing = text_of(episode.start.messages).split("\n\n")[-1]
        assert "\x1b" not in drawing
        assert ("<R>" in drawing, "(B)" in drawing, "[ ]" in drawing) == (True, True, True)


async def test_blackjack_is_played_by_its_numbers() -> None:
    async with EnvironmentPool(lambda: GymEnvironment("Blackjack-v1"), name="cards").episode(TASK, seed=1) as episode:
        assert text_of(episode.start.messages).endswith("[20, 7, 0]")
        step = await act(episode, 0)
        assert step.end is EpisodeEnd.TERMINATED
        assert step.reward in (-1, 0, 1)


async def test_the_same_seed_is_the_same_episode_on_a_reused_instance() -> None:
    async with EnvironmentPool(lambda: GymEnvironment("Taxi-v4"), name="taxi") as pool:
        starts: list[str] = []
        for seed in (1, 2, 1):
            async with pool.episode(TASK, seed=seed) as episode:
                starts.append(text_of(episode.start.messages))
        assert starts[0] == starts[2] != starts[1]
        assert pool.num_started == 1


async def test_an_answer_without_an_action_is_told_so_and_ends_the_episode_in_the_end() -> None:
    pool = EnvironmentPool(lambda: GymEnvironment("FrozenLake-v1", invalid_reward=-0.5, max_invalid=2), name="lake")
    async with pool.episode(TASK, seed=0) as episode:
        first = await episode.step({"role": "assistant", "content": "left"})
        assert "That has no valid action" in text_of(first.messages)
        assert (first.reward, first.end) == (-0.5, None)
        await act(episode, 0)
        assert (await act(episode, 9)).end is None
        assert (await act(episode, "x" * 10_000)).end is EpisodeEnd.TRUNCATED


async def test_a_limit_of_steps_truncates_and_a_task_may_choose_the_environment() -> None:
    task = Task(id="t", data={"env_id": "CartPole-v1"})
    made = {"max_episode_steps": 3}
    async with EnvironmentPool(lambda: GymEnvironment("FrozenLake-v1", make_args=made), name="gym").episode(
        task, seed=0
    ) as episode:
        steps = [await act(episode, action) for action in (0, 1, 0)]
        assert [step.end for step in steps] == [None, None, EpisodeEnd.TRUNCATED]
        assert [step.reward for step in steps] == [1, 1, 1]


async def test_an_environment_that_raises_is_a_fault() -> None:
    async with EnvironmentPool(lambda: GymEnvironment("FrozenLake-v1"), name="lake") as pool:
        with pytest.raises(EnvironmentFault, match=r"lake\.reset"):
            async with pool.episode(Task(id="t", data={"env_id": "NoSuch-v0"}), seed=0):
                pass


class Hangs(gymnasium.Env[Any, Any]):
    """Hangs in its first step until it is released."""

    observation_space = action_space = SPACES.Discrete(2)
    release, closed = threading.Event(), threading.Event()

    def reset(self, **_: Any) -> tuple[int, dict[str, Any]]:  # noqa: ANN401 - as Gymnasium
        return 0, {}

    def step(self, action: object) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.release.wait()
        return 0, 0.0, True, False, {}

    def close(self) -> None:
        self.closed.set()


async def test_a_step_that_hangs_is_a_fault_at_its_deadline_and_its_instance_is_replaced() -> None:
    gymnasium.register("Hangs-v0", entry_point=Hangs, disable_env_checker=True)
    Hangs.release.clear()
    Hangs.closed.clear()
    limits = EnvironmentLimits(step_s=0.05)
    try:
        async with EnvironmentPool(lambda: GymEnvironment("Hangs-v0"), name="hangs", limits=limits) as pool:
            for _ in range(2):
                async with pool.episode(TASK, seed=0) as episode:
                    with pytest.raises(EnvironmentFault, match=r"hangs\.step: no answer within 0\.05 s"):
                        await act(episode, 0)
            assert pool.num_started == 2
        assert not Hangs.closed.is_set()  # nothing is called beside the step that hangs
    finally:
        Hangs.release.set()
        del gymnasium.registry["Hangs-v0"]


class Named(Hangs):
    """Has names for its actions, as MiniGrid has, and a mission that a large picture precedes."""

    class Actions(IntEnum):
        left = 0
        forward = 1

    actions = Actions
    observation_space = SPACES.Dict({"image": SPACES.Box(0, 255, (64, 64)), "mission": SPACES.Text(20)})

    def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:  # noqa: ANN401 - as Gymnasium
        return {"image": numpy.zeros((64, 64)), "mission": "get to the goal"}, {}

    def step(self, action: object) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.reset()[0], float(action == 1), True, False, {}


async def test_actions_have_names_and_no_picture_hides_a_text() -> None:
    gymnasium.register("Named-v0", entry_point=Named, disable_env_checker=True)
    try:
        async with EnvironmentPool(lambda: GymEnvironment("Named-v0"), name="named").episode(TASK, seed=0) as episode:
            start = text_of(episode.start.messages)
            assert "an action is one of: left, forward (or its number: 0 left, 1 forward)" in start
            assert '{"mission": "get to the goal", "image": [[0.0' in start
            assert "one of: left, forward" in text_of((await act(episode, "up")).messages)
            assert (await act(episode, "Forward")).reward == 1.0
    finally:
        del gymnasium.registry["Named-v0"]


def test_an_environment_that_does_not_exist_is_refused_before_a_run_starts() -> None:
    with pytest.raises(ConfigError, match="NoSuch"):
        load_environment("agentrl_envs.gymnasium:GymEnvironment", {"id": "NoSuch-v0"})
    with pytest.raises(ConfigError, match="NoSuch"):
        GymEnvironment("NoSuch-v0")


@pytest.mark.parametrize(
    ("space", "text", "action"),
    [
        (SPACES.Discrete(4), "3", 3),
        (SPACES.Discrete(4), "4", None),
        (SPACES.Discrete(4), "1.0", None),
        (SPACES.Discrete(4), "true", None),
        (SPACES.Discrete(3, start=-1), "-1", -1),
        (SPACES.Box(-1, 1, (2,)), "[0.5, -1]", [0.5, -1]),
        (SPACES.Box(-1, 1, (2,)), "[0.5, 2]", None),
        (SPACES.Box(-1, 1, (2,)), "[0.5]", None),
        (SPACES.Box(-1, 1, (2,)), "[NaN, 0]", None),
        (SPACES.MultiDiscrete([3, 2]), "[2, 1]", [2, 1]),
        (SPACES.MultiDiscrete([3, 2]), "[2, 2]", None),
        (SPACES.MultiDiscrete([3, 2]), "[0.9, 1]", None),
        (SPACES.MultiBinary(3), "[1, 0, 1]", [1, 0, 1]),
        (SPACES.Text(5, charset="abc"), "abc", "abc"),
        (SPACES.Text(5, charset="abc"), "abcd", None),
        (SPACES.Tuple((SPACES.Discrete(2), SPACES.Discrete(3))), "[1, 2]", (1, 2)),
        (SPACES.Tuple((SPACES.Discrete(2), SPACES.Discrete(3))), "[1]", None),
        (SPACES.Dict(a=SPACES.Discrete(2)), '{"a": 1}', {"a": 1}),
        (SPACES.Dict(a=SPACES.Discrete(2)), '{"b": 1}', None),
        (SPACES.Dict(a=SPACES.Discrete(2)), "[" * 1_000, None),
        (SPACES.Discrete(4), "", None),
    ],
)
def test_an_action_is_read_in_the_types_of_its_space_or_not_at_all(space: Any, text: str, action: Any) -> None:  # noqa: ANN401
    read = read_action(f"<action>9</action> no: <action> {text} </action>", space)
    if action is None:
        assert read is None
        return
    assert read is not None
    [value] = read
    assert space.contains(value)
    assert (value.tolist() if hasattr(value, "tolist") else value) == action
    assert describe_space(space)
