"""Decoupled PPO through the slots is the loss that agentrl had before there were slots.

`decoupled_golden.json` holds what the function of commit 6101e7f gave for these inputs: loss, gradient and diagnostics.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from agentrl.algo.config import AlgorithmConfig
from agentrl.algo.loss_metrics import combine
from tests.algo.decoupled import decoupled_ppo_loss

GOLDEN = json.loads((Path(__file__).parent / "decoupled_golden.json").read_text())


@pytest.mark.parametrize("mode", ["clamp", "mask"])
def test_loss_gradient_and_diagnostics_are_those_from_before_the_slots(mode: str) -> None:
    random = np.random.default_rng(7)
    behavior = -random.uniform(0.1, 4, 32)
    proximal = behavior + random.normal(0, 0.8, 32)
    current = torch.tensor(proximal + random.normal(0, 0.4, 32), requires_grad=True)
    mask = random.random(32) < 0.75
    advantages = random.normal(0, 1, 32)
    ages, turns = random.integers(0, 6, 32), random.integers(0, 9, 32)
    config = AlgorithmConfig.model_validate(
        {"clip_low": 0.2, "clip_high": 0.28, "behavior_weight_cap": 2.0, "behavior_weight_mode": mode}
    )
    result = decoupled_ppo_loss(
        current,
        *(torch.from_numpy(each) for each in (proximal, behavior, advantages, mask)),
        num_loss_tokens=40,
        config=config,
        ages=torch.from_numpy(ages),
        turns=torch.from_numpy(turns),
    )
    result.loss.backward()
    assert current.grad is not None
    # Sums over selected tokens and sums with zeros round differently: the last bits of float64.
    assert result.loss.item() == pytest.approx(GOLDEN[mode]["loss"], rel=1e-14)
    np.testing.assert_allclose(current.grad.numpy(), GOLDEN[mode]["gradient"], rtol=1e-14)
    assert {name: combine([result.metrics])[name] for name in GOLDEN[mode]["metrics"]} == pytest.approx(
        GOLDEN[mode]["metrics"], rel=1e-13
    )
