"""Recorded data that contradicts itself is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from agentrl.errors import InvariantError
from agentrl.tokens.renderer import Renderer
from agentrl.tokens.verify import verify
from agentrl.types import Trajectory, Turn, VersionSpan
from tests.tokens.dialogues import user
from tests.tokens.play import Player


@pytest.fixture
def trajectory(renderer_of: Callable[..., Renderer]) -> Trajectory:
    player = Player(renderer_of("qwen25"))
    message = player.ask([user("1?")], "one", version=1)
    for question in ("2?", "other 2?"):
        player.ask([user("1?"), message, user(question)], "two", version=2)
    return player.trajectory()


def changed(trajectory: Trajectory, turn: int, **fields: Any) -> Trajectory:  # noqa: ANN401 - any field of a turn
    turns: list[Turn] = list(trajectory.turns)
    turns[turn] = replace(turns[turn], **fields)
    return replace(trajectory, turns=tuple(turns))


def test_a_recorded_episode_verifies(trajectory: Trajectory):
    verify(trajectory)
    verify(replace(trajectory, turns=()))


def test_changed_ids_are_found(trajectory: Trajectory):
    ids = trajectory.turns[0].output_ids.copy()
    ids[0] += 1
    with pytest.raises(InvariantError, match="episode episode, turn 1: the recorded ids are not the request that was sent"):
        verify(changed(trajectory, 0, output_ids=ids))
    with pytest.raises(InvariantError, match="turn 0: the recorded ids are not"):
        verify(changed(trajectory, 0, context_ids=trajectory.turns[0].context_ids[:-1]))
    with pytest.raises(InvariantError, match="recorded none"):
        verify(changed(trajectory, 2, prompt_digest=b""))


def test_ids_shifted_between_context_and_output_are_found(trajectory: Trajectory):
    first = trajectory.turns[0]
    moved = np.concatenate([first.context_ids, first.output_ids[:1]])
    shifted = changed(
        trajectory,
        0,
        context_ids=moved,
        output_ids=first.output_ids[1:],
        output_logprobs=first.output_logprobs[1:],
        spans=(VersionSpan(start=0, end=len(first.output_ids) - 1, version=1),),
    )
    with pytest.raises(InvariantError, match="turn 0: the recorded ids"):
        verify(shifted)


def test_a_wrong_parent_is_found(trajectory: Trajectory):
    with pytest.raises(InvariantError, match="turn 2: the recorded ids"):
        verify(changed(trajectory, 2, parent=1))
    with pytest.raises(InvariantError, match="turn 2: its parent is turn 2"):
        verify(changed(trajectory, 2, parent=2))
    with pytest.raises(InvariantError, match="turn 2: its parent is turn 1; expected one of the first 1"):
        verify(changed(trajectory, 2, parent=1, sent_after=1))


def test_a_turn_sent_after_turns_that_were_not_complete_is_found(trajectory: Trajectory):
    with pytest.raises(InvariantError, match="turn 1: it was sent after 2 turns; expected 0 to 1"):
        verify(changed(trajectory, 1, sent_after=2))


def test_versions_that_go_back_are_found(trajectory: Trajectory):
    span = trajectory.turns[1].spans[0]._replace(version=0)
    with pytest.raises(InvariantError, match="policy version went back from 1 to 0"):
        verify(changed(trajectory, 1, spans=(span,)))


def test_greedy_turns_are_not_trained(trajectory: Trajectory):
    verify(changed(trajectory, 1, temperature=0.0))
