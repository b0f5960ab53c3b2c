"""From the groups of a batch to the advantages of its tokens: checks, the estimate of the slot, its scale, and the spread.

Invariant: a failed episode, or one without a reward, never reaches an estimate. No result is NaN or infinite, and a group
that teaches nothing has advantages of exactly 0, also where they are scaled: nothing is subtracted, so an estimate without
bias keeps its direction. numpy only: this runs in the driver.

`Trajectory.advantage`, from `score_group`, goes to each turn as it is (ADR 15), whatever the estimate is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, Literal, TypeAlias

import msgspec
import numpy as np

from agentrl.algo.advantages import GroupAdvantages
from agentrl.algo.advantages.gae import ValueEstimate
from agentrl.algo.advantages.parts import ROUNDING, Float64Array
from agentrl.algo.config import AlgorithmConfig
from agentrl.algo.slots import Loaded, load_without_torch
from agentrl.episode.checks import MAX_REWARD, check_reward_time
from agentrl.errors import InvariantError
from agentrl.types import Float32Array, Group, Sample, Trajectory

GroupLogprobs: TypeAlias = Sequence[Sequence[Float32Array]]
"""For each episode of a group and each of its turns: [output tokens] nats, under the trainer's weights."""
Normalization: TypeAlias = Literal["group", "batch", "running"]
DECAY: Final = 0.99
"""Share of its weight that a batch keeps when the next one comes, under `running`: about 100 batches count."""


def advantages(group: Group, config: AlgorithmConfig) -> GroupAdvantages:
    """Return the advantage of every turn of every episode of `group`, by the function that fills `algorithm.advantage`."""
    [estimate] = batch_advantages([group], config)
    return estimate


def batch_advantages(
    groups: Sequence[Group],
    config: AlgorithmConfig,
    values: Sequence[Sequence[Sequence[Float32Array]]] | None = None,
    logprobs: Sequence[GroupLogprobs] | None = None,
) -> list[GroupAdvantages]:
    """Return the advantages of all groups of a batch.

    `values` are the critic's, for each group, episode and turn: [output tokens]. `logprobs` are of the current policy. Each
    is given where the function needs it.

    Raises:
        ConfigError: the function of the slot cannot be loaded, raised, or returned no sequence.
        InvariantError: as `advantages_by`, or log-probs are needed and not given.
    """
    slot = config.slots.advantage
    function = load_without_torch(slot, Sequence)
    if "values" in slot.needs:
        if values is None:
            raise InvariantError(f"algorithm.advantage: {slot.name} needs the critic's values, and the batch has none")
        return [valued_advantages(group, function, own, slot.name) for group, own in zip(groups, values, strict=True)]
    if "logprobs" not in slot.needs:
        estimates = [advantages_by(group, function, name=slot.name) for group in groups]
    elif logprobs is None:
        raise InvariantError(f"algorithm.advantage: {slot.name} needs the log-probs of the trainer, and got none")
    else:
        estimates = [
            advantages_by(group, partial(_with_logprobs, function, own), name=slot.name)
            for group, own in zip(groups, logprobs, strict=True)
        ]
    if "batch" not in slot.needs:
        return estimates
    return _whitened(groups, estimates)


def _whitened(groups: Sequence[Group], estimates: Sequence[GroupAdvantages]) -> list[GroupAdvantages]:
    """Return the advantages normalized over the batch; those that `score_group` gave stay, and count nowhere."""
    ours = [at for at, group in enumerate(groups) if not any(each.advantage is not None for each in group.episodes)]
    tokens = [[_trained_tokens(episode) for episode in groups[at].episodes] for at in ours]
    result = list(estimates)
    for at, values in zip(ours, whiten([estimates[at].per_turn for at in ours], tokens), strict=True):
        result[at] = GroupAdvantages(per_turn=tuple(values), zero_variance=not any(each.any() for each in values))
    return result


def valued_advantages(
    group: Group,
    estimate: Loaded[Sequence[ValueEstimate]],
    values: Sequence[Sequence[Float32Array]],
    name: str,
) -> GroupAdvantages:
    """Return the advantages of tokens that follow from the critic's values, and its targets; `estimate` is called `name`.

    Raises:
        InvariantError: as `advantages_by`, or a value is not finite.
    """
    found = list(estimate(group, values))

    def first_of_turns(of: Group) -> Sequence[Float64Array]:
        # Those of the first tokens; a turn without one has none.
        return [np.array([turn[0] if len(turn) else 0.0 for turn in one.advantages], np.float64) for one in found]

    checked = advantages_by(group, first_of_turns, name=name)
    targets = tuple(one.targets for one in found)
    if any(each.advantage is not None for each in group.episodes):
        return replace(checked, targets=targets)
    per_token = tuple(one.advantages for one in found)
    if not all(np.isfinite(turn).all() for one in found for turn in (*one.advantages, *one.targets)):
        raise InvariantError(f"algorithm.advantage: {name} has a value that is not finite for group {group.index}")
    nothing = not any(turn.any() for one in per_token for turn in one)
    return replace(checked, per_token=per_token, targets=targets, zero_variance=nothing)


def _with_logprobs(
    function: Callable[[Group, GroupLogprobs], Sequence[Float64Array]], logprobs: GroupLogprobs, group: Group
) -> Sequence[Float64Array]:
    return function(group, logprobs)


def _trained_tokens(episode: Trajectory) -> Float64Array:
    return np.array([len(turn.output_ids) if turn.in_loss else 0 for turn in episode.turns], np.float64)


def advantages_by(
    group: Group, estimate: Callable[[Group], Sequence[Float64Array]], *, name: str = "advantage"
) -> GroupAdvantages:
    """Return what `estimate`, called `name` in messages, gives for `group`, checked.

    Raises:
        InvariantError: an episode failed, has no reward or only some of the advantages, or its turns are out of order; or
            the estimate has another shape than the turns, or a value that is not finite.
    """
    where = f"group {group.index}, task {group.task.id!r}"
    if not group.episodes:
        raise InvariantError(f"{where}: expected at least one episode, got none")
    for each in group.episodes:
        _check_episode(each, where)
    if any(each.advantage is not None for each in group.episodes):
        return _given_advantages(group, where)
    per_turn = tuple(estimate(group))
    shapes = [np.shape(values) for values in per_turn]
    expected = [(len(each.turns),) for each in group.episodes]
    if shapes != expected:
        raise InvariantError(
            f"algorithm.advantage: {name} returned arrays of the shapes {shapes} for {where}; expected {expected}, one "
            "number for each turn of each episode"
        )
    per_turn = tuple(np.asarray(values, np.float64) for values in per_turn)
    for each, values in zip(group.episodes, per_turn, strict=True):
        if not np.isfinite(values).all():
            raise InvariantError(
                f"algorithm.advantage: {name} returned {values.tolist()} for episode {each.episode_id!r} of {where}; "
                "expected finite numbers; look for a division by a spread or a count of 0"
            )
    return GroupAdvantages(per_turn=per_turn, zero_variance=not any(values.any() for values in per_turn))


def _given_advantages(group: Group, where: str) -> GroupAdvantages:
    per_turn: list[Float64Array] = []
    for episode in group.episodes:
        given = episode.advantage
        if given is None or not abs(given) <= MAX_REWARD:
            raise InvariantError(
                f"{where}, episode {episode.episode_id!r}: expected a finite advantage, as other episodes of the group "
                f"have, got {given}; score_group gives advantages to all members or to none"
            )
        per_turn.append(np.full(len(episode.turns), given, np.float64))
    return GroupAdvantages(per_turn=tuple(per_turn), zero_variance=not any(values.any() for values in per_turn))


def token_advantages(sample: Sample, per_turn: Float64Array) -> Float32Array:
    """Return each token's advantage, [L] float32, 0 outside `loss_mask`; `per_turn` is its episode's, [turns] float64."""
    _check_turns(sample, len(per_turn))
    if not len(per_turn):
        return np.zeros(len(sample.loss_mask), np.float32)
    return np.where(sample.loss_mask, per_turn[sample.turn_index], 0.0).astype(np.float32)


def spread_over_tokens(sample: Sample, by_turn: Sequence[Float64Array | Float32Array]) -> Float32Array:
    """Return, [L] float32, what each turn has for its output tokens, 0 outside `loss_mask`."""
    _check_turns(sample, len(by_turn))
    result = np.zeros(len(sample.loss_mask), np.float32)
    for turn in np.unique(sample.turn_index[sample.loss_mask]).tolist():
        at = np.flatnonzero(sample.turn_index == turn)
        result[at[len(at) - len(by_turn[turn]) :]] = by_turn[turn]
    return np.where(sample.loss_mask, result, np.float32(0))


def _check_turns(sample: Sample, count: int) -> None:
    if len(sample.turn_index) and not 0 <= sample.turn_index.min() <= sample.turn_index.max() < count:
        raise InvariantError(
            f"expected turn indices below {count}, one advantage per turn, got up to {sample.turn_index.max()}; "
            "the advantages are another episode's"
        )


def _check_episode(episode: Trajectory, where: str) -> None:
    where = f"{where}, episode {episode.episode_id!r}"
    if episode.failure is not None:
        raise InvariantError(
            f"{where}: a failed episode ({episode.failure.kind}) has no return and must not reach the advantages; "
            "the group is completed or dropped before"
        )
    rewards = [turn.reward for turn in episode.turns if turn.reward is not None]
    if episode.final_reward is not None:
        rewards.append(episode.final_reward)
    if not rewards:
        raise InvariantError(f"{where}: no turn has a reward and there is no final one; it would be trained as 0")
    for reward in rewards:
        if not abs(reward) <= MAX_REWARD:
            raise InvariantError(f"{where}: expected finite rewards of at most {MAX_REWARD:g}, got {reward}")
    for index, turn in enumerate(episode.turns):
        if not 0 <= turn.sent_after <= index:
            raise InvariantError(f"{where}: turn {index} was sent after {turn.sent_after} turns; expected 0 to {index}")
        if turn.parent is not None and not 0 <= turn.parent < turn.sent_after:
            raise InvariantError(
                f"{where}: turn {index}, sent after {turn.sent_after} turns, has parent {turn.parent}; expected a turn that "
                "was complete when the request was sent"
            )
        check_reward_time(turn, f"{where}, turn {index}")


class RunningSquare(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The advantages of all batches so far, the older the less."""

    tokens: float = 0.0
    """Their weights together."""
    squares: float = 0.0
    """Sum over tokens of weight * A^2."""

    def followed_by(self, tokens: float, squares: float) -> RunningSquare:
        """Return the sums after a batch of `tokens` with this sum of squares.

        Example:
            >>> RunningSquare(100.0, 100.0).followed_by(1.0, 4.0)
            RunningSquare(tokens=100.0, squares=103.0)
        """
        return RunningSquare(DECAY * self.tokens + tokens, DECAY * self.squares + squares)


NO_BATCHES: Final = RunningSquare()


def scaled_advantages(
    groups: Sequence[Group], estimates: Sequence[GroupAdvantages], kind: Normalization, before: RunningSquare
) -> tuple[list[GroupAdvantages], RunningSquare]:
    """Return the advantages over their scale, and the running sums after this batch; `running` counts this batch too.

    Advantages that `score_group` gave stay as they are and count nowhere.
    """
    ours = [not any(each.advantage is not None for each in group.episodes) for group in groups]
    sums = [_sums(group, one) for group, one in zip(groups, estimates, strict=True)]
    tokens, squares = (math.fsum(each[at] for each, own in zip(sums, ours, strict=True) if own) for at in (0, 1))
    after = before.followed_by(tokens, squares) if kind == "running" else before
    whole = (after.tokens, after.squares) if kind == "running" else (tokens, squares)
    result = [
        _over(one, _root(*(of_group if kind == "group" else whole))) if own else one
        for one, of_group, own in zip(estimates, sums, ours, strict=True)
    ]
    return result, after


def _sums(group: Group, estimate: GroupAdvantages) -> tuple[float, float]:
    """Return the number of trained tokens of a group, and the sum of their squared advantages."""
    counts: list[float] = []
    squares: list[float] = []
    for at, episode in enumerate(group.episodes):
        for number, turn in enumerate(episode.turns):
            size = len(turn.output_ids) if turn.in_loss else 0
            if not size:
                continue
            counts.append(size)
            if estimate.per_token is None:
                squares.append(size * float(estimate.per_turn[at][number]) ** 2)
            else:
                squares.append(float(np.square(estimate.per_token[at][number]).sum()))
    return math.fsum(counts), math.fsum(squares)


def _root(tokens: float, squares: float) -> float:
    return math.sqrt(squares / tokens) if tokens and squares else 1.0


def _over(estimate: GroupAdvantages, scale: float) -> GroupAdvantages:
    def divided(values: Float64Array) -> Float64Array:
        return values / scale

    per_token = estimate.per_token
    return replace(
        estimate,
        per_turn=tuple(divided(values) for values in estimate.per_turn),
        per_token=None if per_token is None else tuple(tuple(divided(turn) for turn in one) for one in per_token),
    )


def whiten(
    per_group: Sequence[Sequence[Float64Array]], tokens: Sequence[Sequence[Float64Array]]
) -> list[list[Float64Array]]:
    """Return (A - mean) / std of all turns of a batch, each weighted by its tokens of the loss (arXiv 2501.03262, eq. 8).

    Both arguments hold, for each group, one [turns] array for each episode. A turn without tokens has no weight.
    """
    flat = np.concatenate([values for group in per_group for values in group] or [np.zeros(0)])
    weights = np.concatenate([counts for group in tokens for counts in group] or [np.zeros(0)])
    largest = float(np.abs(flat).max(initial=0.0)) or 1.0
    total = math.fsum(weights)
    scaled = flat / largest
    mean = math.fsum(weights * scaled) / total if total else 0.0
    deviation = math.sqrt(math.fsum(weights * (scaled - mean) ** 2) / total) if total else 0.0
    if deviation <= ROUNDING:
        return [[np.zeros(len(values)) for values in group] for group in per_group]
    return [[(values / largest - mean) / deviation for values in group] for group in per_group]
