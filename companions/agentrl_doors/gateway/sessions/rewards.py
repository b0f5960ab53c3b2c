"""Rewards that arrive over HTTP, with the checks of rewards that are set in process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from agentrl.client.episode import Episode
from agentrl.episode.checks import check_reward_parts
from agentrl.errors import RewardError
from agentrl.types import BranchPath
from agentrl_doors.gateway.dialects import DIALECTS
from agentrl_doors.gateway.refusals import CallRefused

RewardValue: TypeAlias = float | dict[str, float]


def plain_reward(value: object) -> RewardValue:
    """Return a reward that arrived as JSON as the finite numbers that it stands for; true is 1.0.

    Raises:
        RewardError: the value is no reward.

    Example:
        >>> plain_reward(True), plain_reward({"right": 1, "short": -0.5})
        (1.0, {'right': 1.0, 'short': -0.5})
    """
    if isinstance(value, str) or value is None:
        raise RewardError(f"a reward is a number, or an object of named parts that add up to it, got {value!r:.80}")
    number, parts = check_reward_parts(value, "a reward over HTTP")
    return dict(parts) or number


def set_reward(episode: Episode, value: object, answer: object, branches: Sequence[BranchPath] = ((),)) -> None:
    """Set the reward of one answer, by the id of its response, or the final one, for the answer None.

    `branches` are the branch of the client that sets it, and those that it may reward beside it.

    Raises:
        RewardError: the value is no reward.
        CallRefused: the episode has ended, has no answer with the id, or there is a reward already.
    """
    if not episode.is_open:
        raise CallRefused("the episode has ended; its reward can no longer be set", status=409)
    value = plain_reward(value)
    if answer is None:
        _set_final(episode, value)
    elif isinstance(answer, str):
        _set_for_answer(episode, answer, value, branches)
    else:
        raise CallRefused(f"response_id is the id of an answer, as text; got {answer!r:.80}")


def find_turn(episode: Episode, response_id: str) -> int | None:
    """Return the turn of a response, whatever dialect it has; None if it is none of the episode."""
    known = (episode.turn_of(dialect.answer_id(response_id)) for dialect in DIALECTS.values())
    return next((each for each in known if each is not None), None)


def _set_final(episode: Episode, value: object) -> None:
    if episode.final_reward is not None:
        raise CallRefused(
            f"the episode has the final reward {episode.final_reward} already; a reward is set once", status=409
        )
    episode.reward_final(value)


def _set_for_answer(episode: Episode, answer: str, value: object, branches: Sequence[BranchPath]) -> None:
    turn = find_turn(episode, answer)
    if turn is None:
        raise CallRefused(f"no answer of this episode has the id {answer!r:.120}", status=404)
    present = episode.turns[turn].reward
    if present is not None:
        raise CallRefused(f"the answer {answer} has the reward {present} already; a reward is set once", status=409)
    own = episode.turns[turn].branch
    episode.reward_turn(turn, value, own if own in branches else branches[0])
