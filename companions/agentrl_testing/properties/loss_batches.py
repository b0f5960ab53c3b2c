"""Random batches of tokens for checks of losses: samples of several turns, from policies that differ.

Invariant: the samples of a batch have turns, groups and ids of their own, so any split into samples is a valid microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from agentrl.algo.loss_batch import LossBatch, LossTotals

SHAPE = ((3, 1), (2,), (4, 2, 1), (1, 1), (5,))
"""Tokens of each turn of each sample."""


def random_batch(seed: int, *, distance: float = 0.5, dtype: torch.dtype = torch.float64) -> LossBatch:
    """Return a batch of 5 samples whose three policies differ by about `distance` nats a token."""
    generator = torch.Generator().manual_seed(seed)
    turn = [number for number, tokens in enumerate(tokens for turns in SHAPE for tokens in turns) for _ in range(tokens)]
    sample = [number for number, turns in enumerate(SHAPE) for _ in range(sum(turns))]
    count, turns = len(turn), max(turn) + 1

    def noise() -> Tensor:
        return torch.randn(count, generator=generator, dtype=torch.float64)

    behavior = -noise().abs() - 0.05
    proximal = (behavior + distance * noise()).clamp(max=-0.01)
    current = (proximal + distance * noise()).clamp(max=-0.01)
    advantages = torch.randn(turns, generator=generator, dtype=torch.float64)
    advantages[1] = 0.0
    ids = torch.tensor(turn), torch.tensor(sample)
    return LossBatch(
        current_logprobs=current.to(dtype).requires_grad_(),
        proximal_logprobs=proximal.to(dtype),
        behavior_logprobs=behavior.to(dtype),
        advantages=advantages[ids[0]].to(dtype),
        ages=torch.randint(0, 5, (count,), generator=generator),
        turn=ids[0],
        sample=ids[1],
        group=ids[1] // 2,
        role=ids[0] % 2,
        player=ids[0] % 2,
        rewards=noise().to(dtype),
        totals=LossTotals(tokens=count, turns=turns, samples=len(SHAPE)),
        entropy=noise().abs().to(dtype).requires_grad_(),
        reference_logprobs=(behavior + distance * noise()).clamp(max=-0.01).to(dtype),
        values=noise().to(dtype).requires_grad_(),
        value_targets=noise().to(dtype),
        proximal_values=noise().to(dtype),
    )


def samples_of(batch: LossBatch, order: Sequence[int]) -> tuple[LossBatch, Tensor]:
    """Return the samples `order` of `batch` as a microbatch, and the places of its tokens in `batch`."""
    at = torch.cat([torch.nonzero(batch.sample == number)[:, 0] for number in order])
    tensors = {
        name: getattr(batch, name)[at]
        for name in LossBatch.__slots__
        if isinstance(getattr(batch, name), Tensor) and name not in {"turn", "sample", "group", "role", "player"}
    }
    ids = {name: _dense(getattr(batch, name)[at]) for name in ("turn", "sample", "group", "role", "player")}
    leaves = {name: tensors[name].detach().requires_grad_() for name in ("current_logprobs", "entropy", "values")}
    return replace(batch, **(tensors | leaves), **ids), at


def _dense(ids: Tensor) -> Tensor:
    return torch.unique(ids, return_inverse=True)[1]
