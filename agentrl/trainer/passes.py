"""Builds forward passes and the loss's input from a minibatch, and checks a batch.

Invariant: a pass holds whole samples; the loss gets their loss tokens alone. A filler pass keeps a rank in step with the
others: its weight is 0, so it trains nothing, whatever the loss is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.algo.loss_batch import LossBatch, LossTotals
from agentrl.algo.loss_metrics import Marks
from agentrl.algo.packing import DealtPass
from agentrl.errors import InvariantError, StaleDataError
from agentrl.trainer.base import TrainBatch, TrainSample
from agentrl.trainer.model import Microbatch, PolicyModel, TokenOutputs
from agentrl.types import BoolArray, Float32Array, Int32Array, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardPass:
    """One forward pass of a minibatch; every tensor is [T], one value for each token of the loss."""

    batch: Microbatch
    given: LossBatch
    """The loss's input, with the behavior log-probs in place of the model's."""
    turns: Tensor
    """Number of the turn in its episode."""
    interrupted: Tensor
    tokens: int
    """Tokens that it computes, padding not counted."""
    shared_tokens: int
    """Tokens of its samples that others of its samples compute."""
    samples: tuple[int, ...]
    """Places of its samples in the batch."""
    ends: tuple[int, ...]
    """Ends of the trained tokens of each sample among the T."""
    weight: float
    """1, or 0 where another rank trains these samples and this rank only keeps step."""

    @property
    def is_filler(self) -> bool:
        return self.weight == 0

    def loss_batch(self, outputs: TokenOutputs) -> LossBatch:
        """Return what the loss gets; its proximal log-probs are the current ones until others take their place."""
        current = outputs.logprobs
        assert current is not None
        return replace(
            self.given,
            current_logprobs=current,
            proximal_logprobs=current.detach(),
            entropy=outputs.entropy,
            values=outputs.values,
        )

    def marks(self, *, compared: bool) -> Marks:
        """Return what diagnostics read; without `compared`, no proximal log-prob is a forward pass's."""
        fresh = self.given.ages == 0 if compared else None
        interrupted = self.interrupted if compared else None
        return Marks(fresh=fresh, interrupted=interrupted, ages=self.given.ages, turns=self.turns)


def has_gradient(item: TrainSample) -> bool:
    """Return whether a trained token of `item` has an advantage other than 0 (NaN counts)."""
    return bool((item.advantages[item.sample.loss_mask] != 0).any())


def is_computed(item: TrainSample, *, dense: bool) -> bool:
    """Return whether `item` needs a forward pass; with `dense`, tokens of advantage 0 have a gradient too."""
    return bool(item.sample.loss_mask.any()) if dense else has_gradient(item)


def loss_totals(batch: TrainBatch, minibatch: Sequence[int]) -> LossTotals:
    """Return the size of a minibatch; `minibatch` holds its indices into `batch`."""
    samples = [batch.samples[at].sample for at in minibatch]
    turns = [len(np.unique(sample.turn_index[sample.loss_mask])) for sample in samples]
    tokens = [int(sample.loss_mask.sum()) for sample in samples]
    return LossTotals(tokens=sum(tokens), turns=sum(turns), samples=sum(count > 0 for count in tokens))


def forward_pass(
    model: PolicyModel,
    batch: TrainBatch,
    places: Sequence[int],
    lengths: Sequence[int],
    dealt: DealtPass,
    totals: LossTotals,
    *,
    entropy: bool,
    values: bool = False,
    share: bool = False,
) -> ForwardPass:
    """Return the pass, with `share` a tree, over the samples at `places[i]`, cut to `lengths[i]`, for each i of `dealt`."""
    chosen, cuts = [places[i] for i in dealt.samples], [lengths[i] for i in dealt.samples]
    items = [batch.samples[at] for at in chosen]
    samples = [item.sample for item in items]
    masks = [sample.loss_mask[:length] for sample, length in zip(samples, cuts, strict=True)]
    ids = [sample.token_ids[:length] for sample, length in zip(samples, cuts, strict=True)]
    temperatures = [sample.temperatures[:length] for sample, length in zip(samples, cuts, strict=True)]
    counts = [int(mask.sum()) for mask in masks]

    def wanted(arrays: Sequence[np.ndarray]) -> Tensor:
        joined = np.concatenate([array[: len(mask)][mask] for array, mask in zip(arrays, masks, strict=True)])
        return torch.from_numpy(joined).to(model.device)

    def by_sample(values: Sequence[int | float], kind: type[np.generic]) -> Tensor:
        return torch.from_numpy(np.repeat(np.array(values, kind), counts)).to(model.device)

    trained_turns = [sample.turn_index[: len(mask)][mask] for sample, mask in zip(samples, masks, strict=True)]
    behavior = wanted([sample.behavior_logprobs for sample in samples])
    loss_batch = LossBatch(
        current_logprobs=behavior,
        proximal_logprobs=behavior,
        behavior_logprobs=behavior,
        advantages=wanted([item.advantages for item in items]),
        ages=wanted([batch.policy_version - sample.token_versions for sample in samples]),
        turn=torch.from_numpy(_dense_turns(trained_turns)).to(model.device),
        sample=by_sample(range(len(samples)), np.int64),
        group=by_sample(np.unique([item.group for item in items], return_inverse=True)[1].tolist(), np.int64),
        role=wanted([_given_or_zeros(item, item.roles) for item in items]),
        player=wanted([_given_or_zeros(item, item.players) for item in items]),
        rewards=by_sample([item.episode_return for item in items], np.float32),
        totals=totals,
        proximal_values=_wanted_if_given([item.values for item in items], wanted),
        value_targets=_wanted_if_given([item.value_targets for item in items], wanted),
    )
    computed = model.microbatch(ids, masks, temperatures, entropy=entropy, values=values, share=share)
    return ForwardPass(
        batch=computed,
        given=loss_batch,
        turns=wanted([sample.turn_index for sample in samples]),
        interrupted=wanted([interrupted(sample) for sample in samples]),
        tokens=computed.num_tokens,
        shared_tokens=sum(cuts) - computed.num_tokens,
        samples=tuple(chosen),
        ends=tuple(np.cumsum(counts).tolist()),
        weight=0.0 if dealt.is_filler else 1.0,
    )


def _wanted_if_given(
    arrays: Sequence[Float32Array | None], wanted: Callable[[Sequence[np.ndarray]], Tensor]
) -> Tensor | None:
    given = [each for each in arrays if each is not None]
    return wanted(given) if given and len(given) == len(arrays) else None


def _given_or_zeros(item: TrainSample, given: Int32Array | None) -> Int32Array:
    return np.zeros(len(item.sample.token_ids), np.int32) if given is None else given


def _dense_turns(by_sample: Sequence[Int32Array]) -> NDArray[np.int64]:
    """Return the turns of all samples, numbered from 0, for each of their tokens."""
    parts: list[NDArray[np.int64]] = []
    first = 0
    for turns in by_sample:
        present, at = np.unique(turns, return_inverse=True)
        parts.append(at.astype(np.int64) + first)
        first += len(present)
    return np.concatenate(parts)


def interrupted(sample: Sample) -> BoolArray:
    """Return, [L] bool, which tokens were sampled after the weights had changed within their turn.

    Under `inference.pause_mode: fast` the server sampled them from keys and values of earlier weights, so their recorded
    log-probs are not those of the version they carry. An update between a request and its first token leaves no trace.
    """
    result = np.zeros(len(sample.token_ids), np.bool_)
    sampled = np.flatnonzero(sample.token_versions >= 0)
    if len(sampled):
        turns, versions = sample.turn_index[sampled], sample.token_versions[sampled]
        starts = np.flatnonzero(np.concatenate([[True], turns[1:] != turns[:-1]]))
        result[sampled] = versions > np.repeat(versions[starts], np.diff(starts, append=len(turns)))
    return result


def check_batch(batch: TrainBatch, max_staleness: int) -> dict[str, float]:
    """Return the staleness and the token counts of `batch`.

    Raises:
        InvariantError: a trained token has no version of the run, a later version than the batch, or temperature 0.
        StaleDataError: a trained token is more than `max_staleness` versions behind `batch.policy_version`.
    """
    versions = np.concatenate([np.empty(0, np.int32), *(i.sample.token_versions[i.sample.loss_mask] for i in batch.samples)])
    temperatures = [i.sample.temperatures[i.sample.loss_mask].min(initial=np.inf) for i in batch.samples]
    if min(temperatures, default=np.inf) <= 0:
        raise InvariantError("a trained token was sampled at temperature 0: greedy tokens have no policy gradient")
    tokens = float(sum(len(item.sample.token_ids) for item in batch.samples))
    if not len(versions):
        return {"tokens": tokens, "loss_tokens": 0.0}
    oldest, newest = int(versions.min()), int(versions.max())
    if oldest < 1 or newest > batch.policy_version:
        raise InvariantError(
            f"trained tokens have policy versions from {oldest} to {newest}; expected 1 to {batch.policy_version}, the "
            "version being trained (version 0 is the weights that a server was launched with)"
        )
    if batch.policy_version - oldest > max_staleness:
        raise StaleDataError(
            f"a token sampled by version {oldest} reached the trainer at version {batch.policy_version}; at most "
            f"{max_staleness} version(s) behind are allowed (algorithm.max_staleness)"
        )
    return {
        "tokens": tokens,
        "loss_tokens": float(len(versions)),
        "max_staleness": float(batch.policy_version - oldest),
        "mean_staleness": float(batch.policy_version - versions.mean(dtype=np.float64)),
    }


def check_first_tokens(batch: TrainBatch) -> None:
    """Raise InvariantError if a sample trains its first token, which nothing predicts."""
    for number, item in enumerate(batch.samples):
        if len(item.sample.loss_mask) and item.sample.loss_mask[0]:
            raise InvariantError(f"sample {number} trains its first token, which nothing predicts")
