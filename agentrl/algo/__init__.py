"""Advantages, losses, corrections, terms and packing: pure functions. `objective` and `loss_metrics` alone import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.support.exports import first_use

if TYPE_CHECKING:
    from agentrl.algo.advantages import GroupAdvantages
    from agentrl.algo.batch_advantages import token_advantages
    from agentrl.algo.config import AlgorithmConfig
    from agentrl.algo.packing import sorted_microbatches, split_minibatches

__all__ = [
    "AlgorithmConfig",
    "GroupAdvantages",
    "sorted_microbatches",
    "split_minibatches",
    "token_advantages",
]

__getattr__ = first_use(
    __name__,
    {
        "AlgorithmConfig": "agentrl.algo.config",
        "GroupAdvantages": "agentrl.algo.advantages",
        "sorted_microbatches": "agentrl.algo.packing",
        "split_minibatches": "agentrl.algo.packing",
        "token_advantages": "agentrl.algo.batch_advantages",
    },
)
