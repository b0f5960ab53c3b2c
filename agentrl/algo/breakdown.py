"""Sums of the tokens of a minibatch by their age and by their turn, which add up over microbatches and ranks.

Invariant: a trained token counts for one age and for one turn. A bucket without tokens has no figures.

The figures are those of `agentrl.algo.loss.combine`, over the tokens of one bucket. The age of a token is the number of
versions between the policy that sampled it and the one that is trained.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

_AGE_STARTS = (0, 1, 2, 3, 4, 8)
_TURN_STARTS = (0, 1, 2, 3, 4, 8, 16)
_AGE_TERMS = ("tokens", "weight", "weight_squared", "difference", "signed", "clipped", "capped")
_TURN_TERMS = ("weight", "weighted_surprise")


def bucket_labels(starts: Sequence[int]) -> tuple[str, ...]:
    """Return a name for each bucket; each begins at its number and ends before the next.

    Example:
        >>> bucket_labels((0, 1, 2, 4, 8))
        ('0', '1', '2_to_3', '4_to_7', '8_up')
    """
    inner = (
        f"{start}" if end == start + 1 else f"{start}_to_{end - 1}"
        for start, end in itertools.pairwise(starts)
    )
    return (*inner, f"{starts[-1]}_up")


AGES, TURNS = bucket_labels(_AGE_STARTS), bucket_labels(_TURN_STARTS)
BREAKDOWN_SUMS = (
    *(f"{term}_by_age.{label}" for term in _AGE_TERMS for label in AGES),
    *(f"{term}_by_turn.{label}" for term in _TURN_TERMS for label in TURNS),
)
"""The names of the entries of what `breakdown_sums` returns."""


def breakdown_sums(terms: Mapping[str, Tensor], ages: Tensor | None, turns: Tensor | None) -> Tensor:
    """Return [len(BREAKDOWN_SUMS)] float64; 0 for what is not given.

    Args:
        terms: [..] each, 0 outside the loss mask: the terms of `agentrl.algo.loss` by name.
        ages: [..] int, versions behind, at least 0.
        turns: [..] int, number of the turn in its episode, from 0.
    """
    sides = {"signed": terms["positive"] | terms["negative"]}
    sides |= {name: terms[f"{name}_positive"] | terms[f"{name}_negative"] for name in ("clipped", "capped")}
    by_age = _sums({**terms, **sides}, _AGE_TERMS, ages, _AGE_STARTS)
    return torch.cat([by_age, _sums(terms, _TURN_TERMS, turns, _TURN_STARTS)])


def breakdown_figures(sums: Mapping[str, float]) -> dict[str, float]:
    """Return the figures of each age and turn that has tokens, from the sums by name."""
    figures: dict[str, float] = {}
    for label in AGES:
        tokens, weight, squared, difference, signed, clipped, capped = (
            sums[f"{term}_by_age.{label}"] for term in _AGE_TERMS
        )
        if tokens:
            figures[f"loss_tokens_by_age.{label}"] = tokens
            figures[f"effective_sample_size_by_age.{label}"] = weight**2 / (tokens * squared) if squared else 0.0
            figures[f"behavior_log_weight_mean_by_age.{label}"] = difference / tokens
        if signed:
            figures[f"clip_fraction_by_age.{label}"] = clipped / signed
            figures[f"cap_fraction_by_age.{label}"] = capped / signed
    for label in TURNS:
        weight, surprise = (sums[f"{term}_by_turn.{label}"] for term in _TURN_TERMS)
        if weight:
            figures[f"entropy_by_turn.{label}"] = surprise / weight
    return figures


def _sums(terms: Mapping[str, Tensor], names: Sequence[str], numbers: Tensor | None, starts: Sequence[int]) -> Tensor:
    """Return the sum of each term in each bucket, [len(names) * len(starts)] float64."""
    device = terms["tokens"].device
    if numbers is None:
        return torch.zeros(len(names) * len(starts), dtype=torch.float64, device=device)
    bounds = torch.tensor(starts, device=device)
    bucket = torch.bucketize(numbers.reshape(-1).long(), bounds, right=True) - 1
    members = (bucket[:, None] == torch.arange(len(starts), device=device)).double()
    return (torch.stack([terms[name].reshape(-1).double() for name in names]) @ members).reshape(-1)
