"""Settings of the models beside the policy: a critic, whose values advantages need, and a reference policy.

Invariant: neither is ever sent to a server.
"""

from __future__ import annotations

from typing import Final, Literal

from pydantic import Field

from agentrl.config.base import Config

LR_FACTOR: Final = 10
"""A critic's learning rate over that of the policy, where none is given: its head begins at 0."""


class CriticConfig(Config):
    """A critic, which predicts the return from the tokens before a token; the term `value` trains it."""

    model: Literal["head", "trunk", "own"] = "head"
    """`head`: a linear head on the hidden states of the policy, which it leaves alone. `trunk`: its loss trains the policy's
    weights too. `own`: a second copy of `model.path` with a head."""
    lr: float | None = Field(default=None, gt=0)
    """Peak learning rate of its AdamW; none: ten times `trainer.lr`."""
    warmup_steps: int = Field(default=0, ge=0)
    """First batches of the run, from which the critic learns alone and the policy stays as it is."""


class ReferenceConfig(Config):
    """A frozen policy near which the policy stays: by the term `kl`, by the reward, or by both."""

    refresh_every: int = Field(default=0, ge=0)
    """Batches after which the weights of then take its place, again and again; 0: those that the run began with stay."""
    reward_weight: float = Field(default=0.0, ge=0)
    """Factor of each turn's KL to the reference, which is taken off the turn's reward; 0: rewards stay."""
    reward_k: Literal[1, 2, 3] = 1
    """Estimator of that KL: d, d^2 / 2, or exp(-d) - 1 + d, d = log mu - log reference; only 1 is unbiased in a reward."""
