"""Log-probs from parts of the logits are those from all of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from agentrl.trainer.parallel.ranks import Ranks
from agentrl.trainer.parallel.tensor import vocabulary_part
from agentrl.types import Float32Array
from tests.support.ranks import on_ranks

_SIZES = [(6, 8), (1, 7), (5, 301)]
"""Tokens and vocabularies, some of which two and three ranks do not divide."""


def example(tokens: int, vocabulary: int, spread: float) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(tokens)
    logits = torch.randn(tokens, vocabulary, generator=random) * spread
    targets = torch.randint(vocabulary, (tokens,), generator=random)
    targets[0] = vocabulary - 1
    return logits, targets, torch.randn(tokens, generator=random)


def parts_of_logits(ranks: Ranks, spread: float) -> list[tuple[Float32Array, Float32Array]]:
    group = dist.group.WORLD
    assert group is not None
    results: list[tuple[Float32Array, Float32Array]] = []
    for tokens, vocabulary in _SIZES:
        logits, targets, weights = example(tokens, vocabulary, spread)
        part = vocabulary_part(vocabulary, group)
        mine = logits.chunk(ranks.world, 1)[ranks.rank].clone().requires_grad_()
        found = part.logprobs(mine, targets)
        (found * weights).sum().backward()
        assert mine.grad is not None
        results.append((found.detach().numpy(), mine.grad.numpy()))
    return results


@pytest.mark.starts
@pytest.mark.parametrize("spread", [1.0, 1e4])  # the latter overflows without the maximum
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.long)])
def test_log_probs_and_gradients_are_those_of_a_log_softmax_over_all_tokens(world: int, spread: float) -> None:
    found = on_ranks(world, parts_of_logits, spread)

    for number, (tokens, vocabulary) in enumerate(_SIZES):
        logits, targets, weights = example(tokens, vocabulary, spread)
        exact = logits.double().requires_grad_()
        expected = torch.log_softmax(exact, 1).gather(1, targets[:, None])[:, 0]
        (expected * weights).sum().backward()
        assert exact.grad is not None
        for logprobs, _ in (rank[number] for rank in found):
            np.testing.assert_allclose(logprobs, expected.detach().numpy(), rtol=1e-6, atol=1e-6)
        gradient = np.concatenate([rank[number][1] for rank in found], 1)
        np.testing.assert_allclose(gradient, exact.grad.numpy(), rtol=1e-5, atol=1e-6)
