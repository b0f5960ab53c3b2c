"""MiniGrid's real environments in words: the mission, the view, what the player carries, and actions by name."""

from __future__ import annotations

import pytest

from agentrl.env import ChatStep, EnvironmentPool, EpisodeEnd
from agentrl.env.chat import ChatEpisode
from agentrl.types import Task

pytest.importorskip("minigrid", reason="the extra agentrl[minigrid]")

from minigrid.core import constants  # pyright: ignore[reportMissingImports]

from agentrl_envs import minigrid
from agentrl_envs.gymnasium import GymEnvironment

pytestmark = pytest.mark.external


def pool(id: str) -> EnvironmentPool:
    return EnvironmentPool(lambda: GymEnvironment(id, make_args={"max_steps": 40}), name=id)


async def act(episode: ChatEpisode, action: str) -> ChatStep:
    return await episode.step({"role": "assistant", "content": f"<action>{action}</action>"})


def test_the_numbers_are_the_packages_own() -> None:
    assert dict(enumerate(minigrid.OBJECT_KINDS)) == constants.IDX_TO_OBJECT
    assert dict(enumerate(minigrid.COLORS)) == constants.IDX_TO_COLOR
    assert {name: number for number, name in enumerate(minigrid.DOORS)} == constants.STATE_TO_IDX


async def test_an_empty_room_is_crossed_by_names_of_actions() -> None:
    async with pool("MiniGrid-Empty-5x5-v0").episode(Task(id="t", data={}), seed=1) as episode:
        start = str(episode.start.messages[0]["content"])
        assert "one of: left, right, forward, pickup, drop, toggle, done" in start
        assert "Mission: get to the green goal square. You look east." in start
        assert "You see: the green goal, 2 ahead, 2 right." in start
        for action in ("forward", "forward", "right", "forward"):
            assert (await act(episode, action)).end is None
        last = await act(episode, "forward")
    assert last.end is EpisodeEnd.TERMINATED
    assert last.reward is not None
    assert last.reward > 0


async def test_a_key_is_seen_picked_up_and_opens_the_door() -> None:
    async with pool("MiniGrid-DoorKey-6x6-v0").episode(Task(id="t", data={}), seed=1) as episode:
        start = str(episode.start.messages[0]["content"])
        assert "a yellow key, 3 ahead; a locked yellow door, 3 ahead, 1 right" in start
        for action in ("forward", "forward"):
            await act(episode, action)
        text = str((await act(episode, "pickup")).messages[0]["content"])
        assert "You carry a yellow key." in text
        await act(episode, "forward")
        await act(episode, "right")
        text = str((await act(episode, "toggle")).messages[0]["content"])
        assert "an open yellow door, 1 ahead" in text
