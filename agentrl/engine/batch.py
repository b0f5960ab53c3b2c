"""Turn the groups of a step into the batch for its trainer. Pure, and safe to run in a thread.

Invariant: no loss mask covers a token over the staleness bound, a greedily sampled token or a token of a failed episode.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import numpy as np

from agentrl.algo.advantages import GroupAdvantages
from agentrl.algo.batch_advantages import (
    NO_BATCHES,
    GroupLogprobs,
    RunningSquare,
    batch_advantages,
    scaled_advantages,
    spread_over_tokens,
    token_advantages,
)
from agentrl.algo.config import AlgorithmConfig
from agentrl.algo.group_slots import kl_estimate, shaped_groups, with_kl_rewards, without_left_out
from agentrl.algo.slots import load_without_torch
from agentrl.episode.summary import episode_metrics, history_counts, staleness_metrics, trained_record, uniform_outcome
from agentrl.errors import StaleDataError
from agentrl.tokens.verify import trained_digests, verify
from agentrl.trainer.base import StepReport, TrainBatch, TrainSample
from agentrl.types import Float32Array, Group, Int32Array, Sample, Trajectory

ByTurn: TypeAlias = Sequence[Sequence[Sequence[Float32Array]]]
"""For each group, episode and turn: [output tokens] float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedGroups:
    """The groups of a batch, proven, with what models say about their tokens."""

    groups: Sequence[Group]
    branches: Sequence[Sequence[Sequence[Sample]]]
    """For each group and episode: its branches."""
    values: ByTurn | None = None
    """Of the critic; None: there is none."""
    logprobs: Sequence[GroupLogprobs] | None = None
    """Under the trainer's weights; None: the advantage does not need them."""
    reference_logprobs: ByTurn | None = None
    """Of the reference, nats; None: rewards do not need them."""

    @classmethod
    def of(cls, groups: Sequence[Group]) -> VerifiedGroups:
        """Return `groups` without a model's numbers; InvariantError: a branch is not what its server saw."""
        return cls(groups=groups, branches=[[verify(episode) for episode in group.episodes] for group in groups])


def needs_models(algorithm: AlgorithmConfig) -> bool:
    """Return whether the advantages of `algorithm` need a model's numbers; see `agentrl.engine.estimates`."""
    slots, reference = algorithm.slots, algorithm.reference
    pays_for_reference = reference is not None and reference.reward_weight != 0
    return "values" in slots.needs or "logprobs" in slots.advantage.needs or pays_for_reference


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedBatch:
    """The input of a training step, with its statistics."""

    batch: TrainBatch
    metrics: Mapping[str, float]
    """The `agentrl.episode.summary` that depend on the batch alone."""
    staleness: Int32Array
    """[loss tokens] int32: versions between sampling and training."""
    masked_tokens: int
    """Tokens removed from the loss because they were over age."""
    shaped_out_tokens: int
    """Tokens removed from the loss by `algorithm.shaping`."""
    skip: str | None
    """Why a step on this batch cannot change the weights; None when it can."""
    episode_ids: tuple[str, ...] = ()
    """The episode of each sample of `batch`."""
    advantages: tuple[tuple[float, ...], ...] = ()
    """The advantage of each turn of each episode, in the order of the groups."""
    seen: RunningSquare = NO_BATCHES
    """What `algorithm.normalize: running` has seen after this batch."""


def prepare_batch(
    verified: VerifiedGroups, *, version: int, algorithm: AlgorithmConfig, before: RunningSquare = NO_BATCHES
) -> PreparedBatch:
    """Return the batch for a trainer at policy `version`; `skip` is set where its gradient is exactly zero.

    `before` is what `algorithm.normalize: running` has seen in earlier batches.

    Raises:
        StaleDataError: a token is over the bound and `staleness_policy` is not `mask`.
        InvariantError: an episode failed, or has no reward.
    """
    groups = verified.groups
    verified, shaped_out = _shaped(verified, algorithm)
    samples: list[TrainSample] = []
    episode_ids: list[str] = []
    staleness: list[Int32Array] = []
    masked = zero_variance = 0
    uniform = {"right": 0, "wrong": 0}
    by_turn: list[tuple[float, ...]] = []
    names = _Names(groups)
    estimated = _estimated(verified, algorithm, before)
    values = verified.values or [None] * len(groups)
    for group, branches, estimate, of_group in zip(groups, verified.branches, estimated.groups, values, strict=True):
        zero_variance += estimate.zero_variance
        if estimate.zero_variance and (outcome := uniform_outcome(group.episodes)):
            uniform[outcome] += 1
        by_turn += [tuple(values.tolist()) for values in estimate.per_turn]
        for at, (episode, episode_branches) in enumerate(zip(group.episodes, branches, strict=True)):
            for branch in episode_branches:
                sample, over_age = _within_bound(branch, group, version, algorithm)
                masked += over_age
                if sample.loss_mask.any():
                    item = names.train_sample(sample, group, episode, _of_tokens(sample, estimate, at))
                    samples.append(item if of_group is None else _with_values(item, of_group[at], estimate, at))
                    episode_ids.append(episode.episode_id)
                    staleness.append(version - sample.token_versions[sample.loss_mask])
    teaches_nothing = zero_variance == len(groups) and not algorithm.slots.dense
    ages = np.concatenate(staleness) if staleness else np.empty(0, np.int32)
    return PreparedBatch(
        batch=TrainBatch(
            samples=tuple(samples), policy_version=version, roles=tuple(names.roles), players=tuple(names.players)
        ),
        metrics={
            **_group_metrics(groups),
            **staleness_metrics(ages),
            "zero_variance_groups": zero_variance,
            **{f"zero_variance_groups_by_outcome.{outcome}": count for outcome, count in uniform.items()},
            "signal_share": 1 - zero_variance / len(groups) if groups else 0.0,
            "loss_tokens": len(ages),
            **estimated.metrics,
            "masked_tokens": masked + shaped_out,
        },
        staleness=ages,
        masked_tokens=masked,
        shaped_out_tokens=shaped_out,
        skip="no_tokens" if not samples else "zero_variance" if teaches_nothing else None,
        episode_ids=tuple(episode_ids),
        advantages=tuple(by_turn),
        seen=estimated.seen,
    )


def _shaped(verified: VerifiedGroups, algorithm: AlgorithmConfig) -> tuple[VerifiedGroups, int]:
    """Return what `algorithm.shaping` makes of the groups, and the number of tokens that it takes out of the loss."""
    slot = algorithm.slots.shaping
    if slot.name == "none":
        return verified, 0
    groups = shaped_groups(verified.groups, load_without_torch(slot, Group))
    branches = [
        [
            [without_left_out(branch, episode) for branch in of_episode]
            for episode, of_episode in zip(group.episodes, own, strict=True)
        ]
        for group, own in zip(groups, verified.branches, strict=True)
    ]
    removed = _loss_tokens(verified.branches) - _loss_tokens(branches)
    return replace(verified, groups=groups, branches=branches), removed


def _loss_tokens(branches: Sequence[Sequence[Sequence[Sample]]]) -> int:
    return sum(int(one.loss_mask.sum()) for of_group in branches for of_episode in of_group for one in of_episode)


class _Estimated(NamedTuple):
    groups: Sequence[GroupAdvantages]
    metrics: Mapping[str, float]
    seen: RunningSquare


def _estimated(verified: VerifiedGroups, algorithm: AlgorithmConfig, before: RunningSquare) -> _Estimated:
    """Return the advantages of each group: of rewards that pay for the KL to the reference, at the scale of the run file."""
    rewarded, kl = _with_reference(verified, algorithm)
    estimates = batch_advantages(rewarded, algorithm, verified.values, verified.logprobs)
    metrics = {} if kl is None else {"kl_reference": kl}
    if algorithm.normalize == "none":
        return _Estimated(estimates, metrics, before)
    scaled_ones, seen = scaled_advantages(verified.groups, estimates, algorithm.normalize, before)
    return _Estimated(scaled_ones, metrics, seen)


def _group_metrics(groups: Sequence[Group]) -> dict[str, float]:
    episodes = [episode for group in groups for episode in group.episodes]
    return {**episode_metrics(episodes), **history_counts(episodes), "groups": len(groups)}


def _with_reference(verified: VerifiedGroups, algorithm: AlgorithmConfig) -> tuple[Sequence[Group], float | None]:
    """Return the groups with the KL to the reference in their rewards, and its mean over trained tokens, if there is one."""
    reference, logprobs = algorithm.reference, verified.reference_logprobs
    if reference is None or logprobs is None:
        return verified.groups, None
    pairs = [
        (turn, own)
        for group, of_group in zip(verified.groups, logprobs, strict=True)
        for episode, of_episode in zip(group.episodes, of_group, strict=True)
        for turn, own in zip(episode.turns, of_episode, strict=True)
        if turn.in_loss
    ]
    found = [kl_estimate(turn.output_logprobs, own, reference.reward_k) for turn, own in pairs]
    joined = np.concatenate([np.empty(0), *found])
    rewarded = with_kl_rewards(verified.groups, logprobs, weight=reference.reward_weight, k=reference.reward_k)
    return rewarded, float(joined.mean()) if len(joined) else 0.0


def _of_tokens(sample: Sample, estimate: GroupAdvantages, at: int) -> Float32Array:
    """Return the advantage of each token of a sample of the group's episode `at`, [L] float32."""
    if estimate.per_token is None:
        return token_advantages(sample, estimate.per_turn[at])
    return spread_over_tokens(sample, estimate.per_token[at])


def _with_values(item: TrainSample, values: Sequence[Float32Array], estimate: GroupAdvantages, at: int) -> TrainSample:
    if estimate.targets is None:
        return item
    targets = spread_over_tokens(item.sample, estimate.targets[at])
    return replace(item, values=spread_over_tokens(item.sample, values), value_targets=targets)


class _Names:
    """The roles and players of a batch, by which losses tell turns apart."""

    def __init__(self, groups: Sequence[Group]) -> None:
        turns = [turn for group in groups for episode in group.episodes for turn in episode.turns]
        self.roles = sorted({turn.role for turn in turns}) or [""]
        self.players = sorted({turn.player for turn in turns}) or [""]

    def train_sample(self, sample: Sample, group: Group, episode: Trajectory, advantages: Float32Array) -> TrainSample:
        roles = np.array([self.roles.index(turn.role) for turn in episode.turns], np.int32)
        players = np.array([self.players.index(turn.player) for turn in episode.turns], np.int32)
        return TrainSample(
            sample=sample,
            advantages=advantages,
            group=group.index,
            episode_return=episode.episode_return,
            roles=roles[sample.turn_index] if len(self.roles) > 1 else None,
            players=players[sample.turn_index] if len(self.players) > 1 else None,
        )


def trained_records(
    groups: Sequence[Group], prepared: PreparedBatch, report: StepReport, *, step: int
) -> Iterator[Mapping[str, object]]:
    """Yield the line of `episodes/trained-NNNNNN.jsonl.gz` for each episode of the batch, in the order of the groups."""
    places: dict[str, list[int]] = {}
    for place, episode_id in enumerate(prepared.episode_ids):
        places.setdefault(episode_id, []).append(place)
    for group in groups:
        for episode in group.episodes:
            advantages: list[float | None] = [None] * len(episode.turns)
            proximal: list[Float32Array | None] = [None] * len(episode.turns)
            digests: list[str | None] = [None] * len(episode.turns)
            for place in places.get(episode.episode_id, ()):
                item, found = prepared.batch.samples[place], report.proximal_logprobs.get(place)
                by_token = np.full(len(item.sample.token_ids), np.nan, np.float32)
                by_token[item.sample.loss_mask] = np.nan if found is None else found
                trained = np.flatnonzero(item.sample.loss_mask)
                of_turns = trained_digests(item.sample)
                for turn in np.unique(item.sample.turn_index[trained]).tolist():
                    digests[turn] = of_turns[turn]
                    of_turn = trained[item.sample.turn_index[trained] == turn]
                    advantages[turn] = float(item.advantages[of_turn[0]])
                    if found is not None:
                        count = len(episode.turns[turn].output_ids)
                        proximal[turn] = by_token[np.flatnonzero(item.sample.turn_index == turn)[-count:]]
            yield trained_record(
                episode,
                step=step,
                policy_version=prepared.batch.policy_version,
                advantages=advantages,
                proximal_logprobs=proximal,
                digests=digests,
            )


def _within_bound(branch: Sample, group: Group, version: int, algorithm: AlgorithmConfig) -> tuple[Sample, int]:
    """Return `branch` with its over-age tokens masked, and their number."""
    over_age = branch.loss_mask & (branch.token_versions < version - algorithm.max_staleness)
    count = int(over_age.sum())
    if not count:
        return branch, 0
    if algorithm.staleness_policy != "mask":
        oldest = int(branch.token_versions[over_age].min())
        raise StaleDataError(
            f"group {group.index} (admitted at version {group.admitted_version}): {count} tokens, the oldest of version "
            f"{oldest}, would be trained at version {version}, over max_staleness {algorithm.max_staleness}; "
            "the rule that put it into this batch is broken"
        )
    return replace(branch, loss_mask=branch.loss_mask & ~over_age), count
