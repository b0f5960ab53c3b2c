"""Advantages, the loss, GAE and packing: pure functions. `loss` and `gae` need torch and are imported by module."""

from __future__ import annotations

from agentrl.algo.advantage import GroupAdvantages, advantages, token_advantages
from agentrl.algo.config import AlgorithmConfig
from agentrl.algo.packing import sorted_microbatches, split_minibatches

__all__ = [
    "AlgorithmConfig",
    "GroupAdvantages",
    "advantages",
    "sorted_microbatches",
    "split_minibatches",
    "token_advantages",
]
