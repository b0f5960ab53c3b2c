"""The policy plays every player of a game: two conversations, and rewards that no player shares with the other."""

from __future__ import annotations

import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from agentrl.algo.batch_advantages import advantages
from agentrl.algo.config import AlgorithmConfig
from agentrl.client import SamplingConfig
from agentrl.env import ChatStart, ChatStep, EpisodeEnd
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.episode import run_policy_episode
from agentrl.servers.scripted.script import Script, ScriptedCall
from agentrl.tokens.renderer import Renderer
from agentrl.trainer.scripted import ScriptedTrainer
from agentrl.types import ForkReason, Group, Message, StopReason, Task, Trajectory
from agentrl.workflow import RolloutWorkflow
from agentrl_envs.games import game_tasks
from agentrl_workflows.environment import PlayEnvironment
from agentrl_workflows.self_play import SelfPlay
from tests.engine.harness import episodes, make_engine, run
from tests.rollout.harness import PATIENCE_S, make_renderer, make_server, says
from tests.rollout.paced import run_slowly

GAMES = "agentrl_envs.games:GameEnvironment"


@pytest.fixture
def renderer(tmp_path: Path) -> Renderer:
    return make_renderer(tmp_path)


async def play(
    workflow: RolloutWorkflow, renderer: Renderer, script: Script, task: Task, *, max_turns: int | None = None
) -> Trajectory:
    with anyio.fail_after(PATIENCE_S):
        return await run_policy_episode(
            workflow,
            task,
            backend=make_server(renderer, script),
            renderer=renderer,
            rollout=RolloutConfig(max_turns=max_turns),
            sampling=SamplingConfig(max_tokens=100),
        )


async def play_moves(renderer: Renderer, moves: list[str], start: list[int]) -> Trajectory:
    left = list(moves)
    return await play(SelfPlay(GAMES), renderer, lambda _: left.pop(0), Task(id="t", data={"start": start}))


async def test_each_player_has_a_conversation_and_a_return_of_its_own(renderer: Renderer) -> None:
    trajectory = await play_moves(renderer, ["[1, 1]", "[2, 1]", "[2, 1]"], [1, 2])
    assert trajectory.failure is None
    assert [(turn.player, turn.parent, turn.sent_after) for turn in trajectory.turns] == [
        ("first", None, 0),
        ("second", None, 1),
        ("first", 0, 2),
    ]
    assert trajectory.turns[1].fork is ForkReason.NEW_CONVERSATION
    assert [turn.reward for turn in trajectory.turns] == [0.0, -1.0, 1.0]
    assert (trajectory.turns[0].rewarded_at or 0) < trajectory.turns[2].sent_at
    assert trajectory.player_returns() == {"first": 1.0, "second": -1.0}
    assert trajectory.metrics == {
        "environment.steps": 3,
        "environment.terminated": 1,
        "game.forfeited": 0,
        "first.return": 1,
        "second.return": -1,
    }


async def test_the_advantages_of_a_zero_sum_game_have_opposite_signs(renderer: Renderer) -> None:
    won = await play_moves(renderer, ["[1, 1]", "[2, 1]", "[2, 1]"], [1, 2])
    lost = await play_moves(renderer, ["[1, 1]", "[2, 2]"], [1, 2])
    both = Group(index=0, task=Task(id="t", data={}), episodes=(won, lost), admitted_version=0)
    first, second = advantages(both, AlgorithmConfig(advantage="turn", group_size=2)).per_turn
    assert first.tolist() == [2.0, -2.0, 2.0]
    assert second.tolist() == [-2.0, 2.0]


async def test_a_player_does_not_see_what_the_other_one_says(renderer: Renderer) -> None:
    seen: list[str] = []

    def script(call: ScriptedCall) -> str:
        seen.append(renderer.decode(call.input_ids.tolist(), skip_special=False))
        return ["I plan. [1, 1]", "I wait. [2, 1]", "[2, 1]"][len(seen) - 1]

    task = Task(id="t", data={"start": [1, 2]})
    trajectory = await play(SelfPlay(GAMES), renderer, script, task)
    assert trajectory.failure is None
    assert "I plan" not in seen[1]
    assert "I wait" not in seen[2]
    assert "I plan" in seen[2]


async def test_a_game_that_a_limit_ends_pays_no_one(renderer: Renderer) -> None:
    task = Task(id="t", data={"start": [7, 7, 7]})
    trajectory = await play(SelfPlay(GAMES, max_steps=1), renderer, says("[1, 1]"), task)
    assert (trajectory.player_returns(), trajectory.metrics["environment.terminated"]) == ({"first": 0.0}, 0)


class Generous:
    """Pays every move."""

    async def reset(self, task: Task, *, seed: int) -> ChatStart:
        return ChatStart(messages=[{"role": "user", "content": "Move."}], player="first")

    async def step(self, message: Message) -> ChatStep:
        return ChatStep(messages=[{"role": "user", "content": "Move."}], player="first", reward=1.0)

    async def close(self) -> None:
        pass


async def test_a_turn_limit_leaves_the_rewards_of_the_moves_before_it(renderer: Renderer) -> None:
    workflow = SelfPlay(f"{__name__}:Generous")
    trajectory = await play(workflow, renderer, says("1"), Task(id="t", data={}), max_turns=3)
    assert trajectory.stop_reason is StopReason.TURN_LIMIT
    assert [turn.reward for turn in trajectory.turns] == [1.0, 1.0, 1.0]


class Alternating(Generous):
    """Pays every move of two players, who move in turn."""

    moves = 0

    async def step(self, message: Message) -> ChatStep:
        self.moves += 1
        return replace(await super().step(message), player=("first", "second")[self.moves % 2])


def test_a_deadline_leaves_the_rewards_of_the_moves_before_it(renderer: Renderer) -> None:
    trajectory = run_slowly(renderer, SelfPlay(f"{__name__}:Alternating", max_steps=100))
    assert (trajectory.stop_reason, trajectory.failure) == (StopReason.DEADLINE, None)
    assert [turn.reward for turn in trajectory.turns] == [1.0] * 33


async def test_an_environment_of_one_player_is_played_too(renderer: Renderer) -> None:
    task = Task(id="t", data={"start": [1], "opponent": "self"})
    [own] = game_tasks(count=1, opponent="random")
    trajectory = await play(SelfPlay(GAMES), renderer, says("none"), own)
    assert [turn.player for turn in trajectory.turns] == ["", "", ""]
    assert trajectory.player_returns() == {"": -1.0}
    assert trajectory.metrics["success"] == 0
    refused = await play(PlayEnvironment(GAMES), renderer, says("none"), task)
    assert refused.stop_reason is StopReason.WORKFLOW_ERROR
    assert refused.failure is not None
    assert "SelfPlay" in refused.failure.message


class Confused:
    """Names a player at first, and none, or a reward that is none, later."""

    def __init__(self, rewards: Any = None) -> None:  # noqa: ANN401 - wrong rewards are what is tested
        self.rewards = rewards

    async def reset(self, task: Task, *, seed: int) -> ChatStart:
        return ChatStart(messages=[{"role": "user", "content": "Move."}], player="first")

    async def step(self, message: Message) -> ChatStep:
        if self.rewards is not None:
            return ChatStep(end=EpisodeEnd.TERMINATED, player_rewards=self.rewards)
        return ChatStep(messages=[{"role": "user", "content": "Move."}])

    async def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        (None, "is for one of them; reset named 'first', this step ''"),
        ({"first": "1"}, "player first: a reward must be a finite number, got str '1'"),
        ({"first": float("nan")}, "a reward must be a finite number"),
    ],
)
async def test_a_game_that_confuses_players_or_rewards_is_a_fault(renderer: Renderer, rewards: object, message: str) -> None:
    workflow = SelfPlay("tests.env.test_self_play:Confused", {"rewards": rewards})
    trajectory = await play(workflow, renderer, says("x"), Task(id="t", data={}))
    assert trajectory.stop_reason is StopReason.ENVIRONMENT_FAULT
    assert trajectory.failure is not None
    assert message in trajectory.failure.message


async def test_a_run_trains_both_players_and_records_them(renderer: Renderer, tmp_path: Path) -> None:
    def script(call: ScriptedCall) -> str:
        return f"[{zlib.crc32(call.input_ids.tobytes()) % 9 + 1}]"

    tasks = game_tasks(game="tic_tac_toe", count=8)
    workflow = SelfPlay(GAMES)
    inference, trainer = make_server(renderer, script), ScriptedTrainer()
    engine = make_engine(tmp_path, renderer, workflow=workflow, inference=inference, trainer=trainer, tasks=tasks)
    await run(engine)
    recorded = episodes(tmp_path)
    assert all(record["failure"] is None for record in recorded)
    assert {turn["player"] for record in recorded for turn in record["turns"]} == {"first", "second"}
    assert trainer.batches
