"""What models say about the tokens of a batch, by turn, and what a batch makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from agentrl.algo.config import AlgorithmConfig
from agentrl.engine.batch import VerifiedGroups, prepare_batch, trained_records
from agentrl.engine.estimates import by_turn
from agentrl.trainer.base import StepReport
from agentrl.types import Group, Task, Trajectory
from agentrl_testing.properties.plain_episodes import plain_episode, plain_turn

PAIR = AlgorithmConfig(group_size=2, groups_per_step=1)


def group_of(*episodes: Trajectory) -> Group:
    named = tuple(replace(one, episode_id=str(at)) for at, one in enumerate(episodes))
    return Group(index=0, task=Task(id="t", data={}), episodes=named, admitted_version=0)


def unsent(group: Group) -> VerifiedGroups:
    """Return a group of plain episodes, whose calls no server has seen."""
    return VerifiedGroups(groups=[group], branches=[[one.branches() for one in group.episodes]])


def test_a_turn_that_branches_share_has_the_numbers_of_its_first_branch() -> None:
    root, left, right = plain_turn(tokens=2), plain_turn(parent=0, tokens=1), plain_turn(parent=0, tokens=3)
    group = group_of(plain_episode([root, left, right]))
    branches = [one.branches() for one in group.episodes]
    first, second = (np.arange(10.0 * at, 10.0 * at + len(one.token_ids) - 1) for at, one in enumerate(branches[0], 1))
    [[found]] = by_turn([group], [branches], [first.astype(np.float32), second.astype(np.float32)])
    assert [own.tolist() for own in found] == [[10, 11], [13], [23, 24, 25]]  # token 0 has none, so token t has number t - 1


def test_the_kl_of_a_batch_is_the_mean_of_the_tokens_that_may_be_trained() -> None:
    sampled, greedy = plain_turn(tokens=2), replace(plain_turn(parent=0, tokens=3), temperature=0.0)
    group = group_of(*(plain_episode([sampled, greedy], final) for final in (0.0, 1.0)))
    algorithm = PAIR.model_copy(update={"reference": AlgorithmConfig(reference={"reward_weight": 0.1}).reference})
    reference = [np.array([-0.75, -1.25], np.float32), np.full(3, -9.0, np.float32)]  # the policy's are -0.5
    verified = replace(unsent(group), reference_logprobs=[[reference, reference]])
    assert prepare_batch(verified, version=0, algorithm=algorithm).metrics["kl_reference"] == (0.25 + 0.75) / 2
    left_out = group_of(*(replace(one, turns=(replace(one.turns[0], left_out=True), greedy)) for one in group.episodes))
    verified = replace(unsent(left_out), reference_logprobs=[[reference, reference]])
    assert prepare_batch(verified, version=0, algorithm=algorithm).metrics["kl_reference"] == 0.0


def test_roles_and_players_of_a_batch_are_told_apart_token_by_token() -> None:
    def game(roles: Sequence[str], players: Sequence[str], final: float) -> Trajectory:
        turns = [plain_turn(None, at - 1 if at else None, tokens=at + 1) for at in range(len(roles))]
        named = [replace(turn, role=role, player=player) for turn, role, player in zip(turns, roles, players, strict=True)]
        return plain_episode(named, final)

    group = group_of(game(["judge", "author", "judge"], ["x", "x", "x"], 0.0), game(["author"], ["x"], 1.0))
    batch = prepare_batch(unsent(group), version=0, algorithm=PAIR).batch
    assert (batch.roles, batch.players) == (("author", "judge"), ("x",))
    first, second = (item.roles for item in batch.samples)
    assert first is not None
    assert second is not None
    trained = [item.sample.loss_mask for item in batch.samples]
    assert (first[trained[0]].tolist(), second[trained[1]].tolist()) == ([1, 0, 0, 1, 1, 1], [0])
    assert [item.players for item in batch.samples] == [None, None]

    group = group_of(*(game(["a", "a"], ["white", "black"], final) for final in (0.0, 1.0)))
    batch = prepare_batch(unsent(group), version=0, algorithm=PAIR).batch
    assert (batch.roles, batch.players) == (("a",), ("black", "white"))
    for item in batch.samples:
        assert item.roles is None
        assert item.players is not None
        assert item.players[item.sample.loss_mask].tolist() == [1, 0, 0]


@pytest.mark.parametrize("over_age", [0, 1])
def test_the_record_of_a_turn_has_the_advantage_of_its_first_trained_token(over_age: int) -> None:
    group = group_of(plain_episode([plain_turn(tokens=3)], 1.0), plain_episode([plain_turn()], 0.0))
    prepared = prepare_batch(unsent(group), version=0, algorithm=PAIR)
    item = prepared.batch.samples[0]
    trained = np.flatnonzero(item.sample.loss_mask)
    by_token = np.zeros(len(item.sample.token_ids), np.float32)
    by_token[trained] = [0.25, 0.5, 0.75]
    mask = item.sample.loss_mask.copy()
    mask[trained[:over_age]] = False
    item = replace(item, advantages=by_token, sample=replace(item.sample, loss_mask=mask))
    batch = replace(prepared.batch, samples=(item, *prepared.batch.samples[1:]))
    record, _ = trained_records([group], replace(prepared, batch=batch), StepReport(), step=1)
    turns = record["turns"]
    assert isinstance(turns, list)
    assert turns[0]["advantage"] == [0.25, 0.5][over_age]
