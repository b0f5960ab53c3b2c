"""From trajectories to a gradient: how samples are packed, padded, ordered and cut must not show in the result.

The model is one causal attention layer with learned positions, in float64: its log-probs depend on everything before a
token and on the position, so that a leak between samples, or from the padding, would show.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from agentrl.algo.batch_advantages import advantages, token_advantages
from agentrl.algo.loss_metrics import LossMetrics, combine
from agentrl.algo.packing import sorted_microbatches
from agentrl.types import Float32Array, Sample, StopReason, Trajectory, Turn, VersionSpan
from tests.algo.build import TURN, group, pad_right
from tests.algo.decoupled import decoupled_ppo_loss

VOCABULARY, WIDTH, POSITIONS = 11, 8, 64


class Model:
    """Log-probs of each token from those before it; parameters in one flat list."""

    def __init__(self, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        shapes = [(VOCABULARY, WIDTH), (POSITIONS, WIDTH), (WIDTH, 3 * WIDTH), (WIDTH, VOCABULARY)]
        self.parameters = [torch.randn(s, generator=g, dtype=torch.float64).requires_grad_() for s in shapes]

    def logprobs(self, ids: Tensor, positions: Tensor) -> Tensor:
        """[B, L] -> [B, L]: entry t is the log-prob of token t; the first is 0."""
        embed, place, mix, head = self.parameters
        hidden = embed[ids] + place[positions]
        q, k, v = (hidden @ mix).chunk(3, dim=-1)
        out = hidden + functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        logits = (out @ head)[:, :-1].log_softmax(-1)
        return functional.pad(logits.gather(-1, ids[:, 1:, None])[..., 0], (1, 0))


class Entry:
    """A sample and the advantages of its tokens."""

    def __init__(self, sample: Sample, values: Float32Array) -> None:
        self.sample = sample
        self.fields = {"mask": sample.loss_mask, "behavior": sample.behavior_logprobs, "advantages": values}


def random_group(seed: int) -> list[Entry]:
    """Return the samples of a group of 4 random trees of turns, with behavior log-probs off those of any model here."""
    rng = np.random.default_rng(seed)
    episodes: list[Trajectory] = []
    for _ in range(4):
        turns: list[Turn] = []
        for index in range(int(rng.integers(1, 5))):
            count = int(rng.integers(1, 5))
            turns.append(
                Turn(
                    context_ids=rng.integers(0, VOCABULARY, int(rng.integers(1, 6))).astype(np.int32),
                    output_ids=rng.integers(0, VOCABULARY, count).astype(np.int32),
                    output_logprobs=-rng.gamma(6.0, 0.6, count).astype(np.float32),
                    spans=(VersionSpan(start=0, end=count, version=0),),
                    stop_reason=StopReason.STOP,
                    reward=float(rng.normal()),
                    sent_after=index,
                    sent_at=2 * index,
                    rewarded_at=2 * index + 1,
                    parent=int(rng.integers(0, index)) if index else None,
                )
            )
        episodes.append(
            Trajectory(
                episode_id="e", task_id="t", turns=tuple(turns), stop_reason=StopReason.COMPLETED, final_reward=rng.normal()
            )
        )
    per_episode = advantages(group(episodes), TURN).per_turn
    return [
        Entry(sample, token_advantages(sample, per_turn))
        for e, per_turn in zip(episodes, per_episode, strict=True)
        for sample in e.branches()
    ]


Forward = Callable[[Model, Sequence[Entry]], Tensor]


def padded_forward(model: Model, part: Sequence[Entry]) -> Tensor:
    ids = torch.from_numpy(pad_right([e.sample.token_ids for e in part])).long()
    return model.logprobs(ids, torch.arange(ids.shape[1]).expand_as(ids))


def result(
    entries: Sequence[Entry], plan: Sequence[Sequence[int]], forward: Forward, *, padded: bool
) -> tuple[float, list[Tensor], dict[str, float]]:
    """Return loss, gradients and diagnostics of one optimizer batch, microbatch by microbatch."""
    model, proximal_model = Model(seed=1), Model(seed=1)
    with torch.no_grad():
        for parameter in proximal_model.parameters:
            parameter += 0.02 * torch.sin(torch.arange(parameter.numel(), dtype=torch.float64)).view_as(parameter)
    count = sum(int(e.sample.loss_mask.sum()) for e in entries)
    total = 0.0
    metrics: list[LossMetrics] = []
    for indices in plan:
        part = [entries[i] for i in indices]
        join = pad_right if padded else np.concatenate
        arrays = {
            name: torch.from_numpy(join([e.fields[name] for e in part])) for name in ("mask", "behavior", "advantages")
        }
        with torch.no_grad():
            proximal = forward(proximal_model, part)
        out = decoupled_ppo_loss(
            forward(model, part),
            proximal,
            arrays["behavior"],
            arrays["advantages"],
            arrays["mask"],
            num_loss_tokens=count,
            config=TURN,
        )
        out.loss.backward()
        total += out.loss.item()
        metrics.append(out.metrics)
    return total, [p.grad for p in model.parameters if p.grad is not None], combine(metrics)


@settings(max_examples=20)
@given(st.integers(0, 10_000), st.integers(10, 200))
def test_packing_padding_order_and_microbatches_do_not_show(seed: int, budget: int) -> None:
    entries = random_group(seed)
    lengths = [len(e.sample.token_ids) for e in entries]
    alone = [[i] for i in range(len(entries))]
    everything = [list(np.random.default_rng(seed).permutation(len(entries)))]
    reference = result(entries, alone, padded_forward, padded=True)
    others = [
        result(entries, everything, padded_forward, padded=True),
        result(entries, sorted_microbatches(lengths, budget), padded_forward, padded=True),
        result(entries[::-1], alone, padded_forward, padded=True),
    ]
    for total, gradients, metrics in others:
        assert total == pytest.approx(reference[0], rel=1e-9, abs=1e-12)
        assert metrics == pytest.approx(reference[2], rel=1e-9, abs=1e-12)
        for got, expected in zip(gradients, reference[1], strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


def test_a_leak_between_samples_would_show() -> None:
    """The negative control: samples laid end to end as one sequence give another loss."""
    entries = random_group(0)
    alone = result(entries, [[i] for i in range(len(entries))], padded_forward, padded=True)

    def leaking(model: Model, part: Sequence[Entry]) -> Tensor:
        ids = torch.from_numpy(np.concatenate([e.sample.token_ids for e in part])).long()
        return model.logprobs(ids[None], torch.arange(len(ids))[None] % POSITIONS)[0]

    mixed = result(entries, [[0, 1], list(range(2, len(entries)))], leaking, padded=False)
    assert abs(mixed[0] - alone[0]) > 1e-3
