"""A game in which the policy plays every player, each with a conversation and a return of its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import anyio
from openai import omit
from openai.types.chat import ChatCompletion

from agentrl.client import Client, MessageLike
from agentrl.env import EpisodeEnd
from agentrl.errors import EpisodeLimit
from agentrl.types import Task
from agentrl_workflows.environment import PlayEnvironment


class SelfPlay(PlayEnvironment):
    """One game for each task; what the game pays a player is a reward of that player's turns and of no other's.

    A player sees its own messages and answers only. A game that a task plays against an opponent of its own, such as
    `opponent: random` of the bundled games, has one player here, so held-out tasks measure the policy against it.

    Records `NAME.return` of every player, `environment.steps`, `environment.terminated` and the game's own metrics. The
    arguments are those of `PlayEnvironment`.
    """

    async def run(self, task: Task, client: Client) -> float:
        """Return 0.0: what the game pays is on the turns.

        Cancellation: the instance is given back, or closed if it was in the middle of a step.
        """
        async with self.pool.episode(task, seed=self.seed_of(task, client)) as episode:
            conversations: defaultdict[str, list[MessageLike]] = defaultdict(list)
            played: list[_PlayedTurn] = []
            latest: dict[str, _PlayedTurn] = {}
            tools: Any = list(episode.start.tools) or omit
            player, messages = episode.start.player, episode.start.messages
            try:
                while episode.end is None and len(played) < self.max_steps:
                    conversation = conversations[player]
                    conversation += messages
                    if player in latest:  # before the next call, which earns none of it
                        _pay(client, [latest.pop(player)])
                    speaker = client.as_player(player) if player else client
                    completion = await speaker.chat.completions.create(messages=conversation, tools=tools)
                    message = completion.choices[0].message
                    conversation.append(message)
                    step = await episode.step(message.model_dump(exclude_none=True))
                    played.append(_PlayedTurn(completion, player, step.reward or 0.0))
                    latest[player] = played[-1]
                    for name, reward in step.player_rewards.items():
                        if name in latest:  # a player that never moved has no turn to reward
                            latest[name].reward += reward
                    client.record(**{"environment.steps": len(played), **step.metrics})
                    player, messages = step.player, step.messages
            except (EpisodeLimit, anyio.get_cancelled_exc_class()):
                _pay(client, latest.values())  # a limit, the deadline too, leaves the rewards that they have
                raise
            _pay(client, latest.values())
            for name in conversations:
                total = sum(turn.reward for turn in played if turn.player == name)
                client.record(**{f"{name}.return" if name else "return": total})
            client.record(**{"environment.terminated": episode.end is EpisodeEnd.TERMINATED})
        return 0.0


@dataclass(slots=True)
class _PlayedTurn:
    completion: ChatCompletion
    player: str
    reward: float


def _pay(client: Client, played: Iterable[_PlayedTurn]) -> None:
    for turn in played:
        client.reward(turn.completion, turn.reward)
